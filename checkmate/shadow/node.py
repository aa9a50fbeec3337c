"""A shadow node: its holds, and when they step.

Reader threads fill buckets, one thread steps, gRPC's threads call `starting`, `restarting`, `seeding` and
`reading`, and one thread watches for what does not come (`watching`). One lock, `changed`, covers all but
what a hold's own lock does; nobody steps, receives or talks to the network while holding it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.schema import Job
from checkmate.shadow import memory
from checkmate.shadow.commit import NEVER, Committee, Progress
from checkmate.shadow.connect import RECEIVE_BUFFER
from checkmate.shadow.connecting import Connector
from checkmate.shadow.group import Group, Refused, Start, check_job, check_start, start_of
from checkmate.shadow.hold import Hold
from checkmate.shadow.inlet import Inlet
from checkmate.shadow.receive import Reader
from checkmate.shadow.streams import hold_plans

log = logging.getLogger("checkmate")

GRACE = 2.0
"""Seconds for which a stream may stand below its recorded end before the rest is lost."""

_REMEMBERED = 64  # fenced starts of training
_PAUSE = 1.0  # seconds, after what should not happen


class Node:
    """One shadow node of a job. `close` ends its threads."""

    def __init__(
        self,
        job: Job,
        node_id: int,
        *,
        receive_buffer: int = RECEIVE_BUFFER,
        grace: float = GRACE,
        threads: int | None = None,
    ) -> None:
        self.job, self.id, self.grace = job, node_id, grace
        self.plans = hold_plans(job, node_id)
        self.nics = [str(nic.ip) for nic in job.node(node_id).nics]
        self.receive_buffer = receive_buffer
        self.changed = threading.Condition()
        self.groups: dict[int, Group] = {}
        self.start: Start | None = None
        """The one whose committee it is."""
        self.committee = self.new_committee(-1)
        self.fenced = False
        self.answered = False
        """Whether a fence has said what there is: it stays as it is until the next `Fence` or `Begin`."""
        self.fenced_starts: deque[Start] = deque(maxlen=_REMEMBERED)
        self.reserved: dict[int, list[float]] = {}
        """Iterations that are kept readable: for each reservation, until when."""
        self.troubles: list[str] = []
        self.step_seconds = 0.0
        self.stopping = self._stepping = False
        self._threads = threads
        self.readers = [Reader(f"nic {ip}", self.touch, self._broken) for ip in self.nics]
        self.connector = Connector(self.readers, self.nics, receive_buffer, self.touch)
        self._stepper = threading.Thread(target=self._step_forever, name="steps", daemon=True)
        self._stepper.start()

    def new_committee(self, incarnation: int, start: bytes = b"") -> Committee:
        """A view of the job's nodes at the start of an incarnation; -1: none has begun."""
        ids = [node.id for node in self.job.shadow_nodes]
        return Committee(self.id, ids, incarnation, time.monotonic(), start=start)

    @property
    def holds(self) -> Iterator[tuple[Group, Hold]]:
        """All holds, each with its group."""
        for group in list(self.groups.values()):
            for hold in list(group.holds):
                yield group, hold

    @property
    def _present(self) -> Iterator[tuple[Group, Hold]]:
        """Holds of the present start of training: a group that has not begun it has no say in it."""
        return ((group, hold) for group, hold in self.holds if start_of(group.begin) == self.start)

    def group(self, number: int, said: pb.RecordPart | pb.SeedHeader) -> Group:
        """The group that trainers speak of; `Refused` where it has not begun here, or in another start."""
        check_job(self.job, said.job)
        group = self.groups.get(number)
        if group is None:
            raise Refused(
                f"DP group {number} has not begun incarnation {said.incarnation} here; none has",
                precondition=True,
            )
        check_start(group.begin, said)
        return group

    def touch(self) -> None:
        """Something came: see what it changes."""
        with self.changed:
            self.refresh()

    def refresh(self) -> None:
        """See what has come in full, who is live, and what that lets us decide. The caller has the lock.

        A fenced node goes on telling what it has, and no more than it answered: so nobody who isn't fenced
        yet commits what it lacks.
        """
        if self.answered:
            self.changed.notify_all()
            return
        live, kept = [], []
        for group, hold in self._present:
            if not hold.settled:
                hold.update(group.records)
                if not self.fenced and hold.may_go_live(self.committee.committed):
                    hold.go_live()
            if hold.live and (self.fenced or not hold.settled):  # a settled one waits for its group's Begin
                live.append(hold)
            elif hold.seeded and not (hold.doubtful or hold.settled):
                kept.append(((hold.plan.group, hold.plan.shard), hold.stepped))
        patience = self.committee.mine.patience
        self.committee.report(
            Progress(
                self.committee.incarnation,
                min((hold.in_full for hold in live), default=NEVER),
                max((hold.released for hold in live), default=NEVER),
                bool(live),
                patience,
                frozenset((hold.plan.group, hold.plan.shard) for hold in live),
                tuple(kept),
                any(hold.pressed(patience, self.receive_buffer) for hold in live),
                self.committee.start,
            )
        )
        if not self.fenced:
            self.committee.decide(time.monotonic())
        self.changed.notify_all()

    def connect(self, group: Group, hold: Hold) -> None:
        """Connect a hold's streams, in the background."""
        for reader in self.readers:
            reader.wake()  # to close what was closed
        for inlet in hold.inlets:
            self.connector.connect(inlet, group.begin.incarnation)

    def quiet(self, timeout: float) -> None:
        """Wait until no step is under way. The caller has the lock, and has seen to it that none starts."""
        self.changed.wait_for(lambda: not self._stepping, timeout)

    def step(self, group: Group, hold: Hold, iteration: int) -> None:
        """Step one hold. One that can't step is seeded anew, and one that comparing finds wrong, which stays
        in doubt until it is found right.
        """
        with self.changed:
            if iteration != hold.released + 1:
                return  # it has joined anew meanwhile
            said, hold.stepping = group.records.step(iteration), iteration
        try:
            troubles = hold.step(iteration, said)
        except Exception as error:
            log.exception("%s: iteration %d can't be stepped", hold, iteration)
            with self.changed:
                hold.stepping = None
                self._renew(group, hold, f"iteration {iteration} can't be stepped: {error}")
            return
        with self.changed:
            group.records.stepped(iteration)
            self.tell(group.records.trouble)
            hold.stepping = None
            hold.last = iteration if said.last else None
            if troubles:
                self._doubt(group, hold, iteration, troubles)
            elif over := hold.doubt.over():
                hold.trouble = ""
                self.tell(f"{hold}: {over}")
            self.changed.notify_all()

    def _doubt(self, group: Group, hold: Hold, iteration: int, troubles: Sequence[str]) -> None:
        """Comparing has found a hold wrong: the trainers have the truth, so it is seeded anew."""
        hold.doubt.found(iteration)
        hold.trouble = "; ".join(troubles)
        log.error("%s: %s", hold, hold.trouble)
        if not self.fenced and hold.doubt.may_renew(time.monotonic()):
            self._renew(group, hold, hold.trouble)

    def tell(self, trouble: str) -> None:
        """Say what is wrong with the node, once. The caller has the lock."""
        if trouble and trouble not in self.troubles:
            self.troubles.append(trouble)
            log.error("%s", trouble)

    def join_again(self, group: Group, hold: Hold) -> int:
        """Join a hold some iterations ahead, at the one that is returned. The caller has the lock."""
        iteration = hold.joinable(group.newest)
        hold.join(iteration)
        self.connect(group, hold)
        return iteration

    def _renew(self, group: Group, hold: Hold, trouble: str) -> None:
        if not hold.live:
            hold.ahead *= 2  # it was no better the last time
        hold.empty()
        hold.trouble = trouble
        if not self.fenced:
            hold.trouble += f"; it joins again at iteration {self.join_again(group, hold)}"

    def forget(self) -> None:
        """Drop records that nobody will need; none while they are kept. The caller has the lock."""
        for group in self.groups.values():
            if any(hold.stepping is not None for hold in group.holds):
                continue
            states = [hold.stepped for hold in group.holds]  # after a gap these aren't what was released
            group.records.forget([hold.released for hold in group.holds], {*states, *self.reserved})

    def close(self) -> None:
        """End all threads, close all sockets."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self.connector.stop()
        for _, hold in self.holds:
            hold.close()
        self._stepper.join()
        for reader in self.readers:
            reader.stop()

    def _due(self) -> list[tuple[Group, Hold, int]]:
        if self.fenced:
            return []
        committed, alone = self.committee.committed, self.committee.nobody_live(time.monotonic())
        return [
            (group, hold, due)
            for group, hold in self._present
            if (due := hold.due(committed, alone=alone)) is not None
        ]

    def _step_forever(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        while not self.stopping:
            try:
                self._step_due()
            except Exception as error:  # our own fault; a thread that ended would look alive
                log.exception("stepping")
                with self.changed:
                    self._stepping = False
                    self.tell(f"stepping failed: {error!r}")
                    self.changed.wait_for(lambda: self.stopping, _PAUSE)

    def _step_due(self) -> None:
        """Wait until holds are due, and step them."""
        with self.changed:
            while not (due := self._due()) and not self.stopping:
                self.changed.wait()
            if self.stopping:
                return
            self._stepping = True
        start = time.monotonic()
        for group, hold, iteration in due:
            self.step(group, hold, iteration)
        self.step_seconds = time.monotonic() - start
        if any(hold.take_loaded() for _, hold, _ in due):
            memory.trim()
        with self.changed:
            self._stepping = False
            self.forget()
            self.refresh()
        for reader in self.readers:
            reader.wake()

    def _broken(self, inlet: Inlet) -> None:
        """A connection broke: it goes on where it stood, and a gap shows if something was sent meanwhile."""
        log.warning("%s: %s; connecting again", inlet.plan, inlet.broken)
        with self.changed:
            group = self.groups.get(inlet.plan.group)
            if group is not None and not inlet.closed:
                self.connector.connect_again(inlet, group.begin.incarnation)
