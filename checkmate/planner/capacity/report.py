"""A capacity plan as tables and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.text import Text

from checkmate.job.faults import show_path
from checkmate.job.mesh import group_name
from checkmate.output.tables import FittedTable
from checkmate.planner.capacity.misfits import PEAK, Check
from checkmate.planner.capacity.plan import TRANSCEIVERS, Capacity, SwitchUse
from checkmate.planner.demand import NicDemand
from checkmate.planner.models.named import Model
from checkmate.planner.scaling import dtype_of
from checkmate.planner.units import show_seconds
from checkmate.wording import size


def data(found: Capacity, checks: Sequence[Check]) -> dict[str, object]:
    """Return the output of `--json`: sizes in bytes, times in seconds, rates in bits per second."""
    demand = found.demand
    faults = [fault for check in checks if (fault := check.misfit)]
    return {
        "job": demand.job.job,
        "models": [
            {
                "name": model.name,
                "parameters": model.elements,
                "bytes": model.nbytes,
                "dtype": dtype_of(model),
            }
            for model in demand.models
        ],
        **_counts(found),
        "switches": [asdict(use) for use in found.switches],
        "nics": [_nic_data(found, nic) for nic in demand.nics],
        "nodes": [
            {
                "node": node.node,
                "shards": [{"group": s.group, "shard": s.shard} for s in node.shards],
                "memory": {**asdict(node.memory), "reading": node.memory.reading, "total": node.memory.total},
                "step_seconds": found.step_seconds(node),
            }
            for node in demand.nodes
        ],
        "shards": [asdict(shard) for shard in demand.shards],
        "balance": [found.balance(group) for group in range(len(demand.models))],
        "checks": [
            {
                "what": check.what,
                "where": check.where,
                "needed": check.needed,
                "there": check.there,
                "unit": check.unit,
                "share": check.share,
                "fits": check.misfit is None,
            }
            for check in _tightest_first(checks)
        ],
        "not_checked": found.unchecked,
        "fits": not faults,
        "misfits": [{"path": show_path(fault.path), "message": fault.message} for fault in faults],
    }


def verdict(found: Capacity, checks: Sequence[Check]) -> str:
    """Return whether the job fits, the scarcest resource, and the smallest change if it does not fit.

    Any model uses a full line for a while, so a peak rate is mentioned only if it exceeds the line.
    """
    tightest, *others = (c for c in _tightest_first(checks) if c.misfit or c.what != PEAK)
    result = "does not fit" if tightest.misfit else "fits"
    if not tightest.misfit and found.unchecked:
        result = "fits, as far as it was checked"
    needed, there = (_shown(value, tightest.unit) for value in (tightest.needed, tightest.there))
    change = f"; {tightest.change}" if tightest.change else ""
    if over := list(dict.fromkeys(check.what for check in others if check.misfit)):
        change = change.replace("; it would fit", "; this would fit")
        change += f"; {' and '.join(over)} {'does' if len(over) == 1 else 'do'} not fit either"
    return (
        f"job {found.demand.job.job} {result}. Tightest: {tightest.what} ({tightest.where}), "
        f"{needed} of {there}, {tightest.share:.0%}{change}"
    )


def summary(found: Capacity, checks: Sequence[Check]) -> Iterator[FittedTable]:
    """Yield tables of checks and of needed hardware, for a terminal."""
    yield _checks(checks)
    yield _needed(found)


def details(found: Capacity) -> Iterator[FittedTable]:
    """Yield tables of every switch, NIC, node and shard, for a terminal."""
    for use in found.switches:
        yield _switch(use)
    yield _nics(found)
    yield _memory(found)
    yield _shards(found)


def _counts(found: Capacity) -> dict[str, int]:
    job, nics = found.demand.job, len(found.demand.nics)
    return {
        "dp_groups": len(job.dp_groups),
        "replicas": job.replicas,
        "channels": job.channels,
        "streams": len(found.demand.streams),
        "multicast_groups": sum(use.used.get("multicast groups", 0) for use in found.switches),
        "shadow_nics": nics,
        "switch_ports": nics,
        "transceivers": TRANSCEIVERS * nics,
        "ports_of_the_rule": found.ports_of_the_rule,
    }


def _nic_data(found: Capacity, nic: NicDemand) -> dict[str, object]:
    rounds = zip(nic.round_bytes, nic.peak_bits_per_s, strict=True)
    return {
        "node": nic.node,
        "nic": nic.nic,
        "streams": nic.streams,
        "bytes": nic.nbytes,
        "rounds": [{"bytes": nbytes, "peak_bits_per_s": peak} for nbytes, peak in rounds],
        "receive_seconds": found.receive_seconds(nic),
    }


def _tightest_first(checks: Sequence[Check]) -> list[Check]:
    """Sort checks: first those that do not fit, then by share."""
    return sorted(checks, key=lambda check: (check.misfit is None, -check.share))


def _checks(checks: Sequence[Check]) -> FittedTable:
    """Return a table of checks, with only the scarcest entity of switches unless more do not fit."""
    numbers = ("needed", "available", "share")
    title = "checks, tightest first"
    made = FittedTable(title, "what", "where", *numbers, "fits", numbers=numbers, folds=("what",))
    held = 0
    for check in _tightest_first(checks):
        if not check.unit:
            held += 1
            if held > 1 and check.misfit is None:
                continue
        needed, there = (_shown(value, check.unit) for value in (check.needed, check.there))
        fits = "yes" if check.misfit is None else Text("no", "red")
        made.add_row(check.what, check.where, needed, there, f"{check.share:.0%}", fits)
    return made


def _shown(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return size(value)
        case "s":
            return show_seconds(value)
        case "bit/s":
            return f"{value / 1e9:g} Gbit/s"
        case _:
            return f"{value:,.0f}"


def _needed(found: Capacity) -> FittedTable:
    counts = _counts(found)
    title = f"job {found.demand.job.job} needs"
    made = FittedTable(title, "what", "needed", numbers=("needed",), folds=("what",))
    for label, model in _models(found):
        made.add_row(label, f"{model.elements / 1e6:,.1f} M parameters")
        made.add_row("  gradients of an iteration", size(model.nbytes))
    made.add_row("streams (TCP connections)", f"{counts['streams']:,}")
    made.add_row("multicast groups", f"{counts['multicast_groups']:,}")
    made.add_row("switch ports for shadow NICs", f"{counts['switch_ports']:,}")
    made.add_row("  the paper's rule: 2 per DP group and replica", f"{counts['ports_of_the_rule']:,}")
    made.add_row("shadow NICs", f"{counts['shadow_nics']:,}")
    made.add_row("transceivers, 2 per NIC", f"{counts['transceivers']:,}")
    return made


def _models(found: Capacity) -> Iterator[tuple[str, Model]]:
    """Yield each model with the names of the DP groups that have it."""
    job = found.demand.job
    for _, run in groupby(enumerate(found.demand.models), key=lambda one: id(one[1])):
        groups = list(run)
        (first, model), (last, _) = groups[0], groups[-1]
        names = f"DP group {group_name(job, first)}"
        if len(groups) > 1:
            how = (
                "together" if found.demand.together(first) == tuple(group for group, _ in groups) else "each"
            )
            names = f"DP groups {group_name(job, first)} to {group_name(job, last)}, {how}"
        yield f"{names}: {model.name}, {dtype_of(model)}", model


def _switch(use: SwitchUse) -> FittedTable:
    """Return a table of a switch, with one column for targets of equal limits, its own target first."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for target in sorted(use.targets, key=lambda name: (name != use.target, name)):
        alike.setdefault(tuple(sorted(use.targets[target].items())), []).append(target)
    numbers = ("used", "share", *(f"held by {', '.join(names)}" for names in alike.values()))
    made = FittedTable(f"switch {use.switch} ({use.target})", "what", *numbers, numbers=numbers)
    for what, used in sorted(use.used.items()):
        held = [f"{dict(holds)[what]:,}" for holds in alike]
        made.add_row(what, f"{used:,}", f"{used / use.holds[what]:.1%}", *held)
    empty = [""] * (len(alike) + 1)
    made.add_row("ports of ranks", f"{use.training_ports:,}", *empty)
    made.add_row("ports of shadow NICs", f"{use.shadow_ports:,}", *empty)
    return made


def _nics(found: Capacity) -> FittedTable:
    """Return a table of NICs. Rounds after the first differ only by a few bytes and share columns."""
    numbers = ("streams", "bytes", "round 0", "Gbit/s", "later", "Gbit/s", "takes")
    title = "shadow NICs: bytes per iteration, and maximum Gbit/s, by round of the ring"
    made = FittedTable(title, "NIC", *numbers, numbers=numbers)
    for nic in found.demand.nics:
        later = nic.round_bytes[1:]
        made.add_row(
            f"{nic.node}.{nic.nic}",
            f"{nic.streams:,}",
            size(nic.nbytes),
            size(nic.round_bytes[0]),
            f"{nic.peak_bits_per_s[0] / 1e9:g}",
            f"{len(later)} x {size(max(later))}" if later else "",
            f"{max(nic.peak_bits_per_s[1:]) / 1e9:g}" if later else "",
            show_seconds(found.receive_seconds(nic)),
        )
    return made


def _memory(found: Capacity) -> FittedTable:
    numbers = ("params", "state", "gradients", "sockets", "read", "total", "step")
    title = "shadow nodes: maximum memory (while checkpoints are read); optimizer step"
    made = FittedTable(title, "node", *numbers, numbers=numbers)
    for node in found.demand.nodes:
        memory, step = node.memory, found.step_seconds(node)
        sizes = (
            memory.parameters,
            memory.optimizer_state,
            memory.gradients,
            memory.socket_buffers,
            memory.reading,
            memory.total,
        )
        took = "?" if step is None else show_seconds(step)
        made.add_row(str(node.node), *(size(nbytes) for nbytes in sizes), took)
    return made


def _shards(found: Capacity) -> FittedTable:
    balances = [found.balance(group) for group in range(len(found.demand.models))]
    ratios = ", ".join(dict.fromkeys(f"{balance:.2f}" for balance in balances))
    title = f"shards, by DP group; the largest is {ratios} times the mean"
    named, numbers = "parameters, last to first", ("count", "bytes")
    made = FittedTable(title, "shard", "nodes", named, *numbers, numbers=numbers, folds=("nodes", named))
    for shard in found.demand.shards:
        nodes = ", ".join(map(str, shard.nodes))
        made.add_row(
            f"{shard.group}.{shard.shard}",
            nodes,
            f"{shard.first}\n{shard.last}" if shard.parameters > 1 else shard.first,
            f"{shard.parameters:,}",
            size(shard.nbytes),
        )
    return made
