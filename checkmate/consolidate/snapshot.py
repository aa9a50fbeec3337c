"""Reads and verifies a job's state at one iteration from its shadow nodes, without fencing.

The iteration is reserved on every node before anything is read, so that all serve the same one while training
continues (design, section 7, *Commit*).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from checkmate import state
from checkmate.job.schema import Job
from checkmate.keys.access import Access, access
from checkmate.keys.roles import Role
from checkmate.nodes.other_ranks import followed_job, other_ranks
from checkmate.nodes.reader import (
    NotReserved,
    Reservation,
    ShardReading,
    ShardRequest,
    ShardState,
    States,
    most_parts,
    read_shards,
    record_of,
    reserved,
)
from checkmate.nodes.standing import Lacking, NoAnswer, Shard, lacking, name
from checkmate.nodes.stubs import ANSWER_SECONDS, Stubs
from checkmate.nodes.target import LAB_HINT, Source, find_source
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.layout import Layout

STEP_SECONDS: Final = 10.0
"""The time to wait for an iteration to be stepped before trying another one."""
AGAIN_SECONDS: Final = 0.2


class Missing(RuntimeError):
    """No iteration was complete within the timeout. The message names shards and nodes."""

    exit_code = 8


class Unreachable(Missing):
    """No shadow node answered within the timeout."""

    exit_code = 3


@dataclass(frozen=True)
class GroupState:
    """One DP group's state after an iteration, from all of its shards."""

    layout: Layout
    optimizer: pb.OptimizerSpec
    record: pb.IterationRecord
    names: Mapping[str, str]
    states: States
    """In the layout's memory order."""
    counters: Sequence[Mapping[str, object]] = ()
    """Of an optimizer whose state is copied: numbers that it keeps beside its state, for each of several."""


@dataclass(frozen=True)
class Snapshot:
    """A job's state after one iteration, in all DP groups."""

    job: Job
    run: str
    iteration: int
    groups: tuple[GroupState, ...]
    generation: int = 0


class SnapshotReader(AbstractContextManager["SnapshotReader"]):
    """Reads snapshots from a job's shadow nodes. It is a context manager."""

    def __init__(
        self,
        job: Job,
        progress: Callable[[int], None] = lambda nbytes: None,
        stopped: threading.Event | None = None,
        reader: Access | None = None,
    ) -> None:
        """Create it, without connecting.

        Args:
            job: The job.
            progress: Called with numbers of bytes as they arrive, from several threads.
            stopped: Set it to end attempts early.
            reader: With which keys to read; by default, those of role reader in the job's folder.

        Raises:
            KeysError: The keys of role reader are missing or can't be used.
        """
        self.job = job
        self._followed = job
        """The job with the replicas that the nodes follow."""
        self._stopped = stopped or threading.Event()
        self._progress = progress
        self._stubs = Stubs(job, (access(job, Role.READER) if reader is None else reader).keys)

    def __exit__(self, *_: object) -> None:
        self._stubs.close()

    def read(self, timeout: float, at_least: int = 0) -> Snapshot:
        """Return the newest iteration that all nodes can provide.

        Args:
            timeout: How many seconds to try.
            at_least: The lowest iteration to read, unless training ends before it.

        Raises:
            Missing: No iteration was complete within the timeout, or the job has other ranks than the nodes'.
            Unreachable: No node has answered.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._attempt(deadline, at_least)
            except Lacking as error:
                has_time = deadline - time.monotonic() > AGAIN_SECONDS
                if not has_time or self._stopped.wait(AGAIN_SECONDS):
                    if isinstance(error, NoAnswer):
                        raise Unreachable(
                            f"no shadow node of job {self.job.job} can be reached within {timeout:g} s "
                            f"({error}); {LAB_HINT}"
                        ) from error
                    raise Missing(f"no iteration is complete within {timeout:g} s: {error}") from error

    def source(self) -> Source:
        """Return the nodes' newest iteration now.

        Raise `Lacking` if no node offers some shard, and `Missing` if the nodes have a job of other ranks.
        """
        return self._source(time.monotonic() + ANSWER_SECONDS)

    def _source(self, deadline: float) -> Source:
        timeout = max(min(ANSWER_SECONDS, deadline - time.monotonic()), 0.1)
        answers = self._stubs.statuses(timeout=timeout)
        self._followed = followed_job(self.job, answers)
        if trouble := other_ranks(self._followed, answers):
            raise Missing(f"{trouble}: specify the job file of the shadow nodes")
        return find_source(self._followed, answers)

    def _attempt(self, deadline: float, at_least: int) -> Snapshot:
        source = self._source(deadline)
        running = [node for node in source.nodes if node not in source.fenced]
        seconds = max(deadline - time.monotonic(), 0.1) + ANSWER_SECONDS
        try:
            with reserved(
                self._stubs,
                running,
                seconds,
                newest=source.stepped,
                at_least=0 if source.has_ended else at_least,
                enough=lambda granted: not _without(source, granted),
            ) as reservation:
                return self._read_all(source, reservation, deadline)
        except NotReserved as error:
            without = _without(source, set(running) - error.refusals.keys())
            reasons = {shard: [(n, error.refusals[n]) for n in source.holders[shard]] for shard in without}
            raise lacking(self.job, reasons) from None

    def _read_all(self, source: Source, reservation: Reservation, deadline: float) -> Snapshot:
        iteration, begin = reservation.iteration, source.beginning
        requests = {
            ShardRequest(self.job.job, begin.run, iteration, *shard, begin.incarnation, begin.start): [
                node for node in nodes if node not in reservation.refusals
            ]
            for shard, nodes in source.holders.items()
        }
        accept = partial(_check_record, self._followed, iteration)
        states = read_shards(
            self._stubs, requests, ShardReading(deadline, STEP_SECONDS, self._progress, accept)
        )
        groups = tuple(
            combine_shards(group, [states[shard] for shard in sorted(states) if shard[0] == group])
            for group in range(len(self.job.dp_groups))
        )
        generation = max(shard_state.header.generation for shard_state in states.values())
        return Snapshot(self._followed, begin.run, iteration, groups, generation)


def _without(source: Source, granted: Collection[int]) -> list[Shard]:
    """Return the shards without a node that has granted a reservation or is fenced."""
    return [
        shard
        for shard, nodes in source.holders.items()
        if not any(node in granted or node in source.fenced for node in nodes)
    ]


def _check_record(job: Job, iteration: int, header: pb.SeedHeader, _: Layout) -> None:
    """Raise `StateError` unless a shard comes with the complete step record."""
    ranks = len(job.dp_groups[header.shard.group].ranks)
    parts = [(part.position, part.iteration) for part in header.record.parts]
    if header.parameters and parts != [(position, iteration) for position in range(ranks)]:
        raise state.StateError(f"it lacks parts of the step record of iteration {iteration}")


def combine_shards(group: int, shards: Sequence[ShardState]) -> GroupState:
    """Combine a DP group's shards. Raise `Lacking` if their models differ or buffers are missing."""
    headers = [shard.header for shard in shards]
    first = most_parts(headers)
    for header in headers:
        if (header.layout, header.optimizer) != (first.layout, first.optimizer):
            own_shard, first_shard = ((group, other_header.shard.shard) for other_header in (header, first))
            trouble = f"{name(own_shard)} has another model or optimizer than {name(first_shard)}"
            raise Lacking({own_shard: [trouble]}, frozenset({own_shard}))
    states = {number: values for shard in shards for number, values in shard.states.items()}
    record, without = record_of(headers)
    if without:
        raise Lacking({(group, first.shard.shard): [_not_come(without)]})
    group_state = GroupState(shards[0].layout, first.optimizer, record, first.names, states)
    return with_state(group_state) if first.optimizer.copied else group_state


def with_state(copied: GroupState) -> GroupState:
    """Return a group whose optimizer's state was copied with it where it is: at its parameters.

    Tensors of state come as parameters of their own, and the record has what is not a tensor. Raise
    `StateError` if the record does not fit.
    """
    layout, trained = copied.layout, copied.layout.trained
    besides = {part.position: state.loads(part.beside) for part in copied.record.parts if part.beside}
    if not copied.record.parts:  # of before the first iteration
        besides = {0: {"stateless": range(len(trained))}}
    leaves: dict[int, dict[str, object]] = {number: {} for number in range(len(trained))}
    for beside in besides.values():
        for number, values in beside.get("values", {}).items():
            leaves[number] = dict(values) | leaves[number]
    numbers = {parameter.name: number for number, parameter in enumerate(trained)}
    for number, entry in enumerate(layout.parameters):
        if not entry.state or number not in copied.states:
            continue
        at, beside = numbers[entry.name], besides.get((entry.owner or (0,))[0], {})
        absent = entry.state in beside.get("absent", {}).get(at, ())
        if not (absent or at in beside.get("stateless", ())):
            leaves[at].setdefault(entry.state, state.from_held(entry, *copied.states[number])[0])
    states: States = {}
    for number, parameter in enumerate(trained):
        if number not in copied.states:  # not read
            continue
        tensor, _ = state.from_held(parameter, *copied.states[number])
        states[number] = state.to_held(parameter, tensor, state.nested(leaves[number]))
    layout = replace(layout, parameters=trained)
    counters = besides.get(0, {}).get("counters", ())
    return replace(copied, layout=layout, states=states, counters=counters)


def _not_come(buffers: Sequence[str]) -> str:
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    return f"buffers or frozen parameters have not arrived yet: {buffers[0]}{more}"
