"""`checkmate plan --capacity`: check whether shadow nodes, NICs and switches suffice for a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from checkmate.base.wording import counted
from checkmate.cli.common import UsageFault, err, out, print_json
from checkmate.cli.planning.options import quantity
from checkmate.job.files import JobError, JobSet, Located
from checkmate.job.schema import Job, Nic
from checkmate.output.consoles import spinner
from checkmate.output.tables import FittedTable
from checkmate.planner.capacity import part_checks, report
from checkmate.planner.capacity.misfits import Check, checks
from checkmate.planner.capacity.plan import Capacity, CapacityLimits, SwitchUse
from checkmate.planner.demand import Demand
from checkmate.planner.models.named import Model, load_model, sharded, stages_of
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.part_demand import PartDemand
from checkmate.planner.scaling import read_profile
from checkmate.planner.units import bits_per_second, nbytes, seconds
from checkmate.shadow.receive.connect import ORDINARY_BUFFER
from controlplane import plan as planning


class DoesNotFit(JobError):
    """The shadow nodes or switches are too small for a job; `data` has the whole plan."""

    def __init__(self, faults: Sequence[Located], data: Mapping[str, object]) -> None:
        super().__init__(faults)
        self.data = data


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """The options of `plan --capacity`."""

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
    gpus_per_host: int
    pcie_rate: str | None
    host_memory: str | None


@dataclass(frozen=True)
class _Plan:
    """A capacity plan with its checks, as data, and as tables."""

    capacity: Capacity
    checks: Sequence[Check]
    unchecked: Sequence[str]
    data: dict[str, object]
    tables: Iterator[FittedTable]


def show(job_set: JobSet, options: CapacityOptions, *, as_json: bool) -> None:
    """Print a job's capacity plan, verdict first. Raise `DoesNotFit` afterwards if it does not fit."""
    jobs = job_set.require()
    if len(jobs) > 1:
        raise UsageFault(f"--capacity takes one job and its model, not {len(jobs)} jobs")
    ((file, job),) = job_set.sound
    with spinner(err, "planning"):
        optimizer = NamedOptimizer(options.optimizer)
        if optimizer.copied and job.copies == "switch":
            raise UsageFault(
                f"--optimizer {options.optimizer}: shadow nodes can't repeat its steps, and its state can be "
                "copied by hosts only, copies: host"
            )
        stages = _stages(job, options.models, options.dtype)
        link = quantity("--link-rate", options.link_rate, bits_per_second)
        limits = _limits(options)
        if options.profile is not None:
            limits = _with_profile(limits, options.profile, options.cores, stages, optimizer)
        elif options.cores:
            raise UsageFault("--cores scales the step time of a profile: add --profile")
        plan = _PLANS[job.copies](job, stages, optimizer, link, limits, options)
    if not as_json:
        out.print(report.verdict(plan.capacity, plan.checks, plan.unchecked), markup=False, soft_wrap=True)
        for table in plan.tables:
            out.print(table)
    for text in plan.unchecked:
        err.print(f"[yellow]not checked:[/yellow] {text}", soft_wrap=True)
    if faults := [fault for check in plan.checks if (fault := check.misfit)]:
        located = [job_set.located(file, f.path, f.message) for f in faults]
        raise DoesNotFit(located, {"capacity": plan.data})
    if as_json:
        print_json(plan.data)


def _plan_of_switches(
    job: Job,
    stages: Sequence[Model],
    optimizer: NamedOptimizer,
    link: float,
    limits: CapacityLimits,
    options: CapacityOptions,
) -> _Plan:
    demand = Demand(job, tuple(stages), optimizer, link, options.receive_buffer << 20)
    capacity = Capacity(demand, limits, tuple(_switches(job)))
    results = checks(capacity, lambda channels: _switches(replace(job, channels=channels)))
    tables = itertools.chain(
        report.summary(capacity, results), report.details(capacity) if options.details else ()
    )
    return _Plan(capacity, results, capacity.unchecked, report.data(capacity, results), tables)


def _plan_of_hosts(
    job: Job,
    stages: Sequence[Model],
    optimizer: NamedOptimizer,
    link: float,
    limits: CapacityLimits,
    options: CapacityOptions,
) -> _Plan:
    demand = PartDemand(
        job, tuple(stages), optimizer, link, ORDINARY_BUFFER, gpus_per_host=options.gpus_per_host
    )
    capacity = Capacity(demand, limits, ())
    results, unchecked = part_checks.checks(capacity, demand), part_checks.unchecked(capacity)
    tables = itertools.chain(
        report.part_summary(capacity, demand, results),
        report.part_details(capacity, demand) if options.details else (),
    )
    return _Plan(capacity, results, unchecked, report.part_data(capacity, demand, results, unchecked), tables)


_PLANS: Final = {"switch": _plan_of_switches, "host": _plan_of_hosts}


def _stages(job: Job, names: Sequence[str], dtype: str | None) -> list[Model]:
    """Return the model of each DP group: one given model, cut into stages and shards, or one for each."""
    groups = len(job.dp_groups)
    if not names:
        raise UsageFault("--capacity needs --model: a model's name, or module:function")
    if len(names) not in (1, groups):
        raise UsageFault(
            f"--model is given {counted(len(names), 'time')}; job {job.job} has {counted(groups, 'DP group')}"
        )
    models = [load_model(name, dtype) for name in names]
    if len(models) == groups:
        return models
    if job.mesh is None:
        beside = job.groups_by_hosts()
        stages = stages_of(models[0], len(beside))
        of_group = {group: stage for stage, members in zip(stages, beside, strict=True) for group in members}
        return [of_group[group] for group in job.groups]
    parts = job.mesh.dp_shard * job.mesh.tp
    chunks = (sharded(stage, parts) for stage in stages_of(models[0], job.mesh.pp))
    return [chunk for chunk in chunks for _ in range(groups // job.mesh.pp)]


def _limits(options: CapacityOptions) -> CapacityLimits:
    def optional(name: str, text: str | None, parse: Callable[[object], float]) -> float | None:
        return quantity(name, text, parse) if text else None

    node_memory = optional("--node-memory", options.node_memory, nbytes)
    host_memory = optional("--host-memory", options.host_memory, nbytes)
    return CapacityLimits(
        quantity("--nic-rate", options.nic_rate or options.link_rate, bits_per_second),
        optional("--iteration-time", options.iteration_time, seconds),
        None if node_memory is None else int(node_memory),
        pcie_bits_per_s=optional("--pcie-rate", options.pcie_rate, bits_per_second),
        host_memory=None if host_memory is None else int(host_memory),
    )


def _with_profile(
    limits: CapacityLimits,
    file: Path,
    cores: int | None,
    models: Sequence[Model],
    optimizer: NamedOptimizer,
) -> CapacityLimits:
    """Return the limits with a profile's; nodes that store copies of state take no steps."""
    profile = read_profile(file)
    return replace(
        limits,
        cores=cores or profile.cores,
        steps=None
        if optimizer.copied
        else tuple(profile.steps_of(model, optimizer.name) for model in models),
        receive_bytes_per_s=profile.receive_bytes_per_s,
    )


def _switches(job: Job) -> list[SwitchUse]:
    """Return what the control plane would install with every stream connected."""
    targets: dict[str, str] = {switch.name: switch.target for switch in job.fabric.switches}
    holds = {target: planning.limits(target) for target in planning.MAX_GROUPS}
    uses = []
    for name, plan in planning.plan([job]).items():
        ports = [isinstance(host, Nic) for _, host in job.interfaces() if host.switch == name]
        sides = ports.count(False), ports.count(True)
        uses.append(SwitchUse(name, targets[name], plan.usage(), holds, *sides))
    return uses
