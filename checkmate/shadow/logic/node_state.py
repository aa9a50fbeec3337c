"""State and decisions of a shadow node: its DP groups, its holds, and when they step. Pure.

It has no threads, locks, sockets, tensors or clock. `node.Node` reports events with their time, and carries
out the requested effects (`effects`). After each event it calls `refresh`, which derives the consequences.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from checkmate.events.kinds import NODE_DRAINED
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import job_ranks, ranks_digest
from checkmate.nodes.standing import holders_of, overlap_words
from checkmate.output.log_lines import left_out_words
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic import announcements
from checkmate.shadow.logic.commit import NEVER, Committee, Progress
from checkmate.shadow.logic.effects import Close, Connect, DueStep, Effect, Empty, Join, Log, Release
from checkmate.shadow.logic.group import (
    CallRefused,
    Former,
    ShadowGroup,
    Start,
    check_job,
    in_start,
    start_of,
)
from checkmate.shadow.logic.hold import AHEAD, Hold, HoldSnapshot, Stepped
from checkmate.shadow.logic.phases import LEFT_TROUBLE, Leaving, Phase
from checkmate.shadow.logic.room import Room, SocketRoom, TrainerRoom
from checkmate.shadow.logic.starts import EndedStarts, OlderStarts, Superseded

MAX_DOUBTS: Final = 4
"""Doubts of a shard that are past and in the status: newer ones take the place of older ones."""


@dataclass(slots=True)
class Tally:
    """Counts of the actions of a node since its start, for its metrics."""

    steps: int = 0
    step_seconds: float = 0.0
    gaps: int = 0
    mismatches: int = 0
    seeds: int = 0

    def count_steps(self, seconds: float) -> None:
        """Count a round of steps, of all holds that were due, which took these seconds."""
        self.steps += 1
        self.step_seconds += seconds

    def count_gap(self) -> None:
        """Count a loss of gradients."""
        self.gaps += 1

    def count_mismatch(self) -> None:
        """Count a step after which a hold differed from the trainers."""
        self.mismatches += 1

    def count_seeds(self) -> None:
        """Count a stream of seeds."""
        self.seeds += 1


class NodeState:
    """The state of one shadow node of a job."""

    def __init__(self, job: Job, node_id: int, now: float, *, receive_buffer: int, grace: float) -> None:
        """`receive_buffer` is bytes per stream's socket, `grace` seconds; see `Hold.gap`."""
        self.job, self.id, self.grace = job, node_id, grace
        self._room: Room = TrainerRoom() if job.copies == "host" else SocketRoom(now, receive_buffer)
        self.groups: dict[int, ShadowGroup] = {}
        self.start: Start | None = None
        """The start of training of `committee`."""
        self.committee = self._new_committee(-1, b"", now)
        self.phase = Phase.OPEN
        self.leaving = Leaving()
        self.ended_starts = EndedStarts()
        self.older_starts = OlderStarts()
        self.former: Former | None = None
        """What it holds of the job with other ranks, until its nodes hold all shards of the present one."""
        self.refusal: pb.Refusal | None = None
        """Why a script was refused in the start of training that began last."""
        self.reserved: dict[int, list[float]] = {}
        """Iterations that are kept readable, with the end of each reservation."""
        self.troubles: list[str] = []
        self.doubts: dict[tuple[int, int], deque[str]] = {}
        """By shard: the last times in which checkpoints were doubtful, in words."""
        self.tally = Tally()
        self._peers = announcements.PeerWatch()
        self._lags = announcements.LagWatch()
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Return and remove the effects to carry out."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def holds(self) -> Iterator[tuple[ShadowGroup, Hold]]:
        """All holds, each with its group."""
        for group in list(self.groups.values()):
            for hold in list(group.holds):
                yield group, hold

    @property
    def former_holds(self) -> list[tuple[ShadowGroup, Hold]]:
        """Those of the job with other ranks, each with its group."""
        groups = [] if self.former is None else self.former.groups.values()
        return [(group, hold) for group in groups for hold in group.holds]

    @property
    def all_troubles(self) -> list[str]:
        """Problems of the node, doubts that are past, and an older start that goes on."""
        doubts = [doubt for of_hold in self.doubts.values() for doubt in of_hold]
        return [
            *self.troubles,
            *doubts,
            *([overlap_words(self.older_starts.hosts)] if self.older_starts.hosts else []),
        ]

    @property
    def newest(self) -> int:
        """The newest iteration that trainers are known to have reached."""
        return max((group.newest for group in self.groups.values()), default=0)

    def group(self, number: int, message: pb.RecordPart | pb.SeedHeader) -> ShadowGroup:
        """Return a group. Raise `CallRefused` unless it has begun here, in the same start as `message`.

        A node that was drained says so.
        """
        check_job(self.job, message.job)
        self.leaving.check_here()
        return in_start(self.groups.get(number), number, message)

    def repaired_group(self, number: int, message: pb.RecordPart) -> ShadowGroup | None:
        """Return a group whose streams may be repaired: of the start of `message`, and not in a restart."""
        group = self.groups.get(number)
        is_same = group is not None and (group.begin.run, group.begin.start) == (message.run, message.start)
        return group if is_same and self.phase is Phase.OPEN else None

    def take_up(self, job: Job, now: float) -> None:
        """Go on with a job file in which the ranks have changed.

        What a restart has settled stays for readers, as `former`; if it is of these ranks, it is the present
        state again. All else is dropped, because a start of training does not need it.
        """
        for group in self.groups.values():
            self.ended_starts.end(start_of(group.begin))
            self.older_starts.end(group.begin, "", now)
        present, former = Former(self.job, self.groups), self.former
        settled = bool(present.holds) and all(hold.settled for hold in present.holds)
        kept_state, dropped = (present, former) if settled else (former, present)
        if dropped is not None:
            self._close(dropped.holds)
        self.job, self.groups, self.former = job, {}, kept_state
        if kept_state is not None and kept_state.digest == ranks_digest(job_ranks(job)):
            self.groups, self.former = kept_state.groups, None
        for iteration in [iteration for iteration, ends in self.reserved.items() for _ in ends]:
            self.release(iteration)
        self.doubts.clear()
        self.start = None
        self.committee = self._new_committee(self.committee.incarnation, b"", now)
        self.phase = Phase.FENCED
        self._effects.append(announcements.took_up(self.former is not None))

    def groups_of(self, ranks: bytes) -> dict[int, ShadowGroup]:
        """Return the groups of the ranks with a digest; without one, the present or else the former ones."""
        if not ranks:
            former = {} if self.former is None else self.former.groups
            return former | {number: group for number, group in self.groups.items() if group.holds}
        if ranks == ranks_digest(job_ranks(self.job)):
            return self.groups
        return self.former.groups if self.former is not None and ranks == self.former.digest else {}

    def begin_group(self, group: ShadowGroup, now: float, by: str = "") -> None:
        """Start a DP group, in place of its earlier incarnation. `by`: the address of who asks for it."""
        start, number = start_of(group.begin), group.begin.group
        if (old := self.groups.get(number)) is not None:
            self._close(old.holds)
            if start_of(old.begin) != start:
                self.ended_starts.end(start_of(old.begin))
                self.older_starts.end(old.begin, by, now)
        if self.start != start:
            self.older_starts.note_newest()
            self.refusal = None
        self.groups[number] = group
        if self.fenced or self.start != start:
            self.start = start
            self.committee = self._new_committee(group.begin.incarnation, group.begin.start, now)
        self.phase = Phase.OPEN
        self._effects += [Connect(hold) for hold in group.holds]

    @property
    def fenced(self) -> bool:
        """Whether nothing more is committed in this start of training, for good."""
        return self.phase >= Phase.FENCED

    @property
    def drained(self) -> bool:
        """Whether everything sent has been stepped, so that no iteration is incomplete."""
        return all(
            hold.released >= max(group.records.newest, hold.receiving) and not hold.awaits(group.records)
            for group, hold in self._present
            if hold.live and not hold.settled
        )

    @property
    def undecided(self) -> bool:
        """Whether a complete iteration is not stepped, because other nodes have not reported it yet."""
        return any(hold.has_whole for _, hold in self._present)

    def drain(self) -> None:
        """Refuse known starts of training, and continue to commit recorded iterations."""
        self.phase = Phase.FENCED if self.fenced else max(self.phase, Phase.DRAINING)
        self.stay("training restarts")
        for group in self.groups.values():
            self.ended_starts.end(start_of(group.begin))

    def end_drain(self) -> None:
        """Note that no data has arrived for a while, unless the drain was overtaken by a fence or a start."""
        if self.phase is Phase.DRAINING:
            self.phase = Phase.DRAINED

    def fence(self) -> None:
        """Stop commits in this start of training for good."""
        self.drain()
        self.phase = Phase.FENCED

    def end_fence(self) -> None:
        """Note that the fence is answered: the status does not change until the next `Fence` or `Begin`."""
        self.phase = Phase.ANSWERED

    def supersede(self, by: str, now: float) -> None:
        """Note that another start has fenced this one, from the address `by`."""
        for group in self.groups.values():
            self.older_starts.end(group.begin, by, now)

    def superseded(self, part: pb.RecordPart, host: str, now: float) -> Superseded | None:
        """Return the start of a record from a trainer at the address `host`, if it is superseded.

        The log says once that it goes on.
        """
        start = self.older_starts.find(part)
        if start is not None and self.older_starts.hear_record(start, host, now):
            self._effects.append(announcements.training_overlaps(self.older_starts.hosts, now - start.since))
        return start

    def keep_refusal(self, request: pb.RefusedRequest) -> None:
        """Keep why a script was refused, unless that of another rank came first.

        Raises `CallRefused` if its start is not the one that began last here.
        """
        begins = [
            candidate.begin for candidate in self.groups.values() if start_of(candidate.begin) == self.start
        ]
        begin = next((candidate for candidate in begins if candidate.start == request.start), None)
        if begin is None:
            raise CallRefused("that start of training has not begun here last", precondition=True)
        if self.refusal is None:
            self.refusal = pb.Refusal(
                generation=begin.generation,
                incarnation=begin.incarnation,
                start=begin.start,
                iteration=request.iteration,
                rank=request.rank,
                text=request.text,
                marks=request.marks,
            )
            self._effects.append(announcements.training_refused(self.refusal))

    @property
    def generation(self) -> int:
        """The greatest generation that this node knows."""
        groups = [*self.groups.values(), *(group for group, _ in self.former_holds)]
        return max([self.ended_starts.discarded, *(group.begin.generation for group in groups)])

    def reset(self, generation: int) -> None:
        """Discard all groups, for good. Raise `CallRefused` if a greater generation has begun here."""
        self.ended_starts.discard(generation, self.generation)
        self.fence()
        if self.former is not None or any(hold.holds_something for _, hold in self.holds):
            self._effects.append(announcements.node_reset(generation))
        self._close([hold for _, hold in self.holds])
        self.drop_former()
        self.groups.clear()
        self.troubles.clear()
        self.doubts.clear()
        self.refusal = None

    def leave(self) -> None:
        """Drop all holds, for good: other nodes hold the shards, or the operator has forced it."""
        self.leaving.go()
        self._close([hold for _, hold in self.holds])
        self.drop_former()
        self.groups.clear()
        self.doubts.clear()
        self.troubles, self.refusal = [LEFT_TROUBLE], None
        self._effects.append(Log(logging.WARNING, LEFT_TROUBLE, NODE_DRAINED()))

    def stay(self, why: str) -> None:
        """Count as a live holder again, if the node is about to leave."""
        if self.leaving.stay():
            self._effects.append(Log(logging.WARNING, f"it was asked to leave, and stays: {why}"))

    def refresh(self, now: float) -> None:
        """Update which iterations are complete and which holds are live, and decide on that basis.

        A fenced node reports no more progress than in its answer, so that others do not commit what it lacks.
        """
        if self.phase is Phase.ANSWERED:
            return
        live, kept_shards, patience = [], [], self._room.seconds
        for group, hold in self._present:
            if not hold.settled:
                hold.update(group.records)
                if not self.fenced and hold.may_go_live(self.committee.committed):
                    hold.go_live(now)
                    self._effects.append(announcements.hold_live(hold))
            counts = not self.leaving.undecided and (self.fenced or not hold.settled)
            if hold.live and counts:  # a settled one waits for its group's Begin
                live.append(hold)
            elif hold.seeded and not (hold.doubtful or hold.settled):
                kept_shards.append((hold.shard, hold.stepped))
        self.committee.report(
            Progress(
                incarnation=self.committee.incarnation,
                in_full=min((hold.in_full for hold in live), default=NEVER),
                stepped=max((hold.released for hold in live), default=NEVER),
                live=bool(live),
                patience=patience,
                shards=frozenset(hold.shard for hold in live if not hold.doubtful),
                kept_shards=tuple(kept_shards),
                pressed=any(hold.is_full and self._room.is_short(hold.streams) for hold in live),
                start=self.committee.start,
            )
        )
        if not self.fenced:
            self.committee.decide(now)
        if self.former is not None and self._has_trained and self.committee.is_whole(now):
            self._effects.append(announcements.former_dropped())
            self.drop_former()
        self._effects += self._peers.announce_behind(self.committee)

    def due_steps(self, now: float) -> list[DueStep]:
        """Return the steps to do now, at most one per hold."""
        if self.fenced:
            return []
        committed, alone = self.committee.committed, self.committee.nobody_live(now)
        return [
            DueStep(group, hold, iteration)
            for group, hold in self._present
            if not hold.busy and (iteration := hold.next_step(committed, alone=alone)) is not None
        ]

    def begin_step(self, due_step: DueStep) -> pb.Step | None:
        """Begin a step and return its record, or `None` if the hold has rejoined in the meantime."""
        if due_step.iteration != due_step.hold.released + 1:
            return None
        due_step.hold.begin_step(due_step.iteration)
        return due_step.group.records.step(due_step.iteration)

    def end_step(self, due_step: DueStep, step: pb.Step, result: Stepped, now: float) -> None:
        """Record the end of a step. A hold that differs stays in doubt until it is found equal."""
        group, hold = due_step.group, due_step.hold
        hold.end_step(due_step.iteration, final=step.last, result=result)
        group.records.keep(due_step.iteration)
        self.tell(group.records.trouble)
        if result.troubles:
            self.tally.count_mismatch()
            if (left_out := hold.differences.again(due_step.iteration)) is not None:
                self._effects.append(announcements.comparison_mismatch(hold, due_step.iteration, left_out))
            if not self.fenced and hold.doubt.may_renew(now):  # the trainers' state is authoritative
                self._renew(group, hold, hold.trouble)
        elif not result.suspects and (words := hold.end_doubt()):
            self._doubt_over(hold, words)

    def begin_load(self, hold: Hold) -> bool:
        """Return whether to load seeds into a hold: otherwise they are duplicates, or of an earlier start."""
        if hold.live or hold.settled:
            return False
        hold.begin_load()
        return True

    def end_load(self, hold: Hold, snapshot: HoldSnapshot) -> None:
        """Record which parameters a hold has after seeds were loaded."""
        before = hold.seeded
        hold.end_load()
        hold.update_at(snapshot)
        if hold.seeded and not before:
            self._effects.append(announcements.hold_seeded(hold))

    def fail_step(self, due_step: DueStep, error: Exception, snapshot: HoldSnapshot) -> None:
        """Reseed a hold that cannot step. During a restart, keep it if its state is still complete."""
        hold, trouble = due_step.hold, f"stepping iteration {due_step.iteration} failed: {error}"
        hold.fail_step(snapshot)
        if self.fenced and hold.seeded:
            hold.note_trouble(trouble)
        else:
            self._renew(due_step.group, hold, trouble)

    def note_trouble(self, trouble: str) -> None:
        """Add a problem of the node to the status."""
        self.troubles.append(trouble)

    def tell(self, trouble: str) -> None:
        """Log a problem of the node, once, and add it to the status."""
        if trouble and trouble not in self.troubles:
            self.note_trouble(trouble)
            self._effects.append(announcements.node_trouble(trouble))

    def _doubt_over(self, hold: Hold, words: str) -> None:
        """Add to the status what was doubtful, and log it if the doubt was logged."""
        message = f"{hold}: {words}"
        self.doubts.setdefault(hold.shard, deque(maxlen=MAX_DOUBTS)).append(message)
        if (left_out := hold.differences.over()) is None:
            return
        self._effects.append(announcements.node_trouble(f"{message}{left_out_words(left_out)}"))
        if hold.live:  # a mismatch has ended that, for whoever reads the events
            self._effects.append(announcements.hold_changed(logging.DEBUG, hold, "live", message, words))

    def forget(self) -> None:
        """Drop records that are no longer needed, except during a step."""
        for group in self.groups.values():
            if any(hold.stepping is not None for hold in group.holds):
                continue
            states = [hold.stepped for hold in group.holds]  # differs from `released` after a gap
            group.records.forget([hold.released for hold in group.holds], {*states, *self.reserved})

    def tick(self, now: float) -> None:
        """Check for gaps, lag, expired reservations, and older starts that have ended."""
        for iteration, ends in list(self.reserved.items()):
            for _ in [end for end in ends if end < now]:
                self.release(iteration)
        if self.leaving.expired(now):
            self.stay("nobody has told it to go")
        self.forget()
        self.older_starts.forget(now)
        self._effects += self._peers.announce_lost(self.committee)
        self._room.measure((stream for _, hold in self.holds for stream in hold.streams), now)
        for group, hold in self.holds:
            if hold.settled or self.phase is not Phase.OPEN:
                continue  # a restart needs received data unchanged
            loss = hold.gap(group.records, now, self.grace)
            if loss is not None:
                if not (hold.busy or hold.has_whole):  # otherwise after that is stepped
                    self.tally.count_gap()
                    self._join_again(group, hold, loss)
            elif hold.live and (lag := hold.lag(group.trained, now)):
                self._effects.append(self._lags.announce(hold, *lag, now))

    def reserve(self, iteration: int, end: float) -> None:
        """Keep an iteration readable until the time `end`, beside its other reservations."""
        self.reserved.setdefault(iteration, []).append(end)

    def release(self, iteration: int) -> None:
        """End the reservation of an iteration that expires first."""
        ends = self.reserved.get(iteration)
        if not ends:
            return
        ends.remove(min(ends))
        if not ends:
            del self.reserved[iteration]
        self._effects.append(Release(iteration))

    def drop(self, group: ShadowGroup, hold: Hold, why: str) -> None:
        """Drop a hold that a restart cannot use. Keep the reason until the next `Begin`."""
        if hold not in group.holds:
            return
        group.remove(hold, why)
        if self.former is not None and not self.former.holds:
            self.former = None
        self._effects.append(Close(hold))
        if hold.holds_something:
            self._effects.append(announcements.hold_changed(logging.WARNING, hold, "dropped", why, why))

    @property
    def _has_trained(self) -> bool:
        """Whether an iteration of this start is committed. The record before its first one may lack parts."""
        first = max((group.begin.first_iteration for group in self.groups.values()), default=None)
        return first is not None and self.committee.committed >= first

    def drop_former(self) -> None:
        """Drop what is left of the job with other ranks, for good."""
        if self.former is not None:
            self._close(self.former.holds)
            self.former = None

    def _close(self, holds: Iterable[Hold]) -> None:
        self._effects += [Close(hold) for hold in holds]

    @property
    def _present(self) -> Iterator[tuple[ShadowGroup, Hold]]:
        """Holds of the present start of training, without groups that have not begun it."""
        return ((group, hold) for group, hold in self.holds if start_of(group.begin) == self.start)

    def _new_committee(self, incarnation: int, start: bytes, now: float) -> Committee:
        nodes = [node.id for node in self.job.shadow_nodes]
        passes = self._room.passes_laggards
        shards = frozenset(holders_of(self.job))
        return Committee(self.id, nodes, incarnation, now, start=start, passes_laggards=passes, shards=shards)

    def _renew(self, group: ShadowGroup, hold: Hold, trouble: str) -> None:
        """Reseed a hold from scratch; twice as far ahead if the last attempt was too late."""
        hold.reach_farther()
        hold.lose_state()
        self._effects.append(Empty(hold))
        hold.note_trouble(trouble)
        if not self.fenced:
            hold.note_trouble(f"{trouble}; it joins again at iteration {self._join(group, hold)}")
            message = f"{hold}: {hold.trouble}"
            self._effects.append(
                announcements.hold_changed(logging.DEBUG, hold, "joining", message, hold.trouble)
            )

    def _join(self, group: ShadowGroup, hold: Hold) -> int:
        """Join a hold some iterations ahead. Return that iteration."""
        iteration = hold.joinable(group.newest)
        hold.join(iteration)
        self._effects.append(Join(hold))
        return iteration

    def _join_again(self, group: ShadowGroup, hold: Hold, loss: str) -> None:
        """Rejoin after a loss, some iterations ahead; twice as many if the last attempt was too late."""
        level = logging.WARNING if hold.live or hold.ahead == AHEAD else logging.DEBUG
        stepped = hold.stepped
        last = f"iteration {stepped} was its last, " if hold.seeded and stepped >= 0 else ""
        hold.reach_farther()
        iteration = self._join(group, hold)
        hold.note_trouble(f"{loss}; {last}it joins again at iteration {iteration}")
        self._effects.append(announcements.stream_gap(level, hold, stepped, iteration, loss))
