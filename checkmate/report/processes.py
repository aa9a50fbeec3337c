"""Events by process: the start and the end of each process. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkmate.events.event import Event
from checkmate.events.kinds import (
    CONTROLLER_ENDED,
    CONTROLLER_STARTED,
    NODE_ENDED,
    NODE_STARTED,
    PROTECT_STARTED,
    RESTORE_FAILED,
    TRAINER_ENDED,
    TRAINER_RING_BROKEN,
)

_BEGINS = (NODE_STARTED.name, CONTROLLER_STARTED.name)
_ENDS = (NODE_ENDED.name, CONTROLLER_ENDED.name, TRAINER_ENDED.name, RESTORE_FAILED.name)
"""An error of `restore` ends the script, or the script knows of it."""
_RANK = "rank "
_NODE = "shadow node "


def merge_events(events: Iterable[Event], job: str) -> list[Event]:
    """Return the events of a job, and of processes that serve several, by time, each once."""
    by_identity = {event.identity: event for event in events if event.job in ("", job)}
    return sorted(by_identity.values(), key=lambda event: (event.time, event.source, event.number))


@dataclass(frozen=True)
class Process:
    """A process, and its events by time, of which there is at least one."""

    source: str
    host: str
    pid: int
    events: Sequence[Event]
    is_live: bool = False
    """True if it has answered."""

    @property
    def began(self) -> float:
        """The time of its first event."""
        return self.events[0].time

    @property
    def last(self) -> float:
        """The time of its last event."""
        return self.events[-1].time

    @property
    def has_ended(self) -> bool:
        """True if it has said that it ends, or lives."""
        return self.is_live or any(event.name in _ENDS for event in self.events[-3:])

    @property
    def ring_break(self) -> Event | None:
        """The event of a rank whose ring broke, unless it has gone on in place since."""
        for event in reversed(self.events):
            if event.name == TRAINER_RING_BROKEN.name:
                return event
            if event.name == PROTECT_STARTED.name:
                break
        return None


def processes(events: Iterable[Event], live: Iterable[tuple[str, str, int]] = ()) -> list[Process]:
    """Return the processes of events that are in order. `live`: those that have answered."""
    by_process: defaultdict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        by_process[event.process].append(event)
    alive = set(live)
    starts = []
    for key, process_events in by_process.items():
        *earlier, last = _starts(process_events)
        starts += [Process(*key, events=start) for start in earlier]
        starts.append(Process(*key, events=last, is_live=key in alive))
    return sorted(starts, key=lambda process: process.began)


def _starts(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each start of a process: in containers, all of them may have the same pid.

    Events are in order of time. A clock that was set back shuffles the numbers of a single start, so that a
    number which falls is not enough: it has been there already, or is the first one.
    """
    starts: list[list[Event]] = []
    marks: set[int | str] = set()
    for event in events:
        begins = event.name in _BEGINS and event.name in marks
        first = bool(starts) and event.number == 1 < starts[-1][-1].number
        if not starts or begins or first or event.number in marks:
            starts.append([])
            marks.clear()
        starts[-1].append(event)
        marks |= {event.number, event.name} if event.name in _BEGINS else {event.number}
    return starts


def is_rank(source: str) -> bool:
    """Return whether a source is a rank."""
    return source.startswith(_RANK)


def node_of(source: str) -> int | None:
    """Return the id of a shadow node by its name as a source, or `None` for another source."""
    number = source.removeprefix(_NODE)
    return int(number) if source.startswith(_NODE) and number.isdecimal() else None


def node_source(node: int) -> str:
    """Return a shadow node's name as a source."""
    return f"{_NODE}{node}"
