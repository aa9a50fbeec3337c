"""`checkmate plan --capacity`: whether shadow nodes, NICs and switches are enough for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkmate.cli.common import UsageFault, err, out, print_json
from checkmate.cli.model_options import quantity
from checkmate.jobs import JobError, JobSet, Located, locate
from checkmate.schema import Job
from controlplane import plan as planning
from controlplane.codec import Codec
from controlplane.errors import ControlError

if TYPE_CHECKING:
    from planner.capacity import Capacity, Limits, SwitchUse
    from planner.models import Model

CapacityFlag = Annotated[
    bool, typer.Option("--capacity", help="Also: are NICs, memory and time enough for --model?")
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A named model, or module:function. Once: cut into a stage for each DP group; or once for each.",
        show_default=False,
    ),
]
LinkRate = Annotated[str, typer.Option("--link-rate", help="Line rate of a training rank.", metavar="RATE")]
NicRate = Annotated[
    str | None,
    typer.Option(
        "--nic-rate", help="Line rate of a shadow NIC.", show_default="as --link-rate", metavar="RATE"
    ),
]
NodeMemory = Annotated[
    str | None,
    typer.Option(
        "--node-memory", help="Of a shadow node, such as 128GB.", show_default=False, metavar="SIZE"
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="What `checkmate profile --json` printed on a shadow node."),
]
Cores = Annotated[
    int | None,
    typer.Option("--cores", min=1, help="Of a shadow node.", show_default="the profile's"),
]
Details = Annotated[
    bool, typer.Option("--details", help="With --capacity: every switch, NIC, node and shard too.")
]


@dataclass(frozen=True)
class Wanted:
    """The options of `--capacity`, as they were given."""

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


OPTIONS = tuple(field.name for field in fields(Wanted))
"""Those that say nothing without `--capacity`."""


class DoesNotFit(JobError):
    """A job that shadow nodes or switches are too small for; `data` has the whole plan."""

    def __init__(self, faults: Sequence[Located], data: Mapping[str, object]) -> None:
        super().__init__(faults)
        self.data = data


def show(found: JobSet, wanted: Wanted, *, as_json: bool) -> None:
    """Print a job's capacity plan, the verdict first. `DoesNotFit` then, where something doesn't."""
    jobs = found.require()
    if len(jobs) > 1:
        raise UsageFault(f"--capacity plans one job with its model, not {len(jobs)}")
    ((file, job),) = found.sound
    with err.status("planning", spinner="line"):
        from planner import capacity_report  # noqa: PLC0415 - torch takes a second
        from planner.misfits import checks  # noqa: PLC0415

        plan = _capacity(job, wanted)
        checked = checks(plan, lambda channels: _switches(_with_channels(job, channels)))
        data = capacity_report.data(plan, checked)
        verdict = capacity_report.verdict(plan, checked)
        tables = [*capacity_report.summary(plan, checked)]
        tables += capacity_report.details(plan) if wanted.details else []
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


def _capacity(job: Job, wanted: Wanted) -> Capacity:
    from planner.capacity import Capacity  # noqa: PLC0415
    from planner.demand import Demand, Setting  # noqa: PLC0415
    from planner.optimizers import NamedOptimizer  # noqa: PLC0415
    from planner.units import bits_per_second  # noqa: PLC0415

    optimizer = NamedOptimizer(wanted.optimizer)
    models = _models(job, wanted)
    link = quantity("--link-rate", wanted.link_rate, bits_per_second)
    setting = Setting(optimizer, link, wanted.receive_buffer << 20)
    limits = _limits(wanted, models, optimizer.name, link)
    return Capacity(Demand(job, tuple(models), setting), limits, tuple(_switches(job)))


def _models(job: Job, wanted: Wanted) -> list[Model]:
    from planner.models import load_model, stages_of  # noqa: PLC0415

    groups = len(job.dp_groups)
    if not wanted.models:
        raise UsageFault("--capacity needs --model: a model's name, or module:function")
    if len(wanted.models) not in (1, groups):
        raise UsageFault(f"--model is given {len(wanted.models)} times; job {job.job} has {groups} DP groups")
    models = [load_model(name, wanted.dtype) for name in wanted.models]
    return models if len(models) == groups else stages_of(models[0], groups)


def _limits(wanted: Wanted, models: Sequence[Model], optimizer: str, link: float) -> Limits:
    from planner.capacity import Limits  # noqa: PLC0415
    from planner.scaling import read_profile  # noqa: PLC0415
    from planner.units import bits_per_second, nbytes, seconds  # noqa: PLC0415

    iteration = wanted.iteration_time and quantity("--iteration-time", wanted.iteration_time, seconds)
    memory = wanted.node_memory and quantity("--node-memory", wanted.node_memory, nbytes)
    nic = quantity("--nic-rate", wanted.nic_rate, bits_per_second) if wanted.nic_rate else link
    if wanted.cores and wanted.profile is None:
        raise UsageFault("--cores says for how many the profile's step is scaled: give --profile")
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
    """What the control plane would install, with every stream connected."""
    from planner.capacity import SwitchUse  # noqa: PLC0415

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
    """How much of each thing a target holds. `NotCompiled` where its P4Info isn't there."""
    return planning.limits(target, Codec.for_target(target).table_sizes())


def _limits_of(target: str) -> Mapping[str, int] | None:
    """The same of a target that the job may not have; `None` where its P4Info isn't there."""
    try:
        return table_limits(target)
    except ControlError:
        return None


def _with_channels(job: Job, channels: int) -> Job:
    return job.model_copy(update={"channels": channels})


def _shown(path: Sequence[str | int]) -> str:
    from checkmate.parts import show_path  # noqa: PLC0415

    return show_path(tuple(path))
