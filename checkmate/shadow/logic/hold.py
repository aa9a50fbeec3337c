"""A hold: one shard of one DP group on this node, without its tensors and sockets. Pure.

A hold joins at some iteration, and receives everything from there on. It is seeded, at once or parameter by
parameter, and steps the parameters it has. It is live once all of them are at the same iteration (design,
*Loss*).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from checkmate.base.wording import counted
from checkmate.output.log_lines import Repetition
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.records import Records
from checkmate.shadow.logic.repair import StreamRepair
from checkmate.shadow.receive.hold_plans import (
    FARTHEST,
    SETS,
    HoldPlan,
    StreamPlan,
    ahead_at_most,
    whole_through,
)
from checkmate.wire.schedule import StreamLayout

AHEAD = 3
"""Number of iterations ahead of the trainers at which a hold joins, so that it is connected in time."""

LAG_SECONDS = 1.0
"""Seconds after which a hold reports that it is behind."""

RECORD_GRACES = 5
"""Multiple of a stream's grace after which an overtaken record counts as lost."""


RENEW_SECONDS = (60.0, 3600.0)
"""First and longest interval between reseeds of a hold that stays doubtful; it doubles each time."""


@dataclass(slots=True)
class StreamState:
    """State of one stream. `position` is its next byte (64 bits), `queued` the bytes in its socket."""

    plan: StreamPlan
    layout: StreamLayout
    position: int = 0
    received_bytes: int = 0
    connected: bool = False
    paused: bool = False
    queued: int = 0
    lost: str = ""
    """Why the rest of it is lost, if its sender has said so."""
    waited: float = 0.0
    """Seconds for which the sender has had what comes next; 0 if it has nothing, or is a switch."""
    period: float = 0.0
    """Seconds between the last iterations, if the sender tells."""
    stood: tuple[int, float] = (-1, 0.0)
    """A position below a recorded end, and the time since when it is unchanged."""
    repair: StreamRepair | None = None
    """What is asked of its sender again, if copies may be lost."""

    @property
    def checked(self) -> int:
        """Its next byte; if it is being repaired, the first byte whose digest was not compared."""
        return self.position if self.repair is None else self.repair.checked(self.position)

    def observe(
        self,
        position: int,
        received_bytes: int,
        *,
        connected: bool,
        paused: bool,
        queued: int,
        lost: str = "",
        waited: float = 0.0,
        period: float = 0.0,
    ) -> None:
        """Update the state to that of the stream's receiving end."""
        self.position, self.received_bytes = position, received_bytes
        self.connected, self.paused, self.queued = connected, paused, queued
        self.lost, self.waited, self.period = lost, waited, period

    def discard(self) -> None:
        """Forget the connection, whose data is discarded."""
        self.received_bytes, self.connected = 0, False
        self.forget_repair()

    def forget_repair(self) -> None:
        """Ask for nothing that was sent so far."""
        if self.repair is not None:
            self.repair = self.repair.renewed()

    def stands_below(self, end: int, now: float) -> float:
        """Return the seconds that it has not moved below `end`, without our own pauses."""
        if self.paused or self.position >= end:
            self.stood = (-1, now)
        elif self.stood[0] != self.position:
            self.stood = (self.position, now)
        return now - self.stood[1]


class HoldSnapshot(NamedTuple):
    """Iteration of each seeded parameter. The snapshot with the greater version is newer."""

    version: int
    at: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of a step: the iterations of the parameters, and the differences found by comparison.

    `equal` is the last iteration after which all that differs now was found equal. `suspects` have been
    found to differ, and not been found equal since.
    """

    snapshot: HoldSnapshot
    troubles: Sequence[str] = ()
    equal: int = -1
    suspects: Sequence[pb.Suspect] = ()


class Doubt:
    """Whether a hold may differ from the trainers. While `active`, its state is not offered."""

    def __init__(self) -> None:
        self.active = False
        self._first = self._last = 0
        self.past: list[range] = []
        """Iterations whose saved state stays doubtful and must not be used."""
        self._renewed = self._patience = 0.0

    def begin(self, iteration: int, equal: int) -> None:
        """Record a difference after an iteration. All was last found equal after `equal`."""
        first = equal + 1
        self._first = min(first, self._first) if self.active else first
        self.active, self._last = True, iteration

    def prolong(self, iteration: int) -> None:
        """Record that the state up to an iteration was discarded; if in doubt, it stays doubtful."""
        if self.active:
            self._last = max(self._last, iteration)

    def continue_from(self, earlier: Doubt) -> None:
        """Keep in mind what was doubtful in the same state before a restart."""
        self.past = earlier.past

    def covers(self, iteration: int) -> bool:
        """Return whether saved state of an iteration may be wrong."""
        return self.active or any(iteration in doubtful for doubtful in self.past)

    def end(self) -> str:
        """End the doubt. Return what to report, or an empty text if there was no doubt."""
        if not self.active:
            return ""
        self.active = False
        self.past.append(range(self._first, self._last + 1))
        return f"checkpoints of iterations {self._first} to {self._last} are doubtful, newer ones are not"

    def may_renew(self, now: float) -> bool:
        """Return whether to reseed the hold: less and less often if that does not help."""
        if self._patience and now - self._renewed < self._patience:
            return False
        least, most = RENEW_SECONDS
        self._renewed, self._patience = now, min(max(2 * self._patience, least), most)
        return True


@dataclass(eq=False)
class Hold:
    """The state and decisions of one hold. `resources.HoldResources` has its tensors and sockets."""

    plan: HoldPlan
    parameters: Sequence[int]
    streams: Sequence[StreamState]
    first: int
    """The iteration to which byte 0 of each stream belongs."""
    joined: int
    """The iteration from which on it receives everything."""
    doubt: Doubt = field(default_factory=Doubt)
    suspects: Sequence[pb.Suspect] = ()
    """As in `Stepped`, of the last step."""
    differences: Repetition = field(default_factory=Repetition)
    failures: Repetition = field(default_factory=Repetition)  # of steps
    live: bool = False
    settled: bool = False
    trouble: str = ""
    ahead: int = AHEAD
    seeds_asked_at: float = 0.0  # when trainers were last asked for seeds
    from_holder: bool = False  # another holder gives the seeds
    lagging: float = 0.0  # when it was last no more than one iteration behind
    lag_said: bool = False
    stepping: int | None = None  # an iteration whose record is not kept yet
    loading: int = 0  # calls that load seeds at the moment
    final: int | None = None  # the iteration after which none follows
    released: int = field(init=False)
    """The last iteration whose gradients are used up."""
    in_full: int = field(init=False)
    """The last iteration that it has received completely, record included."""
    at: Mapping[int, int] = field(default_factory=dict)
    """Iteration of the last step of each seeded parameter."""
    _version: int = -1
    _record_since: float = 0.0

    def __post_init__(self) -> None:
        self.released = self.in_full = self.joined - 1

    def __str__(self) -> str:
        return f"DP group {self.plan.group}, shard {self.plan.shard}"

    @property
    def shard(self) -> tuple[int, int]:
        """The DP group, and the number of the shard in it."""
        return (self.plan.group, self.plan.shard)

    @property
    def seeded(self) -> bool:
        """Whether all its parameters are at the same iteration."""
        if not self.parameters:
            return True
        return self.parameters[0] in self.at and len({self.at.get(n) for n in self.parameters}) == 1

    @property
    def stepped(self) -> int:
        """Iteration of the last applied step, or -1 if parameters are at different iterations."""
        if not self.parameters:
            return self.released
        return self.at[self.parameters[0]] if self.seeded else -1

    @property
    def receiving(self) -> int:
        """The newest iteration of which data has arrived, or -1."""
        return max(
            (
                self.first + (stream.position - 1) // stream.layout.nbytes
                for stream in self.streams
                if stream.layout.nbytes and stream.received_bytes
            ),
            default=-1,
        )

    @property
    def doubtful(self) -> bool:
        """Whether a comparison has found a difference that has not been resolved."""
        return self.doubt.active

    @property
    def busy(self) -> bool:
        """Whether its tensors are being written."""
        return self.stepping is not None or self.loading > 0

    @property
    def has_whole(self) -> bool:
        """Whether it is live and has a complete iteration that is not stepped yet."""
        return self.live and self.in_full > self.released

    @property
    def holds_something(self) -> bool:
        """Whether a restart loses something if it discards this hold."""
        return bool(self.at) or self.joined > 0 or self.receiving >= 0

    @property
    def wants_seeds(self) -> bool:
        """Whether to request seeds: an iteration is complete, so its streams are connected."""
        return (
            not (self.live or self.settled) and self.in_full >= self.joined and bool(self.wanted_parameters())
        )

    def wanted_parameters(self) -> list[int]:
        """Return the parameters to seed: those without state, or whose next gradients are gone."""
        at, released = self.at, self.released
        return [number for number in self.parameters if at.get(number, released - 1) < released]

    def update_at(self, snapshot: HoldSnapshot) -> None:
        """Update iterations after parameters were loaded, stepped or discarded."""
        if snapshot.version > self._version:
            self._version, self.at = snapshot

    def begin_step(self, iteration: int) -> None:
        """Note that a step to this iteration writes the tensors."""
        self.stepping = iteration

    def end_step(self, iteration: int, *, final: bool, result: Stepped) -> None:
        """Update the state after a step, unless the hold has rejoined in the meantime."""
        self.stepping = None
        if iteration == self.released + 1:
            self.released = iteration
        self.update_at(result.snapshot)
        self.final = iteration if final else None
        self.suspects = result.suspects
        if result.troubles:
            self.doubt.begin(iteration, result.equal)
            self.trouble = "; ".join(result.troubles)

    def fail_step(self, snapshot: HoldSnapshot) -> None:
        """Update the state after a step that has failed."""
        self.stepping = None
        self.update_at(snapshot)

    def end_doubt(self) -> str:
        """Trust the state again, which was found equal. Return what to report, or "" without a doubt."""
        if words := self.doubt.end():
            self.trouble = ""
        return words

    def begin_load(self) -> None:
        """Note that a call writes seeds into the tensors."""
        self.loading += 1

    def end_load(self) -> None:
        """Note that such a call has ended."""
        self.loading -= 1

    def note_seeds_asked(self, now: float) -> None:
        """Note that trainers were asked for seeds."""
        self.seeds_asked_at = now

    def note_holder(self, *, gives: bool) -> None:
        """Note whether another holder gives the seeds."""
        self.from_holder = gives

    def note_trouble(self, trouble: str) -> None:
        """Keep why the hold is not as it should be, for the status."""
        self.trouble = trouble

    def reach_farther(self) -> None:
        """Join twice as far ahead from now on if the last attempt was too late to get live."""
        if not self.live:
            self.ahead *= 2

    def lose_state(self) -> None:
        """Forget the parameters, which are discarded."""
        self.live, self.at = False, {}

    def go_live(self, now: float) -> None:
        """Start to count for commits."""
        self.live, self.ahead, self.trouble = True, AHEAD, self.trouble if self.doubtful else ""
        self.lagging = now

    def join(self, iteration: int) -> None:
        """Receive from this iteration on; discard what was received before."""
        if self.seeded:
            self.doubt.prolong(self.stepped)
        self.live = self.from_holder = self.lag_said = False
        self.seeds_asked_at = self._record_since = 0.0
        self.joined = iteration
        self.released = self.in_full = iteration - 1
        for stream in self.streams:
            stream.forget_repair()

    def settle(self) -> None:
        """Stop receiving, and keep the state for readers. Discard iterations that are not stepped."""
        self.settled, self.in_full = True, self.released
        for stream in self.streams:
            stream.discard()

    def joinable(self, newest: int) -> int:
        """Return the iteration at which to join if trainers may be at iteration `newest`."""
        return newest + min(self.ahead, ahead_at_most([stream.layout for stream in self.streams]))

    def update(self, records: Records) -> None:
        """Update the last iteration that is complete."""
        if not records.complete(self.in_full + 1):
            return
        through = [whole_through(s.layout, self.first, s.checked) for s in self.streams]
        whole = [iteration for iteration in through if iteration is not None]
        while records.complete(self.in_full + 1) and all(last > self.in_full for last in whole):
            self.in_full += 1

    def may_go_live(self, committed: int) -> bool:
        """Return whether it can be live: all streams connected, all parameters at the last commit."""
        return (
            not (self.live or self.settled or self.busy)
            and self.seeded
            and self.stepped == self.released
            and self.released >= committed
            and all(stream.connected for stream in self.streams)
        )

    def next_step(self, committed: int, *, alone: bool) -> int | None:
        """Return the iteration to step now, if any. If `alone`, no node is live and nothing is committed.

        While parameters are still missing, a step waits until its set of buckets is needed. Seeds then have
        the time of two iterations to arrive.
        """
        iteration = self.released + 1
        if self.settled or iteration > self.in_full:
            return None
        if self.live:
            return iteration if iteration <= committed else None
        if iteration > committed and not alone:
            return None
        hurry = iteration < self.in_full or iteration < committed or not self.wanted_parameters()
        return iteration if hurry else None

    @property
    def is_full(self) -> bool:
        """Whether both sets of buckets are full."""
        return self.in_full >= self.released + SETS

    def awaits(self, records: Records, sender: int | None = None) -> bool:
        """Return whether data that is recorded as sent has not arrived, or not been checked.

        `sender`: the position of the rank that sends it; by default any.
        """
        return any(
            stream.checked < records.ends.get(stream.plan.name, 0)
            for stream in self.streams
            if sender in (None, stream.plan.sender)
        )

    def gap(self, records: Records, now: float, grace: float) -> str | None:
        """Return a description of data that is lost for good, if any."""
        for stream in self.streams:
            plan = stream.plan
            if stream.lost:
                return f"{plan}: {stream.lost}"
            has_begun = max(records.newest, self.receiving) >= self.joined > self.first
            if has_begun and not (stream.received_bytes or stream.connected):
                return f"{plan}: not connected before iteration {self.joined}"
            end = records.ends.get(plan.name, 0)
            is_lost = end - stream.position >= FARTHEST  # reconnecting would not bring it
            stands = stream.stands_below(end, now)
            if is_lost or stands > grace:
                why = f"{plan}: {counted(end - stream.position, 'byte has', 'bytes have')} not come"
                if is_lost or stream.repair is None or plan.sender not in records.repairs_from:
                    return why
                if self.first + stream.checked // stream.layout.nbytes < records.repairs_from[plan.sender]:
                    return f"{why}, and the rank does not have them any more"
                if not stream.connected and stands > RECORD_GRACES * grace:
                    return why
            if stream.repair is not None and (fault := stream.repair.fault(now, RECORD_GRACES * grace)):
                return f"{plan}: {fault}"
        following = self.in_full + 1
        since = records.missing.since(following)
        if since is not None and now - since > grace:
            return f"a rank passed over its record of iteration {following}"
        if records.newest <= following or records.complete(following):
            self._record_since = now
        elif now - (self._record_since or now) > RECORD_GRACES * grace:
            return f"the record of iteration {following} has not come"
        return None

    def missing_ranges(self, records: Records, sender: int, now: float) -> Iterator[pb.MissingRange]:
        """Yield what to ask of the rank that sends these streams."""
        for stream in self.streams if not self.settled else ():
            plan = stream.plan
            if stream.repair is None or plan.sender != sender or not stream.connected:
                continue
            end = records.ends.get(plan.name, 0)
            stands = stream.stands_below(end, now)
            request = stream.repair.request(stream.position, end, stands, now, stream.layout.nbytes)
            if request is not None:
                yield pb.MissingRange(channel=plan.channel, shard=plan.shard, **request._asdict())

    def awaits_digest(self, sender: int, repaired: pb.RepairedRange) -> bool:
        """Return whether a digest is that of bytes that were asked for and have come."""
        stream = self._repaired_stream(sender, repaired)
        if self.settled or stream is None or stream.repair is None:
            return False
        return stream.repair.awaits(repaired.start, repaired.stop, stream.position)

    def note_repaired(self, sender: int, repaired: pb.RepairedRange, *, is_equal: bool) -> None:
        """Note whether bytes that were sent again have this digest, unless the hold has rejoined since."""
        stream = self._repaired_stream(sender, repaired)
        if not self.settled and stream is not None and stream.repair is not None:
            stream.repair.note(repaired.start, repaired.stop, stream.position, is_equal=is_equal)

    def _repaired_stream(self, sender: int, repaired: pb.RepairedRange) -> StreamState | None:
        name = (sender, repaired.channel, repaired.shard)
        return next((stream for stream in self.streams if stream.plan.name == name), None)

    def lag_seconds(self, newest: int, now: float) -> float:
        """Return how long it has been more than one iteration behind; 0 if it is not, or joins."""
        return (
            max(now - self.lagging, 0.0) if self.live and self.lagging and newest - self.stepped > 1 else 0.0
        )

    def lag(self, newest: int, now: float) -> tuple[int, str] | None:
        """Return level and message to log when the hold falls behind the trainers, or has caught up.

        `newest` is the newest iteration that trainers are known to have trained.
        """
        behind = newest - self.stepped
        if behind <= 1:
            self.lagging = now
            if self.lag_said:
                self.lag_said, self.trouble = False, ""
                return logging.INFO, f"{self}: caught up, at most one iteration behind"
        elif now - self.lagging > LAG_SECONDS and not self.doubtful:
            self.trouble = f"{behind} iterations behind the trainers: a restart must first step all of them"
            if not self.lag_said:
                self.lag_said = True
                return logging.WARNING, f"{self}: {self.trouble}"
        return None
