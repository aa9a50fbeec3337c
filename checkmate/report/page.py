"""A report as text: a summary first, then the timeline. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from checkmate.base.wording import counted, shortened
from checkmate.events.kinds import ITERATION_COMMITTED
from checkmate.output.tables import FittedTable
from checkmate.report.records import Absence, Death, JobReport, Recovery

MAX_TIMELINE: Final = 200
"""Events of the timeline; `--json` has all of them."""
_MAX_LINE: Final = 1000
"""Characters of a line, whose parts are shorter."""
_CONTROLLER: Final = "controller"
"""The source of events of each controller."""
_FAILED: Final = "failed"
_SOURCES: Final = {
    "nodes": "resumed from the shadow nodes",
    "disk": "resumed from a checkpoint on disk",
    "start": "began with iteration 0",
    _FAILED: "failed",
    "": "began; how is not known",
}


def page(report: JobReport) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield Text(f"Job {report.job}, from {_short(report.since)} to {_short(report.until)} (UTC)", "bold")
    yield ""
    yield from _lines(
        "Who ended without saying so", chain(*map(_death, report.deaths)), "nobody, as far as is known"
    )
    yield from _lines("Who was stopped", report.stopped, "")
    yield Text("Starts of training", "bold")
    if not report.recoveries:
        yield "  none is known"
    for recoveries in _alike(report.recoveries):
        yield from _recovery(recoveries[0])
        if more := len(recoveries) - 1:
            last = _clock(recoveries[-1].time)
            yield Text(f"    {counted(more, 'more start')} failed in this way, the last at {last}")
    committed = "not known" if report.committed is None else f"iteration {report.committed}"
    yield ""
    yield Text.assemble(("Last committed iteration, as far as nodes have said: ", "bold"), committed)
    yield ""
    yield from _lines("Shards without a live holder", map(_absence, report.absences), "")
    troubles = [
        f"{_clock(trouble.time)}  {_words(trouble.who)}: {_words(trouble.message)}"
        for trouble in report.troubles
    ]
    yield from _lines("Troubles", _first_lines(troubles), "")
    yield from _lines("What is not known", map(_words, report.unknown), "")
    yield from _clocks(report)
    yield from _timeline(report)


def _lines(title: str, lines: Any, default: str) -> Iterator[RenderableType]:
    texts = list(lines) or ([default] if default else [])
    if texts:
        yield Text(title, "bold")
        yield from (Text(f"  {shortened(line, _MAX_LINE)}") for line in texts)
        yield ""


def _first_lines(lines: list[str], max_lines: int = 20) -> list[str]:
    if len(lines) <= max_lines:
        return lines
    return [*lines[:max_lines], f"and {len(lines) - max_lines:,} more; the timeline and --json have them"]


def _death(death: Death) -> Iterator[str]:
    identity = f", process {death.pid} on {_words(death.host)}" if death.pid else " (it has kept no events)"
    yield f"{_clock(death.noticed or death.last)}  {_words(death.who)}{identity}"
    if death.last:
        yield f"  last event: {_clock(death.last)}"
    if death.noticed:
        yield f"  noticed: {_clock(death.noticed)} by {_words(death.by)}"
    again = "another one serves since" if death.who == _CONTROLLER else "began again:"
    yield f"  {again} {_clock(death.back)}" if death.back else "  has not begun again"


def _absence(absence: Absence) -> str:
    until = f"until {_clock(absence.until)}" if absence.until else "and still"
    return f"{_clock(absence.since)}  DP group {absence.group}, shard {absence.shard}, {until}"


def _alike(recoveries: Iterable[Recovery]) -> list[list[Recovery]]:
    """Return starts of training, those that failed in one way after another together: a crash loop."""
    alike: list[list[Recovery]] = []
    for recovery in recoveries:
        if recovery.source == _FAILED and alike and _failure(alike[-1][0]) == _failure(recovery):
            alike[-1].append(recovery)
        else:
            alike.append([recovery])
    return alike


def _failure(recovery: Recovery) -> tuple[object, ...]:
    return recovery.source, recovery.why, recovery.committed


def _recovery(recovery: Recovery) -> Iterator[RenderableType]:
    number = "" if recovery.incarnation is None else f" (incarnation {recovery.incarnation})"
    yield Text(f"  {_clock(recovery.time)}  {_SOURCES.get(recovery.source, _words(recovery.source))}{number}")
    facts = [
        recovery.after and f"after {_words(recovery.after)}",
        recovery.why and _words(recovery.why),
        recovery.committed is not None and f"last committed iteration: {recovery.committed}",
        recovery.next is not None and f"first iteration trained after: {recovery.next}",
        _repeated(recovery),
    ]
    yield from (Text(f"    {fact}") for fact in facts if fact)
    if recovery.steps:
        table = FittedTable("", "step", "seconds", "slowest", numbers=("seconds",))
        for step in recovery.steps:
            table.add_row(step.name, f"{step.seconds:,.3f}", _words(step.who))
        yield table


def _repeated(recovery: Recovery) -> str:
    if recovery.repeated is None:
        return (
            ""
            if recovery.next in (None, 0)
            else "what was repeated is not known: no rank has said how far it was"
        )
    if not recovery.repeated:
        return "repeated: nothing"
    last, first = recovery.trained, recovery.next
    return f"repeated: {counted(recovery.repeated, 'iteration')}, {first} to {last}"


def _clocks(report: JobReport) -> Iterator[RenderableType]:
    yield Text("Clocks", "bold")
    yield "  Each time is by the clock of its own host. Clocks of hosts differ, and so may the order below."
    for clock in report.clocks:
        differs = f"{abs(clock.ahead):.3f} s {'ahead of' if clock.ahead >= 0 else 'behind'} this host's"
        yield Text(f"  shadow node {clock.node}: {differs}, within {clock.within:.3f} s")
    yield "  Of hosts that did not answer just now, the difference is not known."
    yield ""


def _timeline(report: JobReport) -> Iterator[RenderableType]:
    events = [event for event in report.events if event["event"] != ITERATION_COMMITTED.name]
    left_out = len(events) - MAX_TIMELINE
    title = "Timeline" if left_out <= 0 else f"Timeline: the last {MAX_TIMELINE} events; --json has all"
    table = FittedTable(title, "time", "who", "event", "what", folds=("what",))
    several = len({(event["host"], event["pid"]) for event in events if event["source"] == _CONTROLLER}) > 1
    for event in events[-MAX_TIMELINE:]:
        source = str(event["source"])
        if several and source == _CONTROLLER:
            source = f"{source}, process {event['pid']} on {event['host']}"
        table.add_row(_clock(event["time"]), _words(source), _words(event["event"]), _details(event))
    yield table


def _details(event: Mapping[str, Any]) -> str:
    fields = "; ".join(
        f"{key}: {_value(value)}" for key, value in event["fields"].items() if key != "why" and value != ""
    )
    why = str(event["fields"].get("why", "")) or (event["message"] if not fields else "")
    return _words("; ".join(filter(None, (fields, why))))


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(text: str) -> str:
    return shortened(text)


def _clock(time: str) -> str:
    """Return the time of day of a time, with milliseconds, and its date."""
    return f"{time[5:10]} {time[11:23]}" if time else ""


def _short(time: str) -> str:
    return f"{time[:10]} {time[11:19]}"
