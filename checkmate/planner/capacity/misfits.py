"""Checks of a job's demand against available resources, with the smallest change that fits. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Protocol, TypeVar

from checkmate.base.wording import counted
from checkmate.job.checks import most_channels
from checkmate.job.faults import Fault
from checkmate.job.mesh import groups_key
from checkmate.job.schema import Job
from checkmate.planner.capacity.plan import Capacity, SwitchUse
from checkmate.planner.demand import Demand, NicDemand, NodeDemand
from checkmate.planner.units import NODES_MAX, show_enough
from checkmate.shadow.receive.hold_plans import FARTHEST
from checkmate.wire.tag import SHARDS_MAX

MAX_CORES: Final = 512
"""Maximum number of a node's cores to propose."""
PEAK: Final = "peak rate"
_ROUNDING: Final = 1 + 1e-9
"""Tolerance for sums of channels' shares of a line rate."""


@dataclass(frozen=True)
class Check:
    """A resource at its scarcest place: needed and available amount in `unit`, and the path in the YAML.

    If it does not fit, `wrong` describes why, and `change` is the smallest change that fits.
    """

    resource: str
    where: str
    needed: float
    available: float
    unit: str
    path: tuple[str | int, ...]
    wrong: str = ""
    change: str = ""

    @property
    def share(self) -> float:
        """Needed share of the available amount."""
        return self.needed / self.available

    @property
    def misfit(self) -> Fault | None:
        """The check as a fault, or `None` if it fits."""
        return Fault(self.path, f"{self.wrong}; {self.change}") if self.wrong else None


class _Fits(Protocol):
    def __call__(self, job: Job, *, node: int | None = None) -> bool:
        """Return whether everything, or everything of one node, fits in another job."""


T = TypeVar("T", bound=NicDemand | NodeDemand)
_WithChannels = Callable[[int], Sequence[SwitchUse]]


def checks(capacity: Capacity, with_channels: _WithChannels) -> list[Check]:
    """Return all possible checks, with paths in the job's YAML.

    `with_channels` returns the use of switches with another number of channels.
    """
    rules = (_stream_length, _line, receiving, stepping, memory)
    return [*_tables(capacity, with_channels), *(check for rule in rules if (check := rule(capacity)))]


def _tables(capacity: Capacity, with_channels: _WithChannels) -> Iterator[Check]:
    for use in capacity.switches:
        for resource, count in sorted(use.used.items()):
            holds, where = use.holds[resource], f"switch {use.switch}"
            check = Check(resource, where, count, holds, "", (groups_key(capacity.demand.job),))
            if count > holds:
                wrong = f"{count:,} {resource} needed on {where} ({use.target}), which has room for {holds:,}"
                check = replace(
                    check, wrong=wrong, change=_table_change(capacity, use, resource, with_channels)
                )
            yield check


def _table_change(capacity: Capacity, use: SwitchUse, resource: str, with_channels: _WithChannels) -> str:
    """Return a change with which a switch's table or groups suffice."""
    fitting = (
        channels
        for channels in range(capacity.demand.job.channels - 1, 0, -1)
        if _use_of(with_channels(channels), use.switch, resource) <= use.holds[resource]
    )
    changes = [f"at most {counted(channels, 'channel')}" for channels in itertools.islice(fitting, 1)]
    changes += [
        f"a {target}" for target, holds in use.targets.items() if holds[resource] >= use.used[resource]
    ]
    return _or(changes) if changes else "spread the DP groups over more switches"


def _use_of(uses: Sequence[SwitchUse], switch: str, resource: str) -> int:
    return next((use.used.get(resource, 0) for use in uses if use.switch == switch), 0)


def _stream_length(capacity: Capacity) -> Check:
    """Check the length of streams, because positions have 32 bits (`check_lengths`)."""
    demand = capacity.demand
    longest = demand.longest_stream
    check = Check("an iteration of a stream", "the longest", longest, FARTHEST, "bytes", ("channels",))
    if longest < FARTHEST:
        return check

    def fits(job: Job) -> bool:
        return replace(demand, job=job).longest_stream < FARTHEST

    more = range(demand.job.channels + 1, most_channels(demand.job.collective) + 1)
    channels = next((c for c in more if fits(replace(demand.job, channels=c))), None)
    changes = [f"{channels} channels"] if channels else []
    changes += fewest_more_nodes(demand.job, demand.nodes[0].node, fits)
    wrong = (
        f"an iteration of one stream has {longest / 1e9:.2f} GB, and must have less than "
        f"{FARTHEST / 1e9:.2f} GB"
    )
    return replace(check, wrong=wrong, change=_or(changes))


def _compare(
    capacity: Capacity,
    resource: str,
    available: float,
    unit: str,
    things: Callable[[Demand], Sequence[T]],
    load: Callable[[Capacity, T], float],
    wrong: Callable[[T], str],
    changes: Callable[[T, _Fits], Sequence[str]],
) -> Check:
    """Compare the loads of NICs or nodes with the available amount. Return the check of the worst one."""
    loads = [(load(capacity, thing), thing) for thing in things(capacity.demand)]
    greatest, worst = max(loads, key=lambda pair: pair[0])
    most = available * _ROUNDING
    misfit_count = sum(amount > most for amount, _ in loads)

    def fits(job: Job, *, node: int | None = None) -> bool:
        alternative = replace(capacity, demand=replace(capacity.demand, job=job))
        candidates = [thing for thing in things(alternative.demand) if node in (None, thing.node)]
        return all(load(alternative, thing) <= most for thing in candidates)

    nodes = [node.id for node in capacity.demand.job.shadow_nodes]
    path: tuple[str | int, ...] = ("shadow_nodes", nodes.index(worst.node))
    kind, where = "node", f"node {worst.node}"
    if isinstance(worst, NicDemand) and capacity.demand.job.node(worst.node).nics:
        path, kind, where = (*path, "nics", worst.nic), "NIC", f"NIC {worst.node}.{worst.nic}"
    check = Check(resource, where, greatest, available, unit, path)
    if not misfit_count:
        return check
    more_words = f" (the worst of {misfit_count} {kind}s over the limit)" if misfit_count > 1 else ""
    return replace(check, wrong=f"{wrong(worst)}{more_words}", change=_or(changes(worst, fits)))


def _line(capacity: Capacity) -> Check:
    """Check peak rates: beyond a NIC's line rate, PFC slows training (paper, "Lossless Packet Delivery")."""
    job, line = capacity.demand.job, capacity.limits.nic_bits_per_s

    def wrong(nic: NicDemand) -> str:
        peak = max(nic.peak_bits_per_s)
        round_ = nic.peak_bits_per_s.index(peak)
        return (
            f"receives up to {peak / 1e9:g} Gbit/s in round {round_} of the ring, but its line rate is "
            f"{line / 1e9:g} Gbit/s, so training would slow down"
        )

    def changes(nic: NicDemand, fits: _Fits) -> list[str]:
        texts = []
        groups = sum(nic.node in job.shadow_list(group) for group in range(len(job.dp_groups)))
        jobs = {"": job}
        if len(job.node(nic.node).nics) == 1:
            jobs["a second NIC"] = with_nic(job, nic.node)
        for addition, with_added in jobs.items():
            for fewer in range(groups - bool(not addition), 0, -1):
                if fits(limit_groups(with_added, nic.node, fewer), node=nic.node):
                    less = f"{counted(fewer, 'DP group')} instead of {groups} on it" if fewer < groups else ""
                    texts.append(" and ".join(filter(None, (addition, less))))
                    break
        return [*texts, f"NICs of {show_enough(max(nic.peak_bits_per_s) / 1e9)} Gbit/s"]

    def peak(_: Capacity, nic: NicDemand) -> float:
        return max(nic.peak_bits_per_s)

    return _compare(capacity, PEAK, line, "bit/s", attrgetter("nics"), peak, wrong, changes)


def receiving(capacity: Capacity) -> Check | None:
    """Check the time in which NICs receive an iteration, if it is known how long one takes."""
    job, iteration = capacity.demand.job, capacity.limits.iteration_s
    if iteration is None:
        return None

    def wrong(nic: NicDemand) -> str:
        took = f"{capacity.receive_seconds(nic):.3g} s for the {nic.nbytes / 1e9:.3g} GB"
        return f"takes {took} of an iteration of {iteration:g} s"

    def changes(nic: NicDemand, fits: _Fits) -> list[str]:
        alone = len(job.node(nic.node).nics) == 1
        second = ["a second NIC"] if alone and fits(with_nic(job, nic.node)) else []
        rate = f"NICs and nodes that receive {show_enough(8 * nic.nbytes / iteration / 1e9)} Gbit/s each"
        return [*second, *fewest_more_nodes(job, nic.node, fits), rate]

    seconds = Capacity.receive_seconds
    return _compare(
        capacity, "receiving an iteration", iteration, "s", attrgetter("nics"), seconds, wrong, changes
    )


def stepping(plan: Capacity) -> Check | None:
    """Check the time of nodes' optimizer steps, if a profile tells it."""
    job, iteration, cores = plan.demand.job, plan.limits.iteration_s, plan.limits.cores
    if iteration is None or cores is None or plan.limits.steps is None:
        return None

    def seconds(capacity: Capacity, node: NodeDemand) -> float:
        return capacity.step_seconds(node) or 0.0

    def wrong(node: NodeDemand) -> str:
        took = f"{seconds(plan, node):.3g} s on {counted(cores, 'core')}"
        return f"takes {took} for the optimizer step of an iteration of {iteration:g} s"

    def changes(node: NodeDemand, fits: _Fits) -> list[str]:
        changes = fewest_more_nodes(job, node.node, fits)
        for more in range(cores + 1, MAX_CORES + 1):
            if seconds(replace(plan, limits=replace(plan.limits, cores=more)), node) <= iteration:
                return [*changes, f"nodes of {more} cores"]
        faster = f"faster cores: neither {NODES_MAX} nodes of {cores} nor {MAX_CORES} cores suffice"
        return changes or [faster]

    return _compare(
        plan, "the optimizer's step", iteration, "s", attrgetter("nodes"), seconds, wrong, changes
    )


def memory(capacity: Capacity) -> Check | None:
    """Check the memory of nodes, if it is known how much they have."""
    job, node_memory = capacity.demand.job, capacity.limits.node_memory
    if node_memory is None:
        return None

    def wrong(node: NodeDemand) -> str:
        return f"needs {node.memory.total / 1e9:.3g} GB and has {node_memory / 1e9:.3g} GB"

    def changes(node: NodeDemand, fits: _Fits) -> list[str]:
        return [
            *fewest_more_nodes(job, node.node, fits),
            f"nodes of {show_enough(node.memory.total / 1e9)} GB",
        ]

    def total(_: Capacity, node: NodeDemand) -> float:
        return node.memory.total

    return _compare(capacity, "memory", node_memory, "bytes", attrgetter("nodes"), total, wrong, changes)


def _or(changes: Sequence[str]) -> str:
    return "it would fit with " + ", or with ".join(changes)


def add_nodes(job: Job, node: int, more: int) -> Job:
    """Return the job with `more` shadow nodes like `node`, in every DP group that it serves."""
    like = job.node(node)
    free = max(new_node.id for new_node in job.shadow_nodes) + 1
    new = tuple(replace(like, id=free + i) for i in range(more))
    ids = tuple(new_node.id for new_node in new)
    groups = []
    for index, group in enumerate(job.dp_groups):
        holders = job.shadow_list(index)
        groups.append(replace(group, shadow_nodes=holders + (ids if node in holders else ())))
    return replace(job, shadow_nodes=job.shadow_nodes + new, dp_groups=tuple(groups))


def fewest_more_nodes(job: Job, node: int, fits: Callable[[Job], bool]) -> list[str]:
    """Return `3 more shadow nodes like it`, with the smallest number that fits, or nothing."""
    groups = [g for g in range(len(job.dp_groups)) if node in job.shadow_list(g)]
    room = SHARDS_MAX - max(job.shards(group) for group in groups)
    for more in range(1, min(room, NODES_MAX) + 1):
        if fits(add_nodes(job, node, more)):
            return [f"{counted(more, 'more shadow node')} like it"]
    return []


def with_nic(job: Job, node: int) -> Job:
    """Return the job with a second NIC, like its first, on a node."""
    nodes = (
        replace(shadow_node, nics=(shadow_node.nics[0], replace(shadow_node.nics[0], port=-1)))
        if shadow_node.id == node
        else shadow_node
        for shadow_node in job.shadow_nodes
    )
    return replace(job, shadow_nodes=tuple(nodes))


def limit_groups(job: Job, node: int, groups: int) -> Job:
    """Return the job with a node in at most `groups` DP groups."""
    dp_groups, remaining = [], groups
    for index, group in enumerate(job.dp_groups):
        nodes = job.shadow_list(index)
        if node in nodes:
            nodes = nodes if remaining > 0 else tuple(n for n in nodes if n != node)
            remaining -= 1
        holders = nodes or tuple(n.id for n in job.shadow_nodes if n.id != node)
        dp_groups.append(replace(group, shadow_nodes=holders or (node,)))
    return replace(job, dp_groups=tuple(dp_groups))
