"""Starts of training: their steps, what they resumed from, and what was repeated. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    NODE_FENCED,
    PROTECT_ENDED,
    PROTECT_STARTED,
    RESTORE_AGREED,
    RESTORE_DRAINED,
    RESTORE_ENDED,
    RESTORE_FAILED,
    RESTORE_FETCHED,
    RESTORE_INSTALLED,
    RESTORE_STARTED,
    TRAINER_ENDED,
    TRAINER_FIRST,
    TRAINER_RANK_LOST,
    TRAINER_RING_BROKEN,
    TRAINING_REFUSED,
)
from checkmate.report.processes import Process, is_rank
from checkmate.report.records import Death, Recovery, RecoveryStep

MAX_START_SPREAD = 120.0
"""Seconds within which ranks begin one start of training."""

_STEPS = (
    (RESTORE_DRAINED.name, "shadow nodes have stepped what they had"),
    (RESTORE_AGREED.name, "all ranks know what to resume from"),
    (RESTORE_FETCHED.name, "state is read"),
    (RESTORE_INSTALLED.name, "state is in place"),
    (RESTORE_ENDED.name, "restore, as a whole"),
    (PROTECT_ENDED.name, "protect: connections, streams, seeds"),
    (TRAINER_FIRST.name, "first iteration after protect"),
)


@dataclass
class _Start:
    """The events of one start of training on one rank, or on all."""

    began: float
    events: list[Event] = field(default_factory=list)

    @property
    def incarnation(self) -> int | None:
        """Its number, if ranks have agreed on one."""
        numbers = [
            event.fields.get("incarnation") for event in self.find(RESTORE_AGREED.name, PROTECT_ENDED.name)
        ]
        return next((number for number in numbers if isinstance(number, int)), None)

    def find(self, *names: str) -> list[Event]:
        """Return its events of these names."""
        return [event for event in self.events if event.name in names]

    def number(self, name: str, key: str) -> int | None:
        """Return a field of the first event of a name, if it is a whole number."""
        return next(
            (number for event in self.find(name) if isinstance(number := event.fields.get(key), int)), None
        )


def recoveries(
    processes: Iterable[Process], events: Sequence[Event], dead: Sequence[Death]
) -> list[Recovery]:
    """Return the starts of training, by time."""
    starts: list[_Start] = []
    for rank_start in sorted(
        (s for p in processes if is_rank(p.source) for s in _starts(p)), key=lambda start: start.began
    ):
        for start_of_all in starts:
            if _same(start_of_all, rank_start):
                start_of_all.events += rank_start.events
                break
        else:
            starts.append(rank_start)
    result = []
    previous = 0.0
    for start in starts:
        result.append(_recovery(start, previous, events, dead))
        previous = start.began
    return result


def _starts(process: Process) -> Iterable[_Start]:
    """Yield what a rank has done to start training, each time that it did."""
    start: _Start | None = None
    protected = False
    for event in process.events:
        again = event.name == PROTECT_STARTED.name and (start is None or protected)
        if event.name == RESTORE_STARTED.name or again:
            if start is not None:
                yield start
            start, protected = _Start(event.time), False
        protected |= event.name == PROTECT_STARTED.name
        if start is not None:
            start.events.append(event)
    if start is not None:
        yield start


def _same(start: _Start, rank_start: _Start) -> bool:
    ranks = {event.source for event in start.events}
    if abs(rank_start.began - start.began) > MAX_START_SPREAD or rank_start.events[0].source in ranks:
        return False
    both = start.incarnation, rank_start.incarnation
    return both[0] == both[1] or None in both


def _recovery(start: _Start, before: float, events: Sequence[Event], deaths: Sequence[Death]) -> Recovery:
    now = timestamp(start.began)
    earlier = [event for event in events if before <= event.time < start.began]
    failed = start.find(RESTORE_FAILED.name)
    agreed = start.find(RESTORE_AGREED.name)
    upto = start.number(RESTORE_ENDED.name, "iteration")
    if upto is None:
        upto = start.number(PROTECT_ENDED.name, "iteration")
    trained = _trained(earlier)
    first = start.find(TRAINER_FIRST.name)
    sources = [str(event.fields.get("from", "")) for event in start.find(RESTORE_ENDED.name)]
    whys = [str(event.fields.get("why", "")) for event in (*failed, *agreed)]
    after = _cause(earlier, deaths, timestamp(before), now)
    return Recovery(
        time=now,
        incarnation=start.incarnation,
        after=after[1] if after else "",
        source="failed" if failed else next(iter(sources), ""),
        why=next(filter(None, whys), ""),
        committed=_committed(events, start),
        next=upto,
        trained=trained,
        repeated=None if upto is None or trained is None else max(0, trained - upto + 1),
        first=timestamp(min(event.time for event in first)) if first else "",
        steps=list(_steps(start, after)),
    )


def _steps(start: _Start, after: tuple[float, str] | None) -> Iterable[RecoveryStep]:
    if after is not None:
        first = min(start.events, key=lambda event: event.time)
        yield RecoveryStep(
            "until the first rank begins again", round(max(0.0, start.began - after[0]), 3), first.source
        )
    for name, words in _STEPS:
        timed = [
            (float(seconds), event.source)
            for event in start.find(name)
            if isinstance(seconds := event.fields.get("seconds"), int | float)
        ]
        if timed:
            seconds, source = max(timed)
            yield RecoveryStep(words, seconds, source)
    if after is not None and (firsts := start.find(TRAINER_FIRST.name)):
        last = max(firsts, key=lambda event: event.time)
        yield RecoveryStep(
            "all of it, until the first iteration", round(last.time - after[0], 3), last.source
        )


def _cause(
    earlier: Sequence[Event], deaths: Sequence[Death], before: str, now: str
) -> tuple[float, str] | None:
    """Return the time of what a start of training follows, and what that was."""
    refusal = next((event for event in earlier if event.name == TRAINING_REFUSED.name), None)
    if refusal is not None:
        iteration, rank, why = (refusal.fields.get(key, "") for key in ("iteration", "rank", "why"))
        return refusal.time, f"the script was refused in iteration {iteration} on {rank}: {why}"
    breaks = [event for event in earlier if event.name in (TRAINER_RING_BROKEN.name, TRAINER_RANK_LOST.name)]
    dead = [death for death in deaths if is_rank(death.who) and before <= (death.noticed or death.last) < now]
    if breaks:
        cause = f"{dead[0].who} died" if dead else "the ring broke"
        return breaks[0].time, f"{cause}, which {breaks[0].source} noticed at {timestamp(breaks[0].time)}"
    return None


def _trained(earlier: Iterable[Event]) -> int | None:
    """Return the last iteration that ranks have completed, as they have said."""
    iterations = []
    for event in earlier:
        iteration = event.fields.get("iteration")
        if not isinstance(iteration, int):
            continue
        if event.name == TRAINER_ENDED.name and iteration >= 0:
            iterations.append(iteration)
        elif event.name == TRAINER_RING_BROKEN.name:
            iterations.append(iteration - 1)
    return max(iterations, default=None)


def _committed(events: Iterable[Event], start: _Start) -> int | None:
    """Return what the nodes had stepped when this start fenced them."""
    until = max(event.time for event in start.events)
    iterations = [
        iteration
        for event in events
        if event.name == NODE_FENCED.name and start.began - 2.0 <= event.time <= until + 2.0
        if isinstance(iteration := event.fields.get("iteration"), int) and iteration >= 0
    ]
    return max(iterations, default=None)
