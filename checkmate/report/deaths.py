"""Who died when: by the events that the dead have kept, and by what others have noticed. Pure.

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
    TRAINER_RING_BROKEN,
)
from checkmate.report.processes import Process, is_rank, node_of, node_source
from checkmate.report.records import Death

CLOCKS = 2.0
"""Seconds by which the clocks of hosts may differ: what is noticed this much before is the same death."""
NOTICED = 120.0
"""Seconds after a rank's last event within which a broken ring is taken for its death."""


_LOST = (PEER_LOST.name, TRAINER_NODE_LOST.name)
_BACK = (PEER_BACK.name, TRAINER_NODE_BACK.name)


@dataclass(frozen=True)
class _Notice:
    """What a process has noticed about another one."""

    time: float
    by: str
    said: str


def deaths(
    found: Sequence[Process], events: Sequence[Event], nodes: Iterable[int], unreachable: Iterable[int] = ()
) -> list[Death]:
    """Return the deaths, by time. `nodes`: those of the job; `unreachable`: who did not answer just now."""
    made = [*_of_nodes(found, events, nodes, set(unreachable)), *_of_others(found, events)]
    return sorted(made, key=lambda one: one.noticed or one.last)


def stopped(found: Iterable[Process]) -> list[str]:
    """Return which shadow nodes and controllers were stopped in order, and when."""
    return [
        f"{one.source}, process {one.pid} on {one.host}, at {timestamp(one.last)}"
        for one in found
        if one.ended and not one.lives and not is_rank(one.source)
    ]


def _death(one: Process | None, who: str, notice: _Notice | None, back: float | None) -> Death:
    return Death(
        who,
        one.host if one else "",
        one.pid if one else 0,
        timestamp(one.last) if one else "",
        timestamp(notice.time) if notice else "",
        f"{notice.by}: {notice.said}" if notice else "",
        timestamp(back) if back is not None else "",
    )


def _first_after(time: float, times: Sequence[float]) -> float | None:
    """Return the first of some times, which are in order, that is later. A node may name any number."""
    at = bisect_right(times, time)
    return times[at] if at < len(times) else None


def _of_nodes(
    found: Sequence[Process], events: Sequence[Event], nodes: Iterable[int], unreachable: set[int]
) -> Iterable[Death]:
    """Yield deaths of shadow nodes, also of those that have kept no events."""
    for node in sorted(nodes):  # whatever others name: each costs a pass over all events
        who = node_source(node)
        notices, backs = _notices(events, node)
        own = [one for one in found if one.source == who]
        begun = [one.began for one in own]
        for one in own:
            after = _first_after(one.last, begun)
            until = min(after or math.inf, _first_after(one.last + CLOCKS, backs) or math.inf)
            seen = [n for n in notices if one.last - CLOCKS <= n.time < until + CLOCKS]
            notices = [n for n in notices if not (one.began - CLOCKS <= n.time < until + CLOCKS)]
            if not one.ended and (seen or after is not None or node in unreachable):
                yield _death(one, who, seen[0] if seen else None, after)
        while notices:
            first = notices[0]
            back = min((time for time in backs if time > first.time), default=None)
            yield _death(None, who, first, back)
            notices = [n for n in notices if back is not None and n.time > back]


def _notices(events: Iterable[Event], node: int) -> tuple[list[_Notice], list[float]]:
    """Return when others have noticed that a node is lost, and when that it is back."""
    lost, back = [], []
    for event in events:
        if event.name == NODE_STARTED.name and event.source == node_source(node):
            back.append(event.time)
        if event.fields.get("node") != node:
            continue
        if event.name in _LOST:
            lost.append(_Notice(event.time, event.source, str(event.fields.get("why", ""))))
        elif event.name in _BACK:
            back.append(event.time)
    return lost, sorted(back)


def _of_others(found: Sequence[Process], events: Sequence[Event]) -> Iterable[Death]:
    """Yield deaths of ranks and controllers. A rank that says that the ring broke has not died first."""
    for one in found:
        if one.ended or one.broken or node_of(one.source) is not None:
            continue
        if is_rank(one.source):
            after = _first_after(one.last, [other.began for other in found if other.source == one.source])
            notice = _ring(one, events, after)
        else:
            after, notice = _followed(one, events)
        if after is not None or notice is not None:
            yield _death(one, one.source, notice, after)


def _followed(one: Process, events: Iterable[Event]) -> tuple[float | None, _Notice | None]:
    """Return when another controller became primary after a primary's last event, and what it had noticed.

    A primary that lives says that it was displaced. One that stood by may still do so.
    """
    if not any(event.name == CONTROLLER_PRIMARY.name for event in one.events):
        return None, None
    later = [event for event in events if event.time > one.last]
    primary = min((event.time for event in later if event.name == CONTROLLER_PRIMARY.name), default=None)
    claims = [event for event in later if event.name == CONTROLLER_CLAIMS.name]
    if primary is None or not claims:
        return primary, None
    said = f"switch {claims[0].fields.get('switch')} has no primary controller"
    return primary, _Notice(claims[0].time, f"a controller on {claims[0].host}", said)


def _ring(one: Process, events: Iterable[Event], until: float | None) -> _Notice | None:
    """Return who noticed that the ring broke, after a rank's last event and before it began again.

    A rank whose connection to this one ended knows more than one that only saw others give up.
    """
    latest = until if until is not None else one.last + NOTICED
    found = [
        _Notice(event.time, event.source, str(event.fields.get("why", "")))
        for event in events
        if event.name == TRAINER_RING_BROKEN.name and event.source != one.source
        if one.last - CLOCKS <= event.time <= latest
    ]
    return next((notice for notice in found if f"{one.source} (" in notice.said), next(iter(found), None))
