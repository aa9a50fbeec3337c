"""Fences a job's shadow nodes and selects the iteration to resume from: global rank 0's part of a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import grpc

from checkmate.events.kinds import RESTORE_DRAINED
from checkmate.events.saying import say, seconds_since
from checkmate.job.schema import Job
from checkmate.nodes import target
from checkmate.nodes.other_ranks import RESHARDING, other_ranks
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
from checkmate.nodes.stubs import Stubs, checked, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.start.plans import PlanKind, RestartPlan, plan_new_run
from checkmate.training.start.repair import wanted_parts
from checkmate.wording import at_iteration, counted

_log: Final = logging.getLogger("checkmate")

READ_SECONDS: Final = 5.0
"""How long a fenced node may continue to read; it stops as soon as nothing arrives."""
DRAIN_SECONDS: Final = 20.0
"""How long a node may step recorded iterations before it is fenced; it stops as soon as nothing changes."""
PATIENCE_SECONDS: Final = 2.0
"""How long to wait for nodes that are not needed."""
SETTLE_SECONDS: Final = 30.0
COPY_SECONDS: Final = 20.0
LATE_SECONDS: Final = 5.0
"""Each call to nodes that have answered before may exceed the restart's timeout by this much."""
_AGAIN_SECONDS: Final = 0.25


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
        self._changed = threading.Condition()
        self._ended = threading.Event()
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
        """Why nodes have not answered so far, by node."""
        return {node: reply for node, reply in self.replies.copy().items() if isinstance(reply, str)}

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait for all nodes, but only for `PATIENCE_SECONDS` more once `enough` returns true."""
        patience = None
        with self._changed:
            while not self.complete:
                now = time.monotonic()
                if patience is None and enough():
                    patience = now + PATIENCE_SECONDS
                left = min(self._deadline, patience or self._deadline) - now
                if left <= 0:
                    return
                self._changed.wait(left)

    def close(self) -> None:
        """Stop asking. A call that has not been answered must not fence the training that begins next."""
        with self._changed:
            self._ended.set()
        self._stubs.renew({node.id for node in self._job.shadow_nodes} - self.answers.keys())

    def within(self, seconds: float) -> float:
        """Return the timeout of a call that takes up to `seconds`: little beyond the deadline."""
        return min(seconds, max(self._deadline - time.monotonic(), 0) + LATE_SECONDS)

    def _ask(self, node: int, stub: ShadowStub) -> None:
        while not self._ended.is_set() and (left := self._deadline - time.monotonic()) > 0:
            seconds = min(self._seconds, left)
            request = pb.FenceRequest(
                job=self._job.job, timeout=seconds, drain=self._drain, protocol=PROTOCOL
            )
            try:
                reply: pb.NodeStatus | str = checked(stub.Fence(request, timeout=left))
            except grpc.RpcError as error:
                reply = reason(error)
            except ValueError:  # `close` has closed the channel
                return
            with self._changed:
                if self._ended.is_set():
                    return
                self.replies[node] = reply
                self._changed.notify_all()
            if not isinstance(reply, str):
                return
            self._ended.wait(_AGAIN_SECONDS)


def plan_fresh(job: Job, stubs: Stubs, timeout: float) -> RestartPlan:
    """Fence the nodes, and begin with iteration 0 whatever they hold."""
    fence = Fence(job, stubs, time.monotonic() + timeout)
    fence.wait(lambda: False)
    fence.close()
    marks = _say_refusal(fence)
    for node, why in sorted(fence.failures.items()):
        _log.warning("%s: %s; it is seeded when it answers", node_name(job, node), why)
    held = [hold.stepped for _, hold in counted_holds(fence.answers)]
    trouble = f"the shadow nodes held iteration {max(held)}, which is discarded" if held else ""
    return replace(_without_nodes("nothing", fence, trouble), marks=marks)


def plan_restore(
    job: Job, stubs: Stubs, timeout: float, on_disk: Callable[[], int] = lambda: 0
) -> RestartPlan:
    """Drain and fence the nodes, find the target, and settle the nodes that can reach it.

    `on_disk` returns the greatest generation of a checkpoint on disk.
    """
    began = time.monotonic()
    fence = Fence(job, stubs, began + timeout, drain=True)
    fence.wait(lambda: _enough(job, fence.replies))
    fence.close()
    marks = _say_refusal(fence)
    drained = RESTORE_DRAINED(nodes=sorted(fence.answers), seconds=seconds_since(began))
    say(logging.DEBUG, drained, "%s drained", counted(len(fence.answers), "shadow node"))
    return replace(_plan(job, stubs, timeout, on_disk, fence), marks=marks)


def _plan(job: Job, stubs: Stubs, timeout: float, on_disk: Callable[[], int], fence: Fence) -> RestartPlan:
    """Plan a restart of drained nodes, as `plan_restore`."""
    if 0 < discarded(fence.answers) == greatest_generation(fence.answers):
        return _after_reset(job, stubs, fence, on_disk())
    if trouble := other_ranks(job, fence.answers):
        return _without_nodes("refused", fence, f"{trouble}. {RESHARDING}")
    if fence.complete and all(answer.holds_nothing for answer in fence.answers.values()):
        return _without_nodes("nothing", fence)
    _freeze(job, stubs, fence)
    answers = fence.answers.values()
    try:
        chosen = target.find_target(job, fence.replies)
        request = pb.SettleRequest(
            job=job.job, iteration=chosen.iteration, run=chosen.run, continues=chosen.start
        )
        asked, seconds = list(fence.answers), fence.within(SETTLE_SECONDS)
        settled = stubs.ask(asked, lambda stub: stub.Settle, request, seconds)
        holders = target.find_settled(job, chosen, {**fence.replies, **settled})
    except Lacking as error:
        waited = "" if fence.complete else f" within {timeout:g} s"
        trouble = f"no iteration is complete on the shadow nodes{waited}: {error}"
        return _without_nodes("none", fence, trouble)
    if chosen.behind:
        newest = chosen.iteration + chosen.behind
        at = at_iteration(chosen.iteration)
        _log.warning("iteration %d was stepped, but the newest complete state is the one %s", newest, at)
    return RestartPlan(
        "nodes",
        target.next_incarnation(answers, time.time()),
        chosen.run,
        chosen.iteration,
        holders,
        generation=chosen.generation,
        generation_seen=greatest_generation(fence.answers),
        discarded=discarded(fence.answers),
        continued=chosen.start,
    )


def _after_reset(job: Job, stubs: Stubs, fence: Fence, on_disk: int) -> RestartPlan:
    """Plan the first start after `checkmate reset`, which knew nothing of the checkpoints on disk."""
    found = _without_nodes("reset", fence)
    generation = max(found.discarded, on_disk)
    for node, said in stubs.reset(fence.answers, generation).items():
        if isinstance(said, str):
            _log.warning("%s: %s", node_name(job, node), said)
    return replace(found, discarded=generation, generation=generation + 1)


def _freeze(job: Job, stubs: Stubs, fence: Fence) -> None:
    """Have drained nodes copy missing parts from one another, drain again, and stop for good."""
    wanted = wanted_parts(fence.answers.values())
    for node, reply in stubs.ask_each(wanted, lambda stub: stub.Copy, fence.within(COPY_SECONDS)).items():
        for trouble in [reply] if isinstance(reply, str) else reply.troubles:
            _log.warning("%s: %s", node_name(job, node), trouble)
    drain = pb.FenceRequest(job=job.job, timeout=DRAIN_SECONDS, drain=True, protocol=PROTOCOL)
    if wanted or not all(answer.drained for answer in fence.answers.values()):
        # The first drain of an early node may have lacked parts from a late one.
        stubs.ask(list(fence.answers), lambda stub: stub.Fence, drain, fence.within(2 * DRAIN_SECONDS))
    stop = pb.FenceRequest(job=job.job, timeout=READ_SECONDS, protocol=PROTOCOL)
    stopped = stubs.ask(list(fence.answers), lambda stub: stub.Fence, stop, fence.within(2 * READ_SECONDS))
    fence.replies.update(stopped)


def _without_nodes(kind: PlanKind, fence: Fence, trouble: str = "") -> RestartPlan:
    answers = fence.answers
    incarnation = target.next_incarnation(answers.values(), time.time())
    made = plan_new_run(incarnation, trouble, greatest_generation(answers), discarded(answers))
    return replace(made, kind=kind)


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
        return target.find_target(job, replies).complete
    except Lacking:
        return False
