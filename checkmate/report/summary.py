"""All that is known about a job's incidents, and what is not. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    COMPARISON_MISMATCH,
    EVENTS_LOST,
    ITERATION_COMMITTED,
    NODE_FENCED,
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
from checkmate.report.deaths import deaths, stopped
from checkmate.report.processes import is_rank, node_of, processes
from checkmate.report.records import JobReport, NodeClock, Trouble
from checkmate.report.recoveries import recoveries
from checkmate.report.shards import absences

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
        events: Its events, merged; also earlier ones, which tell how things stood then.
        since: The time from which on things are reported.
        until: The time of the report.
        live: The processes that have answered.
        silent: The nodes that have not, and why.
        clocks: What is known about clocks.
        notes: What else is not known.
    """
    away = dict(silent or {})
    found = processes(events, live)
    died = deaths(found, events, [node.id for node in job.shadow_nodes], away)
    start, recent = timestamp(since), [event for event in events if event.time >= since]
    return JobReport(
        job=job.job,
        since=start,
        until=timestamp(until),
        deaths=[one for one in died if (one.noticed or one.last) >= start or not one.back],
        stopped=stopped(one for one in found if one.last >= since),
        recoveries=[one for one in recoveries(found, events, died) if one.time >= start],
        absences=[one for one in absences(events, died) if not one.until or one.until >= start],
        troubles=[
            Trouble(timestamp(one.time), one.source, one.name, one.message or json.dumps(dict(one.fields)))
            for one in recent
            if one.name in {kind.name for kind in _TROUBLES}
        ],
        committed=_committed(events),
        unknown=[*_unknown(job, events, away), *notes],
        clocks=list(clocks),
        events=[json.loads(one.to_line()) for one in recent],
    )


def _committed(events: Sequence[Event]) -> int | None:
    """Return the last committed iteration of the newest start of training that is known."""
    names = (ITERATION_COMMITTED.name, NODE_FENCED.name)
    found = [one for one in events if one.name in names and isinstance(one.fields.get("iteration"), int)]
    if not found:
        return None
    newest = found[-1].fields.get("incarnation")
    return max(int(one.fields["iteration"]) for one in found if one.fields.get("incarnation") == newest)


def _unknown(job: Job, events: Sequence[Event], silent: Mapping[int, str]) -> list[str]:
    said = []
    known = {node_of(one.source) for one in events}
    for node, why in sorted(silent.items()):
        last = [one for one in events if node_of(one.source) == node]
        until = f" after {timestamp(last[-1].time)}" if last else ""
        hint = "" if node in known else f"; {_READ}"
        said.append(f"{node_name(job, node)}: {why}: what it did{until} is not known{hint}")
    sources = {one.source for one in events}
    ranks = sorted(rank.rank for group in job.dp_groups for rank in group.ranks)
    without = [rank for rank in ranks if f"rank {rank}" not in sources]
    if without and len(without) == len(ranks):
        said.append(
            "no events of ranks: when one died, which iterations they had completed, and how long the steps "
            "of recovery took, is not known; ranks keep events if CHECKMATE_EVENTS names a folder"
        )
    elif without:
        names = ", ".join(map(str, without))
        said.append(f"no events of {'rank' if len(without) == 1 else 'ranks'} {names}; {_READ}")
    if not any(one.source == "controller" for one in events):
        said.append("no events of a controller: add the folder of its event log with --events")
    if not any(is_rank(one) for one in sources) and not events:
        said.append("no events at all since that time")
    return said
