"""What of a job doesn't fit, each with the smallest change that would make it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from checkmate.parts import Fault
from checkmate.schema import Job
from checkmate.shadow.streams import FARTHEST
from checkmate.wire import CHANNELS_MAX, SHADOW_IDS_MAX
from checkmate.wording import counted
from planner.capacity import Capacity, SwitchUse
from planner.changes import fewest_more_nodes, place, serving, with_nic
from planner.demand import Node

CORES_MOST: Final = 512
"""More of a node are not looked for."""


def misfits(found: Capacity, with_channels: Callable[[int], Sequence[SwitchUse]]) -> list[Fault]:
    """What doesn't fit, each with the smallest change that would make it; located in the job's YAML.

    `with_channels`: what the switches would need with fewer channels.
    """
    return [
        *_tables(found, with_channels),
        *_stream_length(found),
        *_line(found),
        *_receiving(found),
        *_stepping(found),
        *_memory(found),
    ]


def _tables(found: Capacity, with_channels: Callable[[int], Sequence[SwitchUse]]) -> Iterator[Fault]:
    job = found.demand.job
    for use in found.switches:
        for what, needed in sorted(use.used.items()):
            if needed <= use.holds[what]:
                continue
            fitting = (
                channels
                for channels in range(job.channels - 1, 0, -1)
                if _use_of(with_channels(channels), use.switch, what) <= use.holds[what]
            )
            changes = [f"at most {counted(channels, 'channel')}" for channels in itertools.islice(fitting, 1)]
            changes += [f"a {target}" for target, holds in use.targets.items() if holds[what] >= needed]
            change = _or(changes) if changes else "spread the DP groups over more switches"
            message = (
                f"{needed:,} {what} needed on switch {use.switch} ({use.target}), "
                f"which holds {use.holds[what]:,}; {change}"
            )
            yield Fault(("dp_groups",), message)


def _use_of(uses: Sequence[SwitchUse], switch: str, what: str) -> int:
    return next((use.used.get(what, 0) for use in uses if use.switch == switch), 0)


def _stream_length(found: Capacity) -> Iterator[Fault]:
    """Positions in a stream have 32 bits: what shadow nodes refuse (`check_lengths`)."""
    demand = found.demand
    longest = demand.longest_stream
    if longest < FARTHEST:
        return

    def fits(job: Job) -> bool:
        return replace(demand, job=job).longest_stream < FARTHEST

    more = range(demand.job.channels + 1, CHANNELS_MAX + 1)
    channels = next((c for c in more if fits(demand.job.model_copy(update={"channels": c}))), None)
    changes = [f"{channels} channels"] if channels else []
    changes += fewest_more_nodes(demand.job, demand.nodes[0].node, fits)
    yield Fault(
        ("channels",),
        f"an iteration of one stream has {longest / 1e9:.2f} GB, and must have less than "
        f"{FARTHEST / 1e9:.2f} GB; {_or(changes)}",
    )


def _line(found: Capacity) -> Iterator[Fault]:
    """More at once than a NIC's line: PFC would hold training back (paper, "Lossless Packet Delivery")."""
    line = found.limits.nic_bits_per_s
    over = [nic for nic in found.demand.nics if max(nic.peak_bits_per_s) > line * (1 + 1e-9)]
    if not over:
        return
    worst = max(over, key=lambda nic: max(nic.peak_bits_per_s))
    peak = max(worst.peak_bits_per_s)
    index, node = place(found.demand.job, worst.node)

    def fits(job: Job) -> bool:
        nics = replace(found.demand, job=job).nics
        return all(max(n.peak_bits_per_s) <= line * (1 + 1e-9) for n in nics if n.node == worst.node)

    job = found.demand.job
    groups = sum(worst.node in job.shadow_list(group) for group in range(len(job.dp_groups)))
    changes = []
    for added, with_added in (("", job), ("a second NIC", with_nic(job, worst.node))):
        if added and len(node.nics) > 1:
            break
        for fewer in range(groups - bool(not added), 0, -1):
            if fits(serving(with_added, worst.node, fewer)):
                less = f"{counted(fewer, 'DP group')} instead of {groups} on it" if fewer < groups else ""
                changes.append(" and ".join(filter(None, (added, less))))
                break
    changes.append(f"NICs of {peak / 1e9:g} Gbit/s")
    round_ = worst.peak_bits_per_s.index(peak)
    yield Fault(
        ("shadow_nodes", index, "nics", worst.nic),
        f"gets up to {peak / 1e9:g} Gbit/s at once in round {round_} of the ring, and its line has "
        f"{line / 1e9:g}, so training would be held back{_others(over, 'NIC')}; {_or(changes)}",
    )


def _receiving(found: Capacity) -> Iterator[Fault]:
    iteration = found.limits.iteration_s
    if iteration is None:
        return
    over = [nic for nic in found.demand.nics if found.receive_seconds(nic) > iteration]
    if not over:
        return
    worst = max(over, key=found.receive_seconds)
    index, node = place(found.demand.job, worst.node)

    def fits(job: Job) -> bool:
        wider = replace(found, demand=replace(found.demand, job=job))
        return all(wider.receive_seconds(nic) <= iteration for nic in wider.demand.nics)

    changes = []
    if len(node.nics) == 1 and fits(with_nic(found.demand.job, worst.node)):
        changes.append("a second NIC")
    changes += fewest_more_nodes(found.demand.job, worst.node, fits)
    changes.append(f"NICs and nodes that receive {8 * worst.nbytes / iteration / 1e9:.3g} Gbit/s each")
    yield Fault(
        ("shadow_nodes", index, "nics", worst.nic),
        f"takes {found.receive_seconds(worst):.3g} s for the {worst.nbytes / 1e9:.3g} GB of an iteration of "
        f"{iteration:g} s{_others(over, 'NIC')}; {_or(changes)}",
    )


def _stepping(found: Capacity) -> Iterator[Fault]:
    iteration, cores = found.limits.iteration_s, found.limits.cores
    if iteration is None or cores is None or found.limits.steps is None:
        return

    def seconds(capacity: Capacity, node: Node) -> float:
        return capacity.step_seconds(node) or 0.0

    over = [node for node in found.demand.nodes if seconds(found, node) > iteration]
    if not over:
        return
    worst = max(over, key=lambda node: seconds(found, node))

    def fits(job: Job) -> bool:
        wider = replace(found, demand=replace(found.demand, job=job))
        return all(seconds(wider, node) <= iteration for node in wider.demand.nodes)

    changes = fewest_more_nodes(found.demand.job, worst.node, fits)
    for more in range(cores + 1, CORES_MOST + 1):
        if seconds(replace(found, limits=replace(found.limits, cores=more)), worst) <= iteration:
            changes.append(f"nodes of {more} cores")
            break
    if not changes:
        changes.append(
            f"faster cores: no {SHADOW_IDS_MAX} nodes of {cores} and no {CORES_MOST} cores will do"
        )
    yield Fault(
        ("shadow_nodes", place(found.demand.job, worst.node)[0]),
        f"takes {seconds(found, worst):.3g} s on {counted(cores, 'core')} for the optimizer step of an "
        f"iteration of {iteration:g} s{_others(over, 'node')}; {_or(changes)}",
    )


def _memory(found: Capacity) -> Iterator[Fault]:
    there = found.limits.node_memory
    if there is None:
        return
    over = [node for node in found.demand.nodes if node.memory.total > there]
    if not over:
        return
    worst = max(over, key=lambda node: node.memory.total)

    def fits(job: Job) -> bool:
        return all(node.memory.total <= there for node in replace(found.demand, job=job).nodes)

    changes = fewest_more_nodes(found.demand.job, worst.node, fits)
    changes.append(f"nodes of {worst.memory.total / 1e9:.3g} GB")
    yield Fault(
        ("shadow_nodes", place(found.demand.job, worst.node)[0]),
        f"needs {worst.memory.total / 1e9:.3g} GB and has {there / 1e9:.3g} GB{_others(over, 'node')}; "
        f"{_or(changes)}",
    )


def _others(over: Sequence[object], what: str) -> str:
    return f" (the worst of {len(over)} {what}s that are over)" if len(over) > 1 else ""


def _or(changes: Sequence[str]) -> str:
    return "it would fit with " + ", or with ".join(changes)
