"""When a shard had no live holder, so that a crash could not have resumed from shadow nodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    COMPARISON_MISMATCH,
    HOLD_CHANGED,
    NODE_DRAINED,
    NODE_ENDED,
    NODE_RESET,
    STREAM_GAP,
)
from checkmate.report.processes import node_of
from checkmate.report.records import Absence, Death

Shard = tuple[int, int]


def absences(events: Iterable[Event], died: Iterable[Death]) -> list[Absence]:
    """Return the times from when a shard's last live holder was lost until another one was live."""
    changes = [change for event in events for change in _changes(event)]
    changes += [
        (one.noticed or one.last, one.who, None, False) for one in died if node_of(one.who) is not None
    ]
    live: defaultdict[Shard, set[str]] = defaultdict(set)
    since: dict[Shard, str] = {}
    made = []
    for time, node, shard, lives in sorted(changes, key=lambda change: change[0]):
        for one in [shard] if shard is not None else list(live):
            if lives:
                live[one].add(node)
                if one in since:
                    made.append(Absence(*one, since.pop(one), time))
            elif node in live[one]:
                live[one].discard(node)
                if not live[one]:
                    since[one] = time
    made += [Absence(*one, time, "") for one, time in since.items()]
    return sorted(made, key=lambda absence: absence.since)


def _changes(event: Event) -> Sequence[tuple[str, str, Shard | None, bool]]:
    """Return what a node's event changes: time, node, shard (`None`: all of its), whether it lives."""
    if node_of(event.source) is None:
        return []
    time, node = timestamp(event.time), event.source
    if event.name in (NODE_ENDED.name, NODE_RESET.name, NODE_DRAINED.name):
        return [(time, node, None, False)]
    group, number = event.fields.get("group"), event.fields.get("shard")
    if not (isinstance(group, int) and isinstance(number, int)):
        return []
    if event.name == HOLD_CHANGED.name:
        return [(time, node, (group, number), event.fields.get("state") == "live")]
    if event.name in (STREAM_GAP.name, COMPARISON_MISMATCH.name):
        return [(time, node, (group, number), False)]
    return []
