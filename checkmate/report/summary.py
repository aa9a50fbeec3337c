"""The report of a job: its deaths, recoveries, troubles and absences, and what is not known. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    COMPARISON_MISMATCH,
    EVENTS_LOST,
    HOLD_CHANGED,
    ITERATION_COMMITTED,
    NODE_DRAINED,
    NODE_ENDED,
    NODE_FENCED,
    NODE_RESET,
    NODE_STALLED,
    NODE_TROUBLE,
    RESTORE_FAILED,
    STREAM_GAP,
    SWITCH_LOST,
    TRAINER_SUPERSEDED,
    TRAINING_OVERLAPS,
    TRAINING_REFUSED,
)
from checkmate.job.schema import Job
from checkmate.nodes.standing import node_name
from checkmate.report.deaths import deaths, stopped_processes
from checkmate.report.processes import is_rank, node_of, processes
from checkmate.report.records import Absence, Death, JobReport, NodeClock, Trouble
from checkmate.report.recoveries import recoveries

Shard = tuple[int, int]
"""A DP group, and the number of a shard in it."""

_TROUBLES = (
    *(STREAM_GAP, COMPARISON_MISMATCH, NODE_TROUBLE, NODE_STALLED, SWITCH_LOST, EVENTS_LOST),
    *(RESTORE_FAILED, TRAINING_REFUSED, TRAINING_OVERLAPS, TRAINER_SUPERSEDED),
)
_READ = "read its event log, copied from its host: `checkmate report JOB --events FOLDER`"


def summary(
    job: Job,
    events: Sequence[Event],
    *,
    since: float,
    until: float,
    live: Sequence[tuple[str, str, int]] = (),
    silent: Mapping[int, str] | None = None,
    clocks: Sequence[NodeClock] = (),
    notes: Sequence[str] = (),
) -> JobReport:
    """Return the report of a job.

    Args:
        job: The job.
        events: Its events, merged and by time; also earlier ones, which tell how things stood then.
        since: The time from which on things are reported.
        until: The time of the report.
        live: The processes that have answered.
        silent: The nodes that have not, and why.
        clocks: What is known about clocks.
        notes: What else is not known.
    """
    away = dict(silent or {})
    by_process = processes(events, live)
    dead = deaths(by_process, events, [node.id for node in job.shadow_nodes], away)
    start, recent = timestamp(since), [event for event in events if event.time >= since]
    return JobReport(
        job=job.job,
        since=start,
        until=timestamp(until),
        deaths=[death for death in dead if (death.noticed or death.last) >= start or not death.back],
        stopped=stopped_processes(process for process in by_process if process.last >= since),
        recoveries=[recovery for recovery in recoveries(by_process, events, dead) if recovery.time >= start],
        absences=[lack for lack in absences(events, dead) if not lack.until or lack.until >= start],
        troubles=[
            Trouble(
                timestamp(event.time),
                event.source,
                event.name,
                event.message or json.dumps(dict(event.fields)),
            )
            for event in recent
            if event.name in {kind.name for kind in _TROUBLES}
        ],
        committed=_committed(events),
        unknown=[*_unknown(job, events, away), *notes],
        clocks=list(clocks),
        events=[json.loads(event.to_line()) for event in recent],
    )


def _committed(events: Sequence[Event]) -> int | None:
    """Return the last committed iteration of the newest start of training that is known."""
    names = (ITERATION_COMMITTED.name, NODE_FENCED.name)
    reports = [
        event for event in events if event.name in names and isinstance(event.fields.get("iteration"), int)
    ]
    if not reports:
        return None
    newest = reports[-1].fields.get("incarnation")
    return max(
        int(event.fields["iteration"]) for event in reports if event.fields.get("incarnation") == newest
    )


def _unknown(job: Job, events: Sequence[Event], silent: Mapping[int, str]) -> list[str]:
    gaps = []
    nodes_with_events = {node_of(event.source) for event in events}
    for node, why in sorted(silent.items()):
        last = [event for event in events if node_of(event.source) == node]
        until = f" after {timestamp(last[-1].time)}" if last else ""
        hint = "" if node in nodes_with_events else f"; {_READ}"
        gaps.append(f"{node_name(job, node)}: {why}: what it did{until} is not known{hint}")
    sources = {event.source for event in events}
    ranks = sorted(rank.rank for group in job.dp_groups for rank in group.ranks)
    silent_ranks = [rank for rank in ranks if f"rank {rank}" not in sources]
    if silent_ranks and len(silent_ranks) == len(ranks):
        gaps.append(
            "no events of ranks: when one died, which iterations they had completed, and how long the steps "
            "of recovery took, is not known; ranks keep events if CHECKMATE_EVENTS names a folder"
        )
    elif silent_ranks:
        names = ", ".join(map(str, silent_ranks))
        gaps.append(f"no events of {'rank' if len(silent_ranks) == 1 else 'ranks'} {names}; {_READ}")
    if job.copies == "switch" and not any(event.source == "controller" for event in events):
        gaps.append("no events of a controller: add the folder of its event log with --events")
    if not any(is_rank(source) for source in sources) and not events:
        gaps.append("no events at all since that time")
    return gaps


def absences(events: Iterable[Event], dead: Iterable[Death]) -> list[Absence]:
    """Return the times from when a shard's last live holder was lost until another one was live."""
    changes = [change for event in events for change in _changes(event)]
    changes += [
        (key.noticed or key.last, key.who, None, False) for key in dead if node_of(key.who) is not None
    ]
    live: defaultdict[Shard, set[str]] = defaultdict(set)
    since: dict[Shard, str] = {}
    result = []
    for time, node, shard, is_live in sorted(changes, key=lambda change: change[0]):
        for key in [shard] if shard is not None else list(live):
            if is_live:
                live[key].add(node)
                if key in since:
                    result.append(Absence(*key, since.pop(key), time))
            elif node in live[key]:
                live[key].discard(node)
                if not live[key]:
                    since[key] = time
    result += [Absence(*key, time, "") for key, time in since.items()]
    return sorted(result, key=lambda absence: absence.since)


def _changes(event: Event) -> Sequence[tuple[str, str, Shard | None, bool]]:
    """Return the changes of a node's event: time, node, shard (`None`: all of its), whether it lives."""
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
