"""Limits of requests and of messages between nodes, checked before anything is allocated or repeated. Pure.

Each check raises `CallRefused`, which names the field, its value and its limits. `record_bounds` has those of
`Begin`, of step records and of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.standing import holders_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import (
    INCARNATIONS,
    ITERATIONS_MAX,
    REFUSAL_MAX,
    START_BYTES,
    TEXT_MAX,
    mismatch,
)
from checkmate.shadow.logic.commit import NEVER, PATIENCE
from checkmate.shadow.logic.group import CallRefused
from checkmate.wording import counted, size

WINDOW: Final = 1 << 20
"""How far a message may be ahead of the newest iteration that is known here."""
FENCE_SECONDS_MAX: Final = 3600.0
RESERVE_SECONDS_MAX: Final = 86_400.0
RESERVATIONS_MAX: Final = 64
"""Reservations of a node at a time."""
SPARE_FETCHES: Final = 8
"""Calls that may wait for an iteration beside one for each rank."""
RANGES_MAX: Final = 1 << 16


def check_protocol(protocol: int) -> None:
    """Refuse a caller of another version."""
    if different := mismatch(protocol, "the caller", "this shadow node"):
        raise CallRefused(different, precondition=True)


def check_number(what: str, value: int, most: int, least: int = 0) -> None:
    """Refuse a number outside of `least` to `most`, both included."""
    if not least <= value <= most:
        raise CallRefused(f"{what} {value}: must be a number from {least} to {most}")


def check_ahead(what: str, iteration: int, newest: int) -> None:
    """Refuse an iteration that is far beyond the newest known one."""
    check_number(what, iteration, ITERATIONS_MAX, NEVER)
    if iteration > newest + WINDOW:
        raise CallRefused(
            f"{what} {iteration}: more than {WINDOW} beyond iteration {newest}, the newest one here"
        )


def check_seconds(what: str, seconds: float, most: float) -> None:
    """Refuse a time that is negative, too long, or not a number."""
    if not (math.isfinite(seconds) and 0 <= seconds <= most):
        raise CallRefused(f"{what} {seconds:g}: must be a number of seconds from 0 to {most:g}")


def check_text(what: str, text: str, most: int = TEXT_MAX) -> None:
    """Refuse a text that is too long."""
    if len(text) > most:
        raise CallRefused(f"{what} has {len(text)} characters, and may have {most}")


def check_start(what: str, start: bytes) -> None:
    """Refuse bytes that cannot name a start of training."""
    if len(start) != START_BYTES:
        raise CallRefused(f"{what} has {len(start)} bytes; a start of training is named by {START_BYTES}")


def check_group(job: Job, group: int) -> None:
    """Refuse a DP group that the job does not have."""
    if group >= len(job.dp_groups):
        raise CallRefused(f"no DP group {group}: job {job.job} has {len(job.dp_groups)}")


def check_numbers(what: str, numbers: Sequence[int], known: Collection[int]) -> None:
    """Refuse parameters that are not among `known`, or come twice."""
    if len(numbers) > len(known) or len(set(numbers)) < len(numbers):
        raise CallRefused(
            f"{what} lists {counted(len(numbers), 'parameter')} of {len(known)}, or one of them twice"
        )
    if unknown := set(numbers).difference(known):
        raise CallRefused(f"{what} lists parameter {min(unknown)}, which the shard does not have")


def check_fence(request: pb.FenceRequest) -> None:
    """Check a `Fence`."""
    check_protocol(request.protocol)
    check_seconds("timeout", request.timeout, FENCE_SECONDS_MAX)


def check_settle(request: pb.SettleRequest) -> None:
    """Check a `Settle`."""
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_text("the run", request.run)


def check_refused(request: pb.RefusedRequest) -> None:
    """Check a `Refused`."""
    check_protocol(request.protocol)
    check_start("start", request.start)
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_text("rank", request.rank)
    check_text("text", request.text, REFUSAL_MAX)


def check_reserve(request: pb.ReserveRequest, newest: int, reserved: int) -> None:
    """Check a `Reserve`, given the newest iteration known here and the number of reservations."""
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_ahead("iteration", request.iteration, newest)
    check_seconds("a hold time of", request.seconds, RESERVE_SECONDS_MAX)
    if reserved >= RESERVATIONS_MAX:
        raise CallRefused(
            f"this node has {reserved} reservations, the most that it keeps: release one, or wait",
            precondition=True,
        )


def check_copies(iterations: int, nbytes: int, memory: int) -> None:
    """Refuse a reservation if copies of the state after all reserved iterations do not fit.

    Args:
        iterations: how many are reserved, the new one included. One is always granted.
        nbytes: bytes of the state.
        memory: bytes of this machine that are free.
    """
    if iterations > 1 and iterations * nbytes > memory:
        raise CallRefused(
            f"{iterations} iterations at a time may take {size(iterations * nbytes)}, and this machine has "
            f"{size(memory)} left: release one, or wait",
            precondition=True,
        )


def check_waiting(job: Job, waiting: int) -> None:
    """Refuse a `Fetch` that would wait, if many do, because each occupies a worker."""
    most = sum(len(group.ranks) for group in job.dp_groups) + SPARE_FETCHES
    if waiting >= most:
        raise CallRefused(
            f"{counted(waiting, 'call waits', 'calls wait')} for iterations, the most possible: wait",
            precondition=True,
        )


def check_parts(job: Job, parts: pb.PartsHeld) -> None:
    """Check ranges of parts: ordered, without overlap, and of ranks of the group."""
    check_group(job, parts.group)
    ranks = len(job.dp_groups[parts.group].ranks)
    if len(parts.ranges) > RANGES_MAX:
        raise CallRefused(f"{len(parts.ranges)} ranges of parts; a call may have {RANGES_MAX}")
    before = (-1, -1)
    for one in parts.ranges:
        check_number("position", one.position, ranks - 1)
        check_number("iteration", one.first, ITERATIONS_MAX)
        check_number("iteration", one.last, ITERATIONS_MAX)
        if one.first > one.last or (one.position, one.first) <= before:
            raise CallRefused(
                f"parts {one.first} to {one.last} of position {one.position}: ranges must be in order, "
                "and must not overlap"
            )
        before = (one.position, one.last)


def check_copy(job: Job, me: int, request: pb.CopyRequest) -> None:
    """Check a `Copy`: from other nodes of the job, and not more often than once for each node and group."""
    most = len(job.shadow_nodes) * len(job.dp_groups)
    if len(request.wanted) > most:
        raise CallRefused(f"parts of {len(request.wanted)} nodes and groups; job {job.job} has {most}")
    for wanted in request.wanted:
        check_node(job, wanted.node)
        if wanted.node == me:
            raise CallRefused(f"parts of shadow node {me}: this is that node")
        check_parts(job, wanted.parts)


def check_node(job: Job, node: int) -> None:
    """Refuse a shadow node that the job does not have."""
    if node not in {one.id for one in job.shadow_nodes}:
        raise CallRefused(f"no shadow node {node} in job {job.job}")


def check_progress(job: Job, me: int, report: pb.Progress, start: bytes, newest: int) -> None:
    """Check a report of another node. `newest` is the newest known iteration of the start `start`."""
    check_protocol(report.protocol)
    check_node(job, report.node)
    if report.node <= me:
        raise CallRefused(
            f"progress of shadow node {report.node}: nodes report to lower ids, and this is node {me}"
        )
    check_number("incarnation", report.incarnation, INCARNATIONS - 1)
    known = newest if report.start == start else ITERATIONS_MAX
    for what, iteration in (("in full:", report.in_full), ("stepped:", report.stepped)):
        check_ahead(what, iteration, known)
    check_seconds("patience", report.patience, PATIENCE)
    _check_shards(job, report.shards, report.kept, known)


def check_decision(job: Job, decision: pb.Decision, start: bytes, newest: int) -> None:
    """Check another node's answer to our reports, like `check_progress`."""
    if different := mismatch(decision.protocol, "the other node", "this one"):
        raise CallRefused(different, precondition=True)
    check_number("incarnation", decision.incarnation, INCARNATIONS - 1)
    known = newest if decision.start == start else ITERATIONS_MAX
    check_ahead("step to:", decision.step_to, known)
    check_seconds("patience", decision.patience, PATIENCE)
    _check_shards(job, decision.shards, decision.kept, known)


def _check_shards(job: Job, shards: Iterable[pb.Shard], kept: Iterable[pb.Kept], newest: int) -> None:
    known, kept = holders_of(job), list(kept)
    named = [(shard.group, shard.shard) for shard in shards]
    for numbers in (named, [(one.shard.group, one.shard.shard) for one in kept]):
        if len(set(numbers)) < len(numbers) or not known.keys() >= set(numbers):
            raise CallRefused(f"shards that job {job.job} does not have, or one of them twice")
    for one in kept:
        check_ahead("kept:", one.stepped, newest)
