"""What a shadow node knows and decides: its DP groups, its holds, and when they step. Pure.

No thread, no lock, no socket, no tensor and no clock: `node.Node` tells it what has happened and when, and
does what it asks for (`effects`). After each event comes `refresh`, which sees what follows from it.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.commit import NEVER, Committee, Progress
from checkmate.shadow.logic.effects import Close, Connect, Effect, Empty, Join, Log, Release
from checkmate.shadow.logic.group import ShadowGroup, Start, check_job, in_start, start_of
from checkmate.shadow.logic.hold_state import AHEAD, HoldSnapshot, HoldState, Stepped
from checkmate.shadow.logic.patience import PatienceMeter

_REMEMBERED = 64  # fenced starts of training


class Phase(enum.IntEnum):
    """How far a restart has come."""

    OPEN = 0
    DRAINING = 1
    """What is recorded is committed and stepped; no start of training that has begun begins again."""
    DRAINED = 2
    """As while draining, and nothing has come for a while."""
    FENCED = 3
    """Nothing more is committed."""
    ANSWERED = 4
    """What there is has been said: it stays as it is until the next `Fence` or `Begin`."""


@dataclass(frozen=True, slots=True)
class Due:
    """A step that is to be done now."""

    group: ShadowGroup
    hold: HoldState
    iteration: int


class NodeState:
    """One shadow node of a job."""

    def __init__(self, job: Job, node_id: int, now: float, *, receive_buffer: int, grace: float) -> None:
        """`receive_buffer`: bytes of a stream's socket. `grace`: seconds, see `HoldState.gap`."""
        self.job, self.id, self.grace = job, node_id, grace
        self.receive_buffer = receive_buffer
        self.groups: dict[int, ShadowGroup] = {}
        self.start: Start | None = None
        """The one whose committee it is."""
        self.committee = self._new_committee(-1, b"", now)
        self.phase = Phase.OPEN
        self.fenced_starts: deque[Start] = deque(maxlen=_REMEMBERED)
        """Starts of training that a restart has ended: none of them begins again."""
        self.reserved: dict[int, list[float]] = {}
        """Iterations that are kept readable: for each reservation, until when."""
        self.troubles: list[str] = []
        self._patience = PatienceMeter(now, receive_buffer)
        self._behind: frozenset[int] = frozenset()
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, once."""
        taken, self._effects = self._effects, []
        return taken

    @property
    def holds(self) -> Iterator[tuple[ShadowGroup, HoldState]]:
        """All holds, each with its group."""
        for group in list(self.groups.values()):
            for hold in list(group.holds):
                yield group, hold

    def group(self, number: int, said: pb.RecordPart | pb.SeedHeader) -> ShadowGroup:
        """Return the group that trainers speak of; `Refused` unless it has begun here, in the same start."""
        check_job(self.job, said.job)
        return in_start(self.groups.get(number), number, said)

    def begun(self, group: ShadowGroup, now: float) -> None:
        """A DP group begins, in place of what it was here before."""
        start, number = start_of(group.begin), group.begin.group
        for hold in self.groups[number].holds if number in self.groups else ():
            self._effects.append(Close(hold))
        self.groups[number] = group
        if self.fenced or self.start != start:
            self.start = start
            self.committee = self._new_committee(group.begin.incarnation, group.begin.start, now)
        self.phase = Phase.OPEN
        self._effects += [Connect(hold, group.begin.incarnation) for hold in group.holds]

    @property
    def fenced(self) -> bool:
        """Whether nothing more is committed in this start of training, for good."""
        return self.phase >= Phase.FENCED

    @property
    def drained(self) -> bool:
        """Whether all that was sent has been stepped: nothing has come in part."""
        return all(
            hold.released >= max(group.records.newest, hold.receiving) and not hold.awaits(group.records)
            for group, hold in self._present
            if hold.live and not hold.settled
        )

    @property
    def undecided(self) -> bool:
        """Whether an iteration has come whole and is not stepped: others have not said that they have it."""
        return any(hold.has_whole for _, hold in self._present)

    def drain(self) -> None:
        """Let no training begin that has begun before, and go on committing what is recorded."""
        self.phase = Phase.FENCED if self.fenced else max(self.phase, Phase.DRAINING)
        for group in self.groups.values():
            start = start_of(group.begin)
            if start not in self.fenced_starts:
                self.fenced_starts.append(start)

    def fence(self) -> None:
        """Commit nothing more in this start of training, for good."""
        self.drain()
        self.phase = Phase.FENCED

    def refresh(self, now: float) -> None:
        """See what has come in full, who is live, and what that lets us decide.

        A fenced node goes on telling what it has, and no more than it answered: so nobody who isn't fenced
        yet commits what it lacks.
        """
        if self.phase is Phase.ANSWERED:
            return
        live, kept, patience = [], [], self._patience.seconds
        for group, hold in self._present:
            if not hold.settled:
                hold.update(group.records)
                if not self.fenced and hold.may_go_live(self.committee.committed):
                    hold.go_live(now)
                    self._log(logging.INFO, f"{hold}: live at iteration {hold.stepped}")
            if hold.live and (self.fenced or not hold.settled):  # a settled one waits for its group's Begin
                live.append(hold)
            elif hold.seeded and not (hold.doubtful or hold.settled):
                kept.append((hold.shard, hold.stepped))
        self.committee.report(
            Progress(
                self.committee.incarnation,
                min((hold.in_full for hold in live), default=NEVER),
                max((hold.released for hold in live), default=NEVER),
                bool(live),
                patience,
                frozenset(hold.shard for hold in live if not hold.doubtful),
                tuple(kept),
                any(hold.pressed(patience, self.receive_buffer) for hold in live),
                self.committee.start,
            )
        )
        if not self.fenced:
            self.committee.decide(now)
        self._say_behind()

    def due(self, now: float) -> list[Due]:
        """Return the steps to do now, one of a hold."""
        if self.fenced:
            return []
        committed, alone = self.committee.committed, self.committee.nobody_live(now)
        return [
            Due(group, hold, iteration)
            for group, hold in self._present
            if not hold.busy and (iteration := hold.due(committed, alone=alone)) is not None
        ]

    def begin_step(self, due: Due) -> pb.Step | None:
        """Return what trainers said of a step that begins; `None` if the hold has joined again meanwhile."""
        if due.iteration != due.hold.released + 1:
            return None
        due.hold.stepping = due.iteration
        return due.group.records.step(due.iteration)

    def stepped(self, due: Due, step: pb.Step, result: Stepped, now: float) -> None:
        """A step has ended. A hold that comparing finds wrong stays in doubt until it is found right."""
        group, hold = due.group, due.hold
        hold.stepping = None
        if due.iteration == hold.released + 1:
            hold.released = due.iteration
        hold.took(result.snapshot)
        hold.last = due.iteration if step.last else None
        hold.suspects = result.suspects
        group.records.stepped(due.iteration)
        self.tell(group.records.trouble)
        if result.troubles:
            hold.doubt.found(due.iteration, result.equal)
            hold.trouble = "; ".join(result.troubles)
            self._log(logging.ERROR, f"{hold}: {hold.trouble}")
            if not self.fenced and hold.doubt.may_renew(now):  # the trainers have the truth
                self._renew(group, hold, hold.trouble)
        elif not result.suspects and (over := hold.doubt.over()):
            hold.trouble = ""
            self.tell(f"{hold}: {over}")

    def step_failed(self, due: Due, error: Exception, snapshot: HoldSnapshot) -> None:
        """A hold that can't step is seeded anew; during a restart it stays, if its state is still whole."""
        hold, trouble = due.hold, f"iteration {due.iteration} can't be stepped: {error}"
        hold.stepping = None
        hold.took(snapshot)
        if self.fenced and hold.seeded:
            hold.trouble = trouble
        else:
            self._renew(due.group, hold, trouble)

    def tell(self, trouble: str) -> None:
        """Say what is wrong with the node, once."""
        if trouble and trouble not in self.troubles:
            self.troubles.append(trouble)
            self._log(logging.ERROR, trouble)

    def forget(self) -> None:
        """Drop records that nobody will need; none while they are kept."""
        for group in self.groups.values():
            if any(hold.stepping is not None for hold in group.holds):
                continue
            states = [hold.stepped for hold in group.holds]  # after a gap these aren't what was released
            group.records.forget([hold.released for hold in group.holds], {*states, *self.reserved})

    def tick(self, now: float) -> None:
        """Time has passed: look for gaps, lag, and reservations that nobody ends."""
        for iteration, ends in list(self.reserved.items()):
            for _ in [end for end in ends if end < now]:
                self.release(iteration)
        self.forget()
        self._patience.measure((stream for _, hold in self.holds for stream in hold.streams), now)
        for group, hold in self.holds:
            if hold.settled or self.phase is not Phase.OPEN:
                continue  # what has come is wanted as it is
            lost = hold.gap(group.records, now, self.grace)
            if lost is not None:
                if not (hold.busy or hold.has_whole):  # else once that is stepped
                    self._join_again(group, hold, lost)
            elif hold.live and (said := hold.lag(group.records.newest, now)):
                self._log(*said)

    def release(self, iteration: int) -> None:
        """End the reservation of an iteration that would end first."""
        ends = self.reserved.get(iteration)
        if not ends:
            return
        ends.remove(min(ends))
        if not ends:
            del self.reserved[iteration]
        self._effects.append(Release(iteration))

    def drop(self, group: ShadowGroup, hold: HoldState, why: str) -> None:
        """A restart has no use for a hold; `why` is kept until the next `Begin`."""
        if hold not in group.holds:
            return
        group.holds.remove(hold)
        self._effects.append(Close(hold))
        if hold.holds_something:
            group.dropped[hold.plan.shard] = why
            self._log(logging.WARNING, why)

    @property
    def _present(self) -> Iterator[tuple[ShadowGroup, HoldState]]:
        """Holds of the present start of training: a group that has not begun it has no say in it."""
        return ((group, hold) for group, hold in self.holds if start_of(group.begin) == self.start)

    def _new_committee(self, incarnation: int, start: bytes, now: float) -> Committee:
        """A view of the job's nodes at the start of an incarnation; -1: none has begun."""
        return Committee(self.id, [node.id for node in self.job.shadow_nodes], incarnation, now, start=start)

    def _log(self, level: int, message: str) -> None:
        self._effects.append(Log(level, message))

    def _renew(self, group: ShadowGroup, hold: HoldState, trouble: str) -> None:
        """Have a hold seeded from scratch; twice as far ahead if the last time was too late."""
        if not hold.live:
            hold.ahead *= 2
        hold.live, hold.at = False, {}
        self._effects.append(Empty(hold))
        hold.trouble = trouble
        if not self.fenced:
            hold.trouble += f"; it joins again at iteration {self._join(group, hold)}"

    def _join(self, group: ShadowGroup, hold: HoldState) -> int:
        """Join a hold some iterations ahead, at the one that is returned."""
        iteration = hold.joinable(group.newest)
        hold.join(iteration)
        self._effects.append(Join(hold, group.begin.incarnation))
        return iteration

    def _join_again(self, group: ShadowGroup, hold: HoldState, lost: str) -> None:
        """Give up what was lost, and join some iterations ahead: twice as many if that was too late."""
        level = logging.WARNING if hold.live or hold.ahead == AHEAD else logging.DEBUG
        last = f"iteration {hold.stepped} was its last, " if hold.seeded else ""
        if not hold.live:
            hold.ahead *= 2
        iteration = self._join(group, hold)
        hold.trouble = f"{lost}; {last}it joins again at iteration {iteration}"
        self._log(level, f"{hold}: {hold.trouble}")

    def _say_behind(self) -> None:
        """Say which nodes don't count, because others went on without them, and which do again."""
        behind = self.committee.behind
        for node in behind.keys() - self._behind:
            self._log(
                logging.WARNING, f"shadow node {node} is {behind[node]} iterations behind, and doesn't count"
            )
        for node in self._behind - behind.keys():
            self._log(logging.INFO, f"shadow node {node} is not behind any more")
        self._behind = frozenset(behind)
