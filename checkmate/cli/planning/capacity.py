"""`checkmate plan --capacity`: check whether shadow nodes, NICs and switches suffice for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from checkmate.base.wording import counted
from checkmate.cli.common import UsageFault, err, out, print_json
from checkmate.cli.planning.options import quantity
from checkmate.job.files import JobError, JobSet, Located
from checkmate.job.schema import Job, Nic
from checkmate.output.consoles import spinner
from checkmate.planner.capacity import report
from checkmate.planner.capacity.misfits import checks
from checkmate.planner.capacity.plan import Capacity, CapacityLimits, SwitchUse
from checkmate.planner.demand import Demand
from checkmate.planner.models.named import Model, load_model, sharded, stages_of
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.scaling import read_profile
from checkmate.planner.units import bits_per_second, nbytes, seconds
from controlplane import plan as planning


class DoesNotFit(JobError):
    """The shadow nodes or switches are too small for a job; `data` has the whole plan."""

    def __init__(self, faults: Sequence[Located], data: Mapping[str, object]) -> None:
        super().__init__(faults)
        self.data = data


def show(
    job_set: JobSet,
    *,
    models: Sequence[str],
    optimizer: str,
    dtype: str | None,
    iteration_time: str | None,
    link_rate: str,
    nic_rate: str | None,
    node_memory: str | None,
    profile: Path | None,
    cores: int | None,
    receive_buffer: int,
    details: bool,
    as_json: bool,
) -> None:
    """Print a job's capacity plan, verdict first. Raise `DoesNotFit` afterwards if it does not fit."""
    jobs = job_set.require()
    if len(jobs) > 1:
        raise UsageFault(f"--capacity takes one job and its model, not {len(jobs)} jobs")
    ((file, job),) = job_set.sound
    with spinner(err, "planning"):
        named_optimizer = NamedOptimizer(optimizer)
        stages = _stages(job, models, dtype)
        link = quantity("--link-rate", link_rate, bits_per_second)
        limits = _limits(iteration_time, node_memory, nic_rate or link_rate)
        if profile is not None:
            limits = _with_profile(limits, profile, cores, stages, named_optimizer.name)
        elif cores:
            raise UsageFault("--cores scales the step time of a profile: add --profile")
        demand = Demand(job, tuple(stages), named_optimizer, link, receive_buffer << 20)
        plan = Capacity(demand, limits, tuple(_switches(job)))
        results = checks(plan, lambda channels: _switches(replace(job, channels=channels)))
        data = report.data(plan, results)
    if not as_json:
        out.print(report.verdict(plan, results), markup=False, soft_wrap=True)
        for table in (*report.summary(plan, results), *(report.details(plan) if details else ())):
            out.print(table)
    for text in plan.unchecked:
        err.print(f"[yellow]not checked:[/yellow] {text}", soft_wrap=True)
    if faults := [fault for check in results if (fault := check.misfit)]:
        located = [job_set.located(file, f.path, f.message) for f in faults]
        raise DoesNotFit(located, {"capacity": data})
    if as_json:
        print_json(data)


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


def _limits(iteration_time: str | None, node_memory: str | None, nic_rate: str) -> CapacityLimits:
    iteration = quantity("--iteration-time", iteration_time, seconds) if iteration_time else None
    memory = int(quantity("--node-memory", node_memory, nbytes)) if node_memory else None
    return CapacityLimits(quantity("--nic-rate", nic_rate, bits_per_second), iteration, memory)


def _with_profile(
    limits: CapacityLimits, file: Path, cores: int | None, models: Sequence[Model], optimizer: str
) -> CapacityLimits:
    profile = read_profile(file)
    return replace(
        limits,
        cores=cores or profile.cores,
        steps=tuple(profile.steps_of(model, optimizer) for model in models),
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
