"""Deaths of processes: by the events that the dead have kept, and by what others have noticed. Pure.

A process that is killed says nothing. It is dead if it neither says that it ends nor answers, and if there is
something that only a death explains: the same process has begun again, or another one has noticed its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    CONTROLLER_CLAIMS,
    CONTROLLER_PRIMARY,
    NODE_STARTED,
    PEER_BACK,
    PEER_LOST,
    TRAINER_NODE_BACK,
    TRAINER_NODE_LOST,
    TRAINER_RANK_LOST,
    TRAINER_RING_BROKEN,
)
from checkmate.report.processes import Process, is_rank, node_of, node_source
from checkmate.report.records import Death

MAX_CLOCK_DIFFERENCE = 2.0
"""Seconds by which the clocks of hosts may differ: what is noticed this much before is the same death."""
MAX_NOTICE_DELAY = 120.0
"""Seconds after a rank's last event within which a broken ring is taken for its death."""


_LOSS_EVENTS = (PEER_LOST.name, TRAINER_NODE_LOST.name)
_RETURN_EVENTS = (PEER_BACK.name, TRAINER_NODE_BACK.name)


@dataclass(frozen=True)
class _Notice:
    """The observation of a process about another one."""

    time: float
    by: str
    message: str


def deaths(
    processes: Sequence[Process],
    events: Sequence[Event],
    nodes: Iterable[int],
    unreachable: Iterable[int] = (),
) -> list[Death]:
    """Return the deaths, by time. `nodes`: those of the job; `unreachable`: who did not answer just now."""
    result = [*_of_nodes(processes, events, nodes, set(unreachable)), *_of_others(processes, events)]
    return sorted(result, key=lambda death: death.noticed or death.last)


def stopped_processes(processes: Iterable[Process]) -> list[str]:
    """Return which shadow nodes and controllers were stopped in order, and when."""
    return [
        f"{process.source}, process {process.pid} on {process.host}, at {timestamp(process.last)}"
        for process in processes
        if process.has_ended and not process.is_live and not is_rank(process.source)
    ]


def _death(process: Process | None, source: str, notice: _Notice | None, back: float | None) -> Death:
    return Death(
        source,
        process.host if process else "",
        process.pid if process else 0,
        timestamp(process.last) if process else "",
        timestamp(notice.time) if notice else "",
        f"{notice.by}: {notice.message}" if notice else "",
        timestamp(back) if back is not None else "",
    )


def _first_after(time: float, times: Sequence[float]) -> float | None:
    """Return the first of some times, which are in order, that is later. A node may name any number."""
    at = bisect_right(times, time)
    return times[at] if at < len(times) else None


def _of_nodes(
    processes: Sequence[Process], events: Sequence[Event], nodes: Iterable[int], unreachable: set[int]
) -> Iterable[Death]:
    """Yield deaths of shadow nodes, also of those that have kept no events."""
    for node in sorted(nodes):  # whatever others name: each costs a pass over all events
        source = node_source(node)
        notices, backs = _notices(events, node)
        starts = [process for process in processes if process.source == source]
        start_times = [process.began for process in starts]
        for process in starts:
            after = _first_after(process.last, start_times)
            until = min(
                after or math.inf, _first_after(process.last + MAX_CLOCK_DIFFERENCE, backs) or math.inf
            )
            matching = [
                notice
                for notice in notices
                if process.last - MAX_CLOCK_DIFFERENCE <= notice.time < until + MAX_CLOCK_DIFFERENCE
            ]
            notices = [
                notice
                for notice in notices
                if not (process.began - MAX_CLOCK_DIFFERENCE <= notice.time < until + MAX_CLOCK_DIFFERENCE)
            ]
            if not process.has_ended and (matching or after is not None or node in unreachable):
                yield _death(process, source, matching[0] if matching else None, after)
        while notices:
            first = notices[0]
            back = min((time for time in backs if time > first.time), default=None)
            yield _death(None, source, first, back)
            notices = [notice for notice in notices if back is not None and notice.time > back]


def _notices(events: Iterable[Event], node: int) -> tuple[list[_Notice], list[float]]:
    """Return when others have noticed that a node is lost, and when that it is back."""
    losses, returns = [], []
    for event in events:
        if event.name == NODE_STARTED.name and event.source == node_source(node):
            returns.append(event.time)
        if event.fields.get("node") != node:
            continue
        if event.name in _LOSS_EVENTS:
            losses.append(_Notice(event.time, event.source, str(event.fields.get("why", ""))))
        elif event.name in _RETURN_EVENTS:
            returns.append(event.time)
    return losses, sorted(returns)


def _of_others(processes: Sequence[Process], events: Sequence[Event]) -> Iterable[Death]:
    """Yield deaths of ranks and controllers. A rank that says that the ring broke has not died first."""
    for process in processes:
        if process.has_ended or process.ring_break or node_of(process.source) is not None:
            continue
        if is_rank(process.source):
            after = _first_after(
                process.last, [later.began for later in processes if later.source == process.source]
            )
            notice = _ring(process, events, after)
        else:
            after, notice = _followed(process, events)
        if after is not None or notice is not None:
            yield _death(process, process.source, notice, after)


def _followed(process: Process, events: Iterable[Event]) -> tuple[float | None, _Notice | None]:
    """Return when another controller became primary after a primary's last event, and what it had noticed.

    A primary that lives says that it was displaced. One that stood by may still do so.
    """
    if not any(event.name == CONTROLLER_PRIMARY.name for event in process.events):
        return None, None
    later = [event for event in events if event.time > process.last]
    primary = min((event.time for event in later if event.name == CONTROLLER_PRIMARY.name), default=None)
    claims = [event for event in later if event.name == CONTROLLER_CLAIMS.name]
    if primary is None or not claims:
        return primary, None
    message = f"switch {claims[0].fields.get('switch')} has no primary controller"
    return primary, _Notice(claims[0].time, f"a controller on {claims[0].host}", message)


def _tells_of(rank: str, event: Event) -> bool:
    """Return whether an event may be of a rank's death: a broken ring names only the neighbour."""
    if event.name == TRAINER_RANK_LOST.name:
        return rank == f"rank {event.fields.get('rank')}"
    return event.name == TRAINER_RING_BROKEN.name


def _ring(process: Process, events: Iterable[Event], until: float | None) -> _Notice | None:
    """Return who noticed a rank's death, after its last event and before it began again.

    A rank whose connection to this one ended knows more than one that only saw others give up.
    """
    latest = until if until is not None else process.last + MAX_NOTICE_DELAY
    notices = [
        _Notice(event.time, event.source, str(event.fields.get("why", "")))
        for event in events
        if event.source != process.source and _tells_of(process.source, event)
        if process.last - MAX_CLOCK_DIFFERENCE <= event.time <= latest
    ]
    return next(
        (notice for notice in notices if f"{process.source} (" in notice.message), next(iter(notices), None)
    )
