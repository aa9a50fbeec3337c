"""`checkmate plan --capacity`: check whether shadow nodes, NICs and switches suffice for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkmate.cli.common import UsageFault, err, out, print_json
from checkmate.cli.planning.model_options import quantity
from checkmate.job.files import JobError, JobSet, Located, locate
from checkmate.job.schema import Job
from controlplane import plan as planning
from controlplane.errors import ControlError
from controlplane.p4runtime.codec import Codec

if TYPE_CHECKING:
    from checkmate.planner.capacity.plan import Capacity, Limits, SwitchUse
    from checkmate.planner.models.named import Model

CapacityFlag = Annotated[
    bool, typer.Option("--capacity", help="Check NICs, memory and time for --model as well.")
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Named model, or module:function; once, to be cut into DP groups, or once for each DP group.",
        show_default=False,
    ),
]
LinkRate = Annotated[
    str, typer.Option("--link-rate", help="Line rate of each training rank.", metavar="RATE")
]
NicRate = Annotated[
    str | None,
    typer.Option(
        "--nic-rate", help="Line rate of each shadow NIC.", show_default="as --link-rate", metavar="RATE"
    ),
]
NodeMemory = Annotated[
    str | None,
    typer.Option(
        "--node-memory", help="Memory of a shadow node, such as 128GB.", show_default=False, metavar="SIZE"
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Output of `checkmate profile --json` on a shadow node."),
]
Cores = Annotated[
    int | None,
    typer.Option("--cores", min=1, help="Cores of a shadow node.", show_default="as in the profile"),
]
Details = Annotated[
    bool, typer.Option("--details", help="With --capacity: also list every switch, NIC, node and shard.")
]


@dataclass(frozen=True)
class CapacityOptions:
    """The options of `--capacity`, as given."""

    models: Sequence[str]
    optimizer: str
    dtype: str | None
    iteration_time: str | None
    link_rate: str
    nic_rate: str | None
    node_memory: str | None
    profile: Path | None
    cores: int | None
    receive_buffer: int
    details: bool


OPTIONS = tuple(field.name for field in fields(CapacityOptions))
"""Options that only apply with `--capacity`."""


class DoesNotFit(JobError):
    """The shadow nodes or switches are too small for a job; `data` has the whole plan."""

    def __init__(self, faults: Sequence[Located], data: Mapping[str, object]) -> None:
        super().__init__(faults)
        self.data = data


def show(found: JobSet, wanted: CapacityOptions, *, as_json: bool) -> None:
    """Print a job's capacity plan, verdict first. Raise `DoesNotFit` afterwards if it does not fit."""
    jobs = found.require()
    if len(jobs) > 1:
        raise UsageFault(f"--capacity takes one job and its model, not {len(jobs)} jobs")
    ((file, job),) = found.sound
    with err.status("planning", spinner="line"):
        from checkmate.planner.capacity import report  # noqa: PLC0415 - torch takes a second
        from checkmate.planner.capacity.misfits import checks  # noqa: PLC0415

        plan = _capacity(job, wanted)
        checked = checks(plan, lambda channels: _switches(_with_channels(job, channels)))
        data = report.data(plan, checked)
        verdict = report.verdict(plan, checked)
        tables = [*report.summary(plan, checked)]
        tables += report.details(plan) if wanted.details else []
    if not as_json:
        out.print(verdict, markup=False, soft_wrap=True)
        for table in tables:
            out.print(table)
    for text in plan.unchecked:
        err.print(f"[yellow]not checked:[/yellow] {text}", soft_wrap=True)
    if faults := [fault for check in checked if (fault := check.misfit)]:
        located = [Located(*locate(file, f.path), _shown(f.path), f.message) for f in faults]
        raise DoesNotFit(located, {"capacity": data})
    if as_json:
        print_json(data)


def _capacity(job: Job, wanted: CapacityOptions) -> Capacity:
    from checkmate.planner.capacity.plan import Capacity  # noqa: PLC0415
    from checkmate.planner.demand import Demand, Setting  # noqa: PLC0415
    from checkmate.planner.models.optimizers import NamedOptimizer  # noqa: PLC0415
    from checkmate.planner.units import bits_per_second  # noqa: PLC0415

    optimizer = NamedOptimizer(wanted.optimizer)
    models = _models(job, wanted)
    link = quantity("--link-rate", wanted.link_rate, bits_per_second)
    setting = Setting(optimizer, link, wanted.receive_buffer << 20)
    limits = _limits(wanted, models, optimizer.name, link)
    return Capacity(Demand(job, tuple(models), setting), limits, tuple(_switches(job)))


def _models(job: Job, wanted: CapacityOptions) -> list[Model]:
    from checkmate.planner.models.named import load_model, stages_of  # noqa: PLC0415

    groups = len(job.dp_groups)
    if not wanted.models:
        raise UsageFault("--capacity needs --model: a model's name, or module:function")
    if len(wanted.models) not in (1, groups):
        raise UsageFault(f"--model is given {len(wanted.models)} times; job {job.job} has {groups} DP groups")
    models = [load_model(name, wanted.dtype) for name in wanted.models]
    return models if len(models) == groups else stages_of(models[0], groups)


def _limits(wanted: CapacityOptions, models: Sequence[Model], optimizer: str, link: float) -> Limits:
    from checkmate.planner.capacity.plan import Limits  # noqa: PLC0415
    from checkmate.planner.scaling import read_profile  # noqa: PLC0415
    from checkmate.planner.units import bits_per_second, nbytes, seconds  # noqa: PLC0415

    iteration = wanted.iteration_time and quantity("--iteration-time", wanted.iteration_time, seconds)
    memory = wanted.node_memory and quantity("--node-memory", wanted.node_memory, nbytes)
    nic = quantity("--nic-rate", wanted.nic_rate, bits_per_second) if wanted.nic_rate else link
    if wanted.cores and wanted.profile is None:
        raise UsageFault("--cores scales the step time of a profile: add --profile")
    if wanted.profile is None:
        return Limits(nic, iteration or None, int(memory) if memory else None)
    profile = read_profile(wanted.profile)
    return Limits(
        nic,
        iteration or None,
        int(memory) if memory else None,
        wanted.cores or profile.cores,
        tuple(profile.steps_of(model, optimizer) for model in models),
        profile.receive_bytes_per_s,
    )


def _switches(job: Job) -> list[SwitchUse]:
    """Return what the control plane would install with every stream connected."""
    from checkmate.planner.capacity.plan import SwitchUse  # noqa: PLC0415

    targets: dict[str, str] = {switch.name: switch.target for switch in job.fabric.switches}
    holds = {target: limits for target in planning.GROUPS_MAX if (limits := _limits_of(target))}
    found = []
    for name, plan in planning.plan([job]).items():
        ranks = sum(rank.switch == name for group in job.dp_groups for rank in group.ranks)
        nics = sum(nic.switch == name for node in job.shadow_nodes for nic in node.nics)
        own = {targets[name]: table_limits(targets[name])}
        found.append(SwitchUse(name, targets[name], plan.usage(), {**holds, **own}, ranks, nics))
    return found


@cache
def table_limits(target: str) -> Mapping[str, int]:
    """Return a target's capacity for each kind of entity. Raise `NotCompiled` if it has no P4Info."""
    return planning.limits(target, Codec.for_target(target).table_sizes())


def _limits_of(target: str) -> Mapping[str, int] | None:
    """Return the limits of any target, or `None` if it has no P4Info."""
    try:
        return table_limits(target)
    except ControlError:
        return None


def _with_channels(job: Job, channels: int) -> Job:
    return job.model_copy(update={"channels": channels})


def _shown(path: Sequence[str | int]) -> str:
    from checkmate.job.faults import show_path  # noqa: PLC0415

    return show_path(tuple(path))
