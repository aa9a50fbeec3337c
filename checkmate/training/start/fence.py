"""Fences a job's shadow nodes and selects the iteration to resume from: global rank 0's part of a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import grpc

from checkmate.base.wording import at_iteration, counted
from checkmate.events.kinds import RESTORE_DRAINED
from checkmate.events.process_log import say, seconds_since
from checkmate.job.schema import Job
from checkmate.nodes import target
from checkmate.nodes.other_ranks import (
    HeldState,
    OtherRanks,
    difference,
    held_states,
    job_ranks,
    other_files,
)
from checkmate.nodes.standing import (
    Answers,
    Lacking,
    counted_holds,
    discarded,
    greatest_generation,
    newest_refusal,
    node_name,
    refusal_words,
)
from checkmate.nodes.stubs import Stubs, check_size, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.start.plans import (
    AfterReset,
    FromNodes,
    NewRun,
    RefusedStart,
    RestartPlan,
    WithoutState,
    new_run_fields,
)

_log: Final = logging.getLogger("checkmate")

READ_SECONDS: Final = 5.0
"""Seconds that a fenced node may continue to read; it stops as soon as nothing arrives."""
DRAIN_SECONDS: Final = 20.0
"""Seconds that a node may step recorded iterations before it is fenced; it stops when nothing changes."""
PATIENCE_SECONDS: Final = 2.0
"""Seconds to wait for nodes that are not needed."""
SETTLE_SECONDS: Final = 30.0
COPY_SECONDS: Final = 20.0
LATE_SECONDS: Final = 5.0
"""Each call to nodes that have answered before may exceed the restart's timeout by this much."""
_AGAIN_SECONDS: Final = 0.25
_SILENT_SECONDS: Final = 3.0
"""Time after which it is logged for which nodes a start waits."""


class Fence:
    """Fences (or, with `drain`, only drains) each node of a job, in one thread per node, until it answers."""

    def __init__(self, job: Job, stubs: Stubs, deadline: float, *, drain: bool = False) -> None:
        self.replies: dict[int, pb.NodeStatus | str] = {}
        """By node: its answer, or why there is none so far."""
        self._job = job
        self._stubs = stubs
        self._deadline = deadline
        self._drain = drain
        self._seconds = DRAIN_SECONDS if drain else READ_SECONDS
        self._condition = threading.Condition()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(node.id, stubs.to(node.id)), daemon=True)
            for node in job.shadow_nodes
        ]
        for thread in self._threads:
            thread.start()

    @property
    def complete(self) -> bool:
        """Whether all nodes have answered."""
        return len(self.answers) == len(self._threads)

    @property
    def answers(self) -> dict[int, pb.NodeStatus]:
        """The answers, by node."""
        return {node: reply for node, reply in self.replies.copy().items() if not isinstance(reply, str)}

    @property
    def failures(self) -> dict[int, str]:
        """The reasons why nodes have not answered so far, by node."""
        return {node: reply for node, reply in self.replies.copy().items() if isinstance(reply, str)}

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait for all nodes, but only for `PATIENCE_SECONDS` more once `enough` returns true."""
        patience = None
        silent_until = time.monotonic() + _SILENT_SECONDS
        with self._condition:
            while not self.complete:
                now = time.monotonic()
                if now > silent_until and self.failures:
                    silent_until = float("inf")
                    self._say_missing(self._deadline - now)
                if patience is None and enough():
                    patience = now + PATIENCE_SECONDS
                seconds = min(self._deadline, patience or self._deadline) - now
                if seconds <= 0:
                    return
                self._condition.wait(min(seconds, max(silent_until - now, 0) + _AGAIN_SECONDS))

    def _say_missing(self, seconds: float) -> None:
        """Log for which nodes a start waits."""
        for node, why in sorted(self.failures.items()):
            _log.warning(
                "waiting up to %.0f s for %s: %s. Has `checkmate shadow JOB --id %d` been started there?",
                max(seconds, 0),
                node_name(self._job, node),
                why,
                node,
            )

    def close(self) -> None:
        """Stop asking. A call that has not been answered must not fence the training that begins next."""
        with self._condition:
            self._closing.set()
        self._stubs.renew({node.id for node in self._job.shadow_nodes} - self.answers.keys())

    def within(self, seconds: float) -> float:
        """Return the timeout of a call that takes up to `seconds`: little beyond the deadline."""
        return min(seconds, max(self._deadline - time.monotonic(), 0) + LATE_SECONDS)

    def _ask(self, node: int, stub: ShadowStub) -> None:
        while not self._closing.is_set() and (remaining := self._deadline - time.monotonic()) > 0:
            seconds = min(self._seconds, remaining)
            request = pb.FenceRequest(
                job=self._job.job, timeout=seconds, drain=self._drain, protocol=PROTOCOL
            )
            try:
                reply: pb.NodeStatus | str = check_size(stub.Fence(request, timeout=remaining))
            except grpc.RpcError as error:
                reply = reason(error)
            except ValueError:  # `close` has closed the channel
                return
            with self._condition:
                if self._closing.is_set():
                    return
                self.replies[node] = reply
                self._condition.notify_all()
            if not isinstance(reply, str):
                return
            self._closing.wait(_AGAIN_SECONDS)


def plan_fresh(job: Job, stubs: Stubs, timeout: float) -> NewRun:
    """Fence the nodes, and begin with iteration 0. `trouble` says what they hold of an earlier run."""
    fence = Fence(job, stubs, time.monotonic() + timeout)
    fence.wait(lambda: False)
    fence.close()
    marks = _say_refusal(fence)
    for node, why in sorted(fence.failures.items()):
        _log.warning("%s: %s; it is seeded when it answers", node_name(job, node), why)
    newest = max((hold.stepped for _, hold in counted_holds(fence.answers)), default=-1)
    trouble = f"the shadow nodes hold iteration {newest} of this job" if newest >= 0 else ""
    return NewRun(**_new_run(fence), marks=marks, trouble=trouble)


def plan_restore(
    job: Job, stubs: Stubs, timeout: float, on_disk: Callable[[], int] = lambda: 0
) -> RestartPlan:
    """Drain and fence the nodes, find the target, and settle the nodes that can reach it.

    `on_disk` returns the greatest generation of a checkpoint on disk.
    """
    began_at = time.monotonic()
    fence = Fence(job, stubs, began_at + timeout, drain=True)
    fence.wait(lambda: _enough(job, fence.replies))
    fence.close()
    marks = _say_refusal(fence)
    event = RESTORE_DRAINED(nodes=sorted(fence.answers), seconds=seconds_since(began_at))
    say(logging.DEBUG, event, "%s drained", counted(len(fence.answers), "shadow node"))
    return replace(_plan(job, stubs, timeout, on_disk, fence), marks=marks)


def _plan(job: Job, stubs: Stubs, timeout: float, on_disk: Callable[[], int], fence: Fence) -> RestartPlan:
    """Plan a restart of drained nodes, as `plan_restore`."""
    if 0 < discarded(fence.answers) == greatest_generation(fence.answers):
        return _after_reset(job, stubs, fence, on_disk())
    if trouble := other_files(job, fence.answers):
        return RefusedStart(**_new_run(fence), trouble=trouble)
    if fence.complete and all(answer.holds_nothing for answer in fence.answers.values()):
        return NewRun(**_new_run(fence))
    _freeze(job, stubs, fence)
    troubles = []
    try:
        states = held_states(job, fence.replies)
    except OtherRanks as error:
        return RefusedStart(**_new_run(fence), trouble=str(error))
    for held_state in _in_order(states):
        try:
            plan = _settle(held_state, stubs, fence)
        except Lacking as error:
            troubles.append(str(error))
            continue
        if troubles and isinstance(plan, FromNodes):
            before, now = difference(held_state.ranks, job_ranks(job)) or ("the same ranks", "these")
            _log.warning(
                "what %s have trained is not complete on the shadow nodes (%s): back to iteration %d, of %s",
                *(now, troubles[0], plan.iteration, before),
            )
        return plan
    limit = "" if fence.complete else f" within {timeout:g} s"
    trouble = f"no iteration is complete on the shadow nodes{limit}: {troubles[0]}"
    return WithoutState(**_new_run(fence), trouble=trouble)


def _in_order(states: Sequence[HeldState]) -> list[HeldState]:
    """Return states in the order in which to try them: the newest first.

    If that start has trained nothing yet, the state that it has begun with comes first: its record is whole.
    """
    first, *rest = states
    with suppress(Lacking):
        goal = target.find_target(first.job, first.answers)
        for held_state in rest:
            with suppress(Lacking):
                other_goal = target.find_target(held_state.job, held_state.answers)
                if (other_goal.iteration, other_goal.start) == (goal.iteration, goal.start):
                    return [held_state, *(state for state in states if state is not held_state)]
    return list(states)


def _settle(held_state: HeldState, stubs: Stubs, fence: Fence) -> FromNodes | NewRun:
    """Settle fenced nodes at the newest iteration of these ranks. Raise `Lacking` if none is complete."""
    answers, job = fence.answers.values(), held_state.job
    goal = target.find_target(job, held_state.answers)
    if held_state.is_former and goal.iteration < 0:
        return NewRun(**_new_run(fence))  # other ranks have trained nothing
    request = pb.SettleRequest(
        job=job.job,
        iteration=goal.iteration,
        run=goal.run,
        continues=goal.start,
        ranks_digest=held_state.digest,
    )
    nodes, seconds = list(fence.answers), fence.within(SETTLE_SECONDS)
    replies = stubs.ask(nodes, lambda stub: stub.Settle, request, seconds)
    holders = target.find_settled(job, goal, held_state.select({**fence.replies, **replies}))
    if goal.behind:
        newest = goal.iteration + goal.behind
        at = at_iteration(goal.iteration)
        _log.warning("iteration %d was stepped, but the newest complete state is the one %s", newest, at)
    return FromNodes(
        incarnation=target.next_incarnation(answers, time.time()),
        run=goal.run,
        iteration=goal.iteration,
        holders=holders,
        generation=goal.generation,
        generation_seen=greatest_generation(fence.answers),
        discarded=discarded(fence.answers),
        continued=goal.start,
        former=held_state.ranks.SerializeToString() if held_state.is_former else b"",
    )


def _after_reset(job: Job, stubs: Stubs, fence: Fence, on_disk: int) -> AfterReset:
    """Plan the first start after `checkmate reset`, which knew nothing of the checkpoints on disk."""
    plan = AfterReset(**_new_run(fence))
    generation = max(plan.discarded, on_disk)
    for node, reply in stubs.reset(fence.answers, generation).items():
        if isinstance(reply, str):
            _log.warning("%s: %s", node_name(job, node), reply)
    return replace(plan, discarded=generation, generation=generation + 1)


def _freeze(job: Job, stubs: Stubs, fence: Fence) -> None:
    """Have drained nodes copy missing parts from one another, drain again, and stop for good."""
    requests = missing_parts(fence.answers.values())
    for node, reply in stubs.ask_each(requests, lambda stub: stub.Copy, fence.within(COPY_SECONDS)).items():
        for trouble in [reply] if isinstance(reply, str) else reply.troubles:
            _log.warning("%s: %s", node_name(job, node), trouble)
    drain = pb.FenceRequest(job=job.job, timeout=DRAIN_SECONDS, drain=True, protocol=PROTOCOL)
    if requests or not all(answer.drained for answer in fence.answers.values()):
        # The first drain of an early node may have lacked parts from a late one.
        stubs.ask(list(fence.answers), lambda stub: stub.Fence, drain, fence.within(2 * DRAIN_SECONDS))
    stop = pb.FenceRequest(job=job.job, timeout=READ_SECONDS, protocol=PROTOCOL)
    replies = stubs.ask(list(fence.answers), lambda stub: stub.Fence, stop, fence.within(2 * READ_SECONDS))
    fence.replies.update(replies)


def _new_run(fence: Fence) -> dict[str, Any]:
    """Return the fields of a plan without the nodes' state, which a new run begins."""
    answers = fence.answers
    incarnation = target.next_incarnation(answers.values(), time.time())
    return new_run_fields(incarnation, greatest_generation(answers), discarded(answers))


def _say_refusal(fence: Fence) -> bool:
    """Log, before anything else, why the script was refused in the start before this one, if it was.

    Return whether that start's script marked its iterations.
    """
    refusal = newest_refusal(fence.answers)
    if refusal is None:
        return False
    _log.warning("the last start was refused %s", refusal_words(refusal))
    return refusal.marks


def _enough(job: Job, replies: Answers) -> bool:
    """Return whether nodes that have not answered are not needed."""
    try:
        held_state, *_ = held_states(job, replies)
        return target.find_target(held_state.job, held_state.answers).complete
    except (Lacking, OtherRanks):
        return False


Key = tuple[int, int, str, bytes]
"""Identifies a DP group in one start of training: group, incarnation, run, start."""
Part = tuple[int, int]
"""Identifies a part: a rank's position, and an iteration."""


def missing_parts(answers: Iterable[pb.NodeStatus]) -> dict[int, pb.CopyRequest]:
    """Return, by node, the parts that it lacks and another node has (design, section 7).

    A node does not need parts of a start of training that it is not in, nor of iterations that all its holds
    have stepped. `answers` are those to `Fence`.
    """
    answers = list(answers)
    sources: dict[Key, dict[Part, int]] = {}  # a node that has each part
    for answer in answers:
        for parts in answer.parts:
            nodes = sources.setdefault(_key(parts), {})
            for part in _parts(parts):
                nodes.setdefault(part, answer.node)
    requests = {}
    for answer in answers:
        request = pb.CopyRequest(job=answer.job)
        for parts in answer.parts:
            lacking = sources[_key(parts)].keys() - set(_parts(parts))
            stepped = [hold.stepped for hold in answer.holds if hold.shard.group == parts.group]
            lacking_parts = sorted(part for part in lacking if part[1] > min(stepped, default=-1))
            request.wanted.extend(
                _grouped(parts, {part: sources[_key(parts)][part] for part in lacking_parts})
            )
        if request.wanted:
            requests[answer.node] = request
    return requests


def _key(parts: pb.PartsHeld) -> Key:
    return (parts.group, parts.incarnation, parts.run, parts.start)


def _parts(parts: pb.PartsHeld) -> Iterator[Part]:
    return ((run.position, t) for run in parts.ranges for t in range(run.first, run.last + 1))


def _grouped(parts: pb.PartsHeld, sources: Mapping[Part, int]) -> Iterator[pb.PartsWanted]:
    """Yield the needed parts, as ranges per source node."""
    for node in dict.fromkeys(sources.values()):
        ranges = pb.PartsWanted(node=node)
        ranges.parts.CopyFrom(
            pb.PartsHeld(group=parts.group, incarnation=parts.incarnation, run=parts.run, start=parts.start)
        )
        for position, t in (part for part, source in sources.items() if source == node):
            last = ranges.parts.ranges[-1] if ranges.parts.ranges else None
            if last is not None and (last.position, last.last + 1) == (position, t):
                last.last = t
            else:
                ranges.parts.ranges.add(position=position, first=t, last=t)
        yield ranges
