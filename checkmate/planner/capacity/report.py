"""A capacity plan as tables and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.text import Text

from checkmate.base.wording import size
from checkmate.job.faults import show_path
from checkmate.job.mesh import group_name
from checkmate.output.tables import FittedTable
from checkmate.planner.capacity.misfits import PEAK, Check
from checkmate.planner.capacity.part_checks import host_name
from checkmate.planner.capacity.plan import TRANSCEIVERS, Capacity, SwitchUse
from checkmate.planner.demand import NicDemand, NodeDemand
from checkmate.planner.models.named import Model
from checkmate.planner.part_demand import PartDemand
from checkmate.planner.scaling import dtype_of
from checkmate.planner.units import show_seconds


def data(capacity: Capacity, checks: Sequence[Check]) -> dict[str, object]:
    """Return the output of `--json`: sizes in bytes, times in seconds, rates in bits per second."""
    demand = capacity.demand
    return {
        **_models_data(capacity),
        **_counts(capacity),
        "switches": [asdict(use) for use in capacity.switches],
        "boundary_ranks": [asdict(rank) for rank in demand.boundary_ranks],
        "nics": [_nic_data(capacity, nic) for nic in demand.nics],
        "nodes": [_node_data(capacity, node) for node in demand.nodes],
        **_results_data(capacity, checks, capacity.unchecked),
    }


def part_data(
    capacity: Capacity, demand: PartDemand, checks: Sequence[Check], unchecked: Sequence[str]
) -> dict[str, object]:
    """Return the output of `--json` for a job with copies by hosts."""
    received = {nic.node: nic for nic in demand.nics}
    return {
        **_models_data(capacity),
        "dp_groups": len(demand.job.dp_groups),
        "replicas": demand.job.replicas,
        "streams": sum(nic.streams for nic in demand.nics),
        "gpus_per_host": demand.gpus_per_host,
        "ranks": [{**asdict(rank), "host_memory": rank.host_memory} for rank in demand.ranks],
        "nodes": [
            {
                **_node_data(capacity, node),
                "streams": received[node.node].streams,
                "bytes": received[node.node].nbytes,
                "receive_seconds": capacity.receive_seconds(received[node.node]),
            }
            for node in demand.nodes
        ],
        **_results_data(capacity, checks, unchecked),
    }


def _models_data(capacity: Capacity) -> dict[str, object]:
    return {
        "job": capacity.demand.job.job,
        "models": [
            {
                "name": model.name,
                "parameters": model.elements,
                "bytes": model.nbytes,
                "dtype": dtype_of(model),
            }
            for model in capacity.demand.models
        ],
    }


def _node_data(capacity: Capacity, node: NodeDemand) -> dict[str, object]:
    return {
        "node": node.node,
        "shards": [{"group": s.group, "shard": s.shard} for s in node.shards],
        "memory": {**asdict(node.memory), "reading": node.memory.reading, "total": node.memory.total},
        "step_seconds": capacity.step_seconds(node),
    }


def _results_data(capacity: Capacity, checks: Sequence[Check], unchecked: Sequence[str]) -> dict[str, object]:
    faults = [fault for check in checks if (fault := check.misfit)]
    return {
        "shards": [asdict(shard) for shard in capacity.demand.shards],
        "balance": [capacity.balance(group) for group in range(len(capacity.demand.models))],
        "checks": [
            {
                "what": check.resource,
                "where": check.where,
                "needed": check.needed,
                "there": check.available,
                "unit": check.unit,
                "share": check.share,
                "fits": check.misfit is None,
            }
            for check in _tightest_first(checks)
        ],
        "not_checked": list(unchecked),
        "fits": not faults,
        "misfits": [{"path": show_path(fault.path), "message": fault.message} for fault in faults],
    }


def verdict(capacity: Capacity, checks: Sequence[Check], unchecked: Sequence[str]) -> str:
    """Return whether the job fits, the scarcest resource, and the smallest change if it does not fit.

    Any model uses a full line for a while, so a peak rate is mentioned only if it exceeds the line.
    """
    if not checks:
        return f"job {capacity.demand.job.job}: nothing was checked, because all limits are unknown"
    tightest, *rest = (c for c in _tightest_first(checks) if c.misfit or c.resource != PEAK)
    result = "does not fit" if tightest.misfit else "fits"
    if not tightest.misfit and unchecked:
        result = "fits, as far as it was checked"
    needed_text, available_text = (
        _format_amount(value, tightest.unit) for value in (tightest.needed, tightest.available)
    )
    change = f"; {tightest.change}" if tightest.change else ""
    if misfits := list(dict.fromkeys(check.resource for check in rest if check.misfit)):
        change = change.replace("; it would fit", "; this would fit")
        change += f"; {' and '.join(misfits)} {'does' if len(misfits) == 1 else 'do'} not fit either"
    return (
        f"job {capacity.demand.job.job} {result}. Tightest: {tightest.resource} ({tightest.where}), "
        f"{needed_text} of {available_text}, {tightest.share:.0%}{change}"
    )


def summary(capacity: Capacity, checks: Sequence[Check]) -> Iterator[FittedTable]:
    """Yield tables of checks and of needed hardware, for a terminal."""
    yield _checks(checks)
    yield _hardware(capacity)


def details(capacity: Capacity) -> Iterator[FittedTable]:
    """Yield tables of every switch, NIC, node and shard, for a terminal."""
    for use in capacity.switches:
        yield _switch(use)
    yield _nics(capacity)
    yield _memory(capacity)
    yield _shards(capacity)


def part_summary(capacity: Capacity, demand: PartDemand, checks: Sequence[Check]) -> Iterator[FittedTable]:
    """Yield tables of checks and of what a job with copies by hosts needs, for a terminal."""
    if checks:
        yield _checks(checks)
    table = _needs(capacity)
    rank, ranks = demand.busiest_rank, demand.gpus_per_host
    host = f"{host_name(demand)} sends" if ranks > 1 else "a rank sends"
    table.add_row("streams (TCP connections)", f"{sum(nic.streams for nic in demand.nics):,}")
    table.add_row("  of a node, at most", f"{max(nic.streams for nic in demand.nics):,}")
    table.add_row("  of a rank, at most", f"{max(rank.streams for rank in demand.ranks):,}")
    table.add_row("a rank copies from its device, an iteration", size(rank.part_bytes))
    table.add_row(f"{host}, an iteration", size(ranks * rank.sent_bytes))
    reduction = 2 * (len(demand.job.dp_groups[rank.group].ranks) - 1) * rank.part_bytes
    if reduction:
        share = f"{rank.sent_bytes / reduction:.1%}"
        table.add_row("  beside what a ring AllReduce sends", share)
    table.add_row("  host memory for it, pinned with GPUs", size(ranks * rank.host_memory))
    table.add_row("a node receives, an iteration, at most", size(max(nic.nbytes for nic in demand.nics)))
    yield table


def part_details(capacity: Capacity, demand: PartDemand) -> Iterator[FittedTable]:
    """Yield tables of every node and shard of a job with copies by hosts, for a terminal."""
    numbers = ("streams", "bytes", "takes")
    table = FittedTable(
        "shadow nodes: bytes per iteration", "node", "gradients at", *numbers, numbers=numbers
    )
    for nic in demand.nics:
        address = ":".join(map(str, demand.job.node(nic.node).gradients_at))
        took = show_seconds(capacity.receive_seconds(nic))
        table.add_row(str(nic.node), address, f"{nic.streams:,}", size(nic.nbytes), took)
    yield table
    yield _memory(capacity)
    yield _shards(capacity)


def _counts(capacity: Capacity) -> dict[str, int]:
    job, nics = capacity.demand.job, len(capacity.demand.nics)
    return {
        "dp_groups": len(job.dp_groups),
        "replicas": job.replicas,
        "channels": job.channels,
        "streams": len(capacity.demand.streams),
        "multicast_groups": sum(use.used.get("multicast groups", 0) for use in capacity.switches),
        "shadow_nics": nics,
        "switch_ports": nics,
        "transceivers": TRANSCEIVERS * nics,
        "ports_of_the_rule": capacity.ports_of_the_rule,
    }


def _nic_data(capacity: Capacity, nic: NicDemand) -> dict[str, object]:
    rounds = zip(nic.round_bytes, nic.peak_bits_per_s, strict=True)
    return {
        "node": nic.node,
        "nic": nic.nic,
        "streams": nic.streams,
        "bytes": nic.nbytes,
        "rounds": [{"bytes": nbytes, "peak_bits_per_s": peak} for nbytes, peak in rounds],
        "receive_seconds": capacity.receive_seconds(nic),
    }


def _tightest_first(checks: Sequence[Check]) -> list[Check]:
    """Sort checks: first those that do not fit, then by share."""
    return sorted(checks, key=lambda check: (check.misfit is None, -check.share))


def _checks(checks: Sequence[Check]) -> FittedTable:
    """Return a table of checks, with only the scarcest entity of switches unless more do not fit."""
    numbers = ("needed", "available", "share")
    title = "checks, tightest first"
    table = FittedTable(title, "what", "where", *numbers, "fits", numbers=numbers, folds=("what",))
    table_checks = 0
    for check in _tightest_first(checks):
        if not check.unit:
            table_checks += 1
            if table_checks > 1 and check.misfit is None:
                continue
        needed_text, available_text = (
            _format_amount(value, check.unit) for value in (check.needed, check.available)
        )
        fits = "yes" if check.misfit is None else Text("no", "red")
        table.add_row(check.resource, check.where, needed_text, available_text, f"{check.share:.0%}", fits)
    return table


def _format_amount(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return size(value)
        case "s":
            return show_seconds(value)
        case "bit/s":
            return f"{value / 1e9:g} Gbit/s"
        case _:
            return f"{value:,.0f}"


def _hardware(capacity: Capacity) -> FittedTable:
    counts = _counts(capacity)
    table = _needs(capacity)
    table.add_row("streams (TCP connections)", f"{counts['streams']:,}")
    table.add_row("multicast groups", f"{counts['multicast_groups']:,}")
    table.add_row("switch ports for shadow NICs", f"{counts['switch_ports']:,}")
    table.add_row("  the paper's rule: 2 per DP group and replica", f"{counts['ports_of_the_rule']:,}")
    table.add_row("shadow NICs", f"{counts['shadow_nics']:,}")
    table.add_row("transceivers, 2 per NIC", f"{counts['transceivers']:,}")
    ranks = capacity.demand.boundary_ranks
    table.add_row("ranks that tag, the first and last of each DP group", f"{len(ranks):,}")
    table.add_row("  tagged by one, an iteration, at most", size(max(r.tagged_bytes for r in ranks)))
    if not capacity.demand.job.lossless:
        table.add_row("  its host's memory for repairs, at most", size(max(r.repair_memory for r in ranks)))
    return table


def _needs(capacity: Capacity) -> FittedTable:
    """Return a table with the models of a job."""
    title = f"job {capacity.demand.job.job} needs"
    table = FittedTable(title, "what", "needed", numbers=("needed",), folds=("what",))
    for label, model in _models(capacity):
        table.add_row(label, f"{model.elements / 1e6:,.1f} M parameters")
        table.add_row("  gradients of an iteration", size(model.nbytes))
    return table


def _models(capacity: Capacity) -> Iterator[tuple[str, Model]]:
    """Yield each model with the names of the DP groups that have it."""
    job = capacity.demand.job
    for _, run in groupby(enumerate(capacity.demand.models), key=lambda numbered: id(numbered[1])):
        groups = list(run)
        (first, model), (last, _) = groups[0], groups[-1]
        names = f"DP group {group_name(job, first)}"
        if len(groups) > 1:
            how = (
                "together"
                if capacity.demand.together(first) == tuple(group for group, _ in groups)
                else "each"
            )
            names = f"DP groups {group_name(job, first)} to {group_name(job, last)}, {how}"
        yield f"{names}: {model.name}, {dtype_of(model)}", model


def _switch(use: SwitchUse) -> FittedTable:
    """Return a table of a switch, with one column for targets of equal limits, its own target first."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for target in sorted(use.targets, key=lambda name: (name != use.target, name)):
        alike.setdefault(tuple(sorted(use.targets[target].items())), []).append(target)
    numbers = ("used", "share", *(f"held by {', '.join(names)}" for names in alike.values()))
    table = FittedTable(f"switch {use.switch} ({use.target})", "what", *numbers, numbers=numbers)
    for resource, count in sorted(use.used.items()):
        room = [f"{dict(holds)[resource]:,}" for holds in alike]
        table.add_row(resource, f"{count:,}", f"{count / use.holds[resource]:.1%}", *room)
    empty = [""] * (len(alike) + 1)
    table.add_row("ports of ranks", f"{use.training_ports:,}", *empty)
    table.add_row("ports of shadow NICs", f"{use.shadow_ports:,}", *empty)
    return table


def _nics(capacity: Capacity) -> FittedTable:
    """Return a table of NICs. Rounds after the first differ only by a few bytes and share columns."""
    numbers = ("streams", "bytes", "round 0", "Gbit/s", "later", "Gbit/s", "takes")
    title = "shadow NICs: bytes per iteration, and maximum Gbit/s, by round of the ring"
    table = FittedTable(title, "NIC", *numbers, numbers=numbers)
    for nic in capacity.demand.nics:
        later = nic.round_bytes[1:]
        table.add_row(
            f"{nic.node}.{nic.nic}",
            f"{nic.streams:,}",
            size(nic.nbytes),
            size(nic.round_bytes[0]),
            f"{nic.peak_bits_per_s[0] / 1e9:g}",
            f"{len(later)} x {size(max(later))}" if later else "",
            f"{max(nic.peak_bits_per_s[1:]) / 1e9:g}" if later else "",
            show_seconds(capacity.receive_seconds(nic)),
        )
    return table


def _memory(capacity: Capacity) -> FittedTable:
    numbers = ("params", "state", "gradients", "sockets", "read", "total", "step")
    title = "shadow nodes: maximum memory (while checkpoints are read); optimizer step"
    table = FittedTable(title, "node", *numbers, numbers=numbers)
    for node in capacity.demand.nodes:
        memory, step = node.memory, capacity.step_seconds(node)
        sizes = (
            memory.parameters,
            memory.optimizer_state,
            memory.gradients,
            memory.socket_buffers,
            memory.reading,
            memory.total,
        )
        took = "?" if step is None else show_seconds(step)
        table.add_row(str(node.node), *(size(nbytes) for nbytes in sizes), took)
    return table


def _shards(capacity: Capacity) -> FittedTable:
    balances = [capacity.balance(group) for group in range(len(capacity.demand.models))]
    ratios = ", ".join(dict.fromkeys(f"{balance:.2f}" for balance in balances))
    title = f"shards, by DP group; the largest is {ratios} times the mean"
    column, numbers = "parameters, last to first", ("count", "bytes")
    table = FittedTable(title, "shard", "nodes", column, *numbers, numbers=numbers, folds=("nodes", column))
    for shard in capacity.demand.shards:
        nodes = ", ".join(map(str, shard.nodes))
        table.add_row(
            f"{shard.group}.{shard.shard}",
            nodes,
            f"{shard.first}\n{shard.last}" if shard.parameters > 1 else shard.first,
            f"{shard.parameters:,}",
            size(shard.nbytes),
        )
    return table
