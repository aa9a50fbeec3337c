"""`checkmate plan`: print what would be installed, without a switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from checkmate.base.wording import in_ranges
from checkmate.cli.common import (
    AsJson,
    FabricOption,
    JobArguments,
    UsageFault,
    err,
    out,
    print_json,
    read_job_set,
    show_errors,
)
from checkmate.cli.planning import options, tofino
from checkmate.job import mesh, mesh_groups
from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.files import JobSet, Located
from checkmate.job.schema import Job
from checkmate.output.consoles import spinner
from checkmate.output.tables import FittedTable
from checkmate.planner.part_plan import node_plans, rank_share
from controlplane import plan as planning
from controlplane.entities import MulticastGroup, TableEntry
from controlplane.network import Network
from controlplane.plan import SwitchPlan

_OPTIONS = {"models": "model"}
"""Parameters whose options have a different name."""


def check_plan(job_set: JobSet, more: Iterable[Located] = ()) -> tuple[list[Job], dict[str, SwitchPlan]]:
    """Return the jobs and the plan of every switch, checked against the switch's limits.

    `more`: faults that the caller has found.

    Raises:
        JobError: with every fault of the files, and every limit that valid jobs exceed, even if other files
            are faulty.
    """
    jobs = [job for _, job in job_set.sound]
    with spinner(err, "planning"):
        excesses = [excess for job in jobs for excess in planning.fabric_excesses(Network([job]))]
        plans = {} if excesses else planning.plan(jobs)
    targets = _targets(jobs)
    excesses += [
        excess
        for name, plan in plans.items()
        for excess in planning.excesses(plan, targets[name], planning.limits(targets[name]))
    ]
    too_much: list[Located] = []
    for file, job in job_set.sound:
        names = {switch.name for switch in job.fabric.switches}
        if job_excesses := [excess for excess in excesses if excess.switch in names]:
            place = job_set.located(file, (mesh.groups_key(job),), "")  # once: it reads the file again
            too_much += [replace(place, message=str(excess)) for excess in job_excesses]
    return job_set.require([*too_much, *more]), plans


def _targets(jobs: Sequence[Job]) -> dict[str, str]:
    return {switch.name: switch.target for job in jobs for switch in job.fabric.switches}


@show_errors
def plan(
    context: typer.Context,
    jobs: JobArguments,
    fabric: FabricOption = None,
    as_json: AsJson = False,
    entries: Annotated[bool, typer.Option("--entries", help="Print all entries and groups.")] = False,
    pfc: tofino.PfcFlag = False,
    bfrt: tofino.BfrtFlag = False,
    switch: tofino.SwitchName = None,
    capacity: options.CapacityFlag = False,
    models: options.ModelNames = None,
    optimizer: options.Optimizer = "adamw",
    dtype: options.Dtype = None,
    iteration_time: options.IterationTime = None,
    link_rate: options.LinkRate = "100Gbit/s",
    nic_rate: options.NicRate = None,
    node_memory: options.NodeMemory = None,
    profile: options.ProfileFile = None,
    cores: options.Cores = None,
    receive_buffer: options.ReceiveBuffer = 64,
    gpus_per_host: options.GpusPerHost = 1,
    pcie_rate: options.PcieRate = None,
    host_memory: options.HostMemory = None,
    details: options.Details = False,
) -> None:
    """Print what `run` would install on each switch, and check it against the switch's limits.

    Needs no switch. Streams are installed as shadow nodes connect; the limits count all of them.
    Of jobs with copies by hosts, it prints who sends what to whom.
    With --capacity and --model, for one job: also checks the bandwidth at its shadow NICs, and the memory
    and time of its shadow nodes; with copies by hosts, what ranks send and keep, too. Prints first whether it
    fits, the tightest resource, and the smallest change that makes it fit.
    With --pfc, for Tofinos: prints what lossless delivery needs. With --bfrt: prints a script with settings
    that P4Runtime cannot make.

    Example: checkmate plan jobs/gpt.yaml --json

    Example: checkmate plan jobs/gpt.yaml --capacity --model GPT3-XL --iteration-time 1.5s

    Example: checkmate plan jobs/ --bfrt --switch tor > tor.py
    """
    _check_options(context)
    job_set = read_job_set(jobs, fabric)
    if not job_set.faults:
        _check_copies(context, [job for _, job in job_set.sound])
    if capacity:
        with spinner(err, "planning"):
            from checkmate.cli.planning.capacity import CapacityOptions, show  # noqa: PLC0415 - imports torch

        names = CapacityOptions.__dataclass_fields__  # as this function's own parameters
        values = {**{name: context.params[name] for name in names}, "models": models or ()}
        show(job_set, CapacityOptions(**values), as_json=as_json)
        return
    loaded, plans = check_plan(job_set)
    if pfc or bfrt:
        tofino.show(job_set, loaded, plans, bfrt=bfrt, only=switch, as_json=as_json)
        return
    targets = _targets(loaded)
    if as_json:
        switches = {name: _data(plan, targets[name]) for name, plan in plans.items()}
        print_json({"switches": switches, "jobs": {job.job: _job_data(job) for job in loaded}})
        return
    for job in loaded:
        if job.copies == "host":
            out.print(_senders_table(job))
            out.print(_nodes_table(job))
            continue
        if job.hosts:
            out.print(_groups_table(job))
        if job.mesh is not None:
            out.print(mesh_groups.RULE, markup=False)
            out.print()
    for name, switch_plan in plans.items():
        out.print(_table(switch_plan, targets[name]))
        if entries:
            for entity in (*switch_plan.holdings.groups.values(), *switch_plan.holdings.entries.values()):
                out.print(str(entity), markup=False, soft_wrap=True)


def _check_copies(context: typer.Context, jobs: Sequence[Job]) -> None:
    """Raise `UsageFault` for options that have no effect, because no job has copies of that kind."""
    kinds = {job.copies for job in jobs}
    for kind, names in (("switch", options.OF_SWITCH_COPIES), ("host", options.OF_HOST_COPIES)):
        for name, option in _options_given(context).items():
            if name in names and kind not in kinds:
                raise UsageFault(f"{option} is for copies by {kind} (copies: {kind}), and no job has them")


def _options_given(context: typer.Context) -> dict[str, str]:
    """Return the options on the command line, by parameter."""
    return {
        name: f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def _check_options(context: typer.Context) -> None:
    """Raise `UsageFault` for options that exclude each other, or that would have no effect."""
    options_given = _options_given(context)
    modes = [name for name in ("capacity", "pfc", "bfrt", "entries") if name in options_given]
    if len(modes) > 1:
        raise UsageFault(
            f"{options_given[modes[0]]} and {options_given[modes[1]]} exclude each other; use one of them"
        )
    for name, option in options_given.items():
        if name in options.CAPACITY_OPTIONS and "capacity" not in options_given:
            raise UsageFault(f"{option} needs --capacity")
    if "switch" in options_given and not {"pfc", "bfrt"} & options_given.keys():
        raise UsageFault("--switch needs --pfc or --bfrt")


def _table(plan: SwitchPlan, target: str) -> FittedTable:
    numbers = ("used", "holds", "share")
    table = FittedTable(f"{plan.switch} ({target})", "what", *numbers, numbers=numbers)
    limits = planning.limits(target)
    for resource, count in sorted(plan.usage().items()):
        table.add_row(resource, str(count), str(limits[resource]), f"{count / limits[resource]:.1%}")
    return table


def _data(plan: SwitchPlan, target: str) -> dict[str, object]:
    return {
        "target": target,
        "usage": plan.usage(),
        "limits": planning.limits(target),
        "groups": [_group(group) for group in plan.holdings.groups.values()],
        "entries": [_entry(entry) for entry in plan.holdings.entries.values()],
        "streams": [
            {
                "job": stream.boundary.job,
                "dp_group": stream.boundary.group,
                "side": stream.boundary.side,
                "boundary": key[0],
                "channel": stream.channel,
                "shadow_id": stream.shadow_id,
                "shard": stream.shard,
                "replication_id": stream.replication_id,
                "shadow_node": stream.node.id,
                "nic": str(stream.nic.ip),
            }
            for key, stream in plan.streams.items()
        ],
    }


def groups_of(job: Job) -> list[dict[str, object]]:
    """Return each DP group: its place in the mesh, ranks in ring order, shadow nodes, first shadow id."""
    first_ids = first_shadow_ids(job) if job.copies == "switch" else [0] * len(job.dp_groups)
    return [
        {
            "dp_group": index,
            "mesh": mesh.coordinates(job, index),
            "ranks": [rank.rank for rank in group.ranks],
            "hosts": [rank.host for rank in group.ranks],
            "shadow_nodes": list(job.shadow_list(index)),
            "first_shadow_id": first_ids[index],
        }
        for index, group in enumerate(job.dp_groups)
    ]


def _job_data(job: Job) -> dict[str, object]:
    """Return a job's DP groups; with copies by hosts, also who sends what to whom."""
    data: dict[str, object] = {"copies": job.copies, "dp_groups": groups_of(job)}
    if job.copies == "host":
        data["rank_shares"] = [float(rank_share(job, group)) for group in job.groups]
        data["nodes"] = [
            {
                "node": plan.node.id,
                "gradients": ":".join(map(str, plan.node.gradients_at)),
                "shards": [{"group": group, "shard": shard} for group, shard in plan.shards],
                "ranks": list(plan.ranks),
                "streams": plan.streams,
            }
            for plan in node_plans(job)
        ]
    return data


def _senders_table(job: Job) -> FittedTable:
    """Return a table of what ranks send. Groups that differ in their ranks and nodes alone share a row."""
    columns, numbers = (
        ("groups", "ranks", "shadow nodes"),
        ("ranks of each", "a rank sends, of its gradients"),
    )
    title = f"job {job.job}, copies by hosts: what each rank sends in an iteration"
    table = FittedTable(title, *columns, *numbers, numbers=numbers, folds=columns)
    alike: dict[tuple[int, int], list[int]] = {}
    for index, group in enumerate(job.dp_groups):
        alike.setdefault((len(group.ranks), job.shards(index)), []).append(index)
    for groups in alike.values():
        share = rank_share(job, groups[0])
        table.add_row(
            in_ranges(groups),
            in_ranges(sorted(rank.rank for group in groups for rank in job.dp_groups[group].ranks)),
            in_ranges(sorted({node for group in groups for node in job.shadow_list(group)})),
            f"{len(job.dp_groups[groups[0]].ranks):,}",
            f"{share} ({float(share):.1%})",
        )
    return table


def _nodes_table(job: Job) -> FittedTable:
    columns = ("node", "gradients at", "from ranks")
    numbers = ("shards", "streams")
    title = "shadow nodes: what comes to each, if shards are of equal size"
    table = FittedTable(title, *columns, *numbers, numbers=numbers, folds=columns[2:])
    for plan in node_plans(job):
        address = ":".join(map(str, plan.node.gradients_at))
        counts = (f"{len(plan.shards):,}", f"{plan.streams:,}")
        table.add_row(str(plan.node.id), address, in_ranges(plan.ranks), *counts)
    return table


def _groups_table(job: Job) -> FittedTable:
    columns = ("group", "ranks", "hosts", "shadow nodes", "shadow ids")
    table = FittedTable(f"DP groups of {job.job}", *columns, folds=columns[1:])
    first_ids = first_shadow_ids(job)
    for index, group in enumerate(job.dp_groups):
        first, last = first_ids[index], first_ids[index] + job.shards(index) - 1
        table.add_row(
            mesh.group_name(job, index),
            in_ranges(rank.rank for rank in group.ranks),
            in_ranges(rank.host or rank.place for rank in group.ranks),
            in_ranges(job.shadow_list(index)),
            f"{first}" if first == last else f"{first} to {last}",
        )
    return table


def _group(group: MulticastGroup) -> dict[str, object]:
    return {"id": group.id, "replicas": [{"port": p, "instance": i} for p, i in sorted(group.replicas)]}


def _entry(entry: TableEntry) -> dict[str, object]:
    return {
        "table": entry.table,
        "match": dict(entry.match),
        "action": entry.action,
        "params": dict(entry.params),
        "priority": entry.priority,
    }
