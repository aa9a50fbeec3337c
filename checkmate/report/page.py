"""A report as text: a summary first, then the timeline. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from checkmate.events.kinds import ITERATION_COMMITTED
from checkmate.output.tables import FittedTable
from checkmate.report.records import Absence, Death, JobReport, Recovery
from checkmate.wording import counted, shortened

TIMELINE_MOST: Final = 200
"""Events of the timeline; `--json` has all of them."""
_LINE_MOST: Final = 1000
"""Characters of a line, whose parts are shorter."""
_CONTROLLER: Final = "controller"
"""The source of events of each controller."""
_SOURCES: Final = {
    "nodes": "resumed from the shadow nodes",
    "disk": "resumed from a checkpoint on disk",
    "start": "began with iteration 0",
    "failed": "failed",
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
    for recovery in report.recoveries:
        yield from _recovery(recovery)
    committed = "not known" if report.committed is None else f"iteration {report.committed}"
    yield ""
    yield Text.assemble(("Last committed iteration, as far as nodes have said: ", "bold"), committed)
    yield ""
    yield from _lines("Shards without a live holder", map(_absence, report.absences), "")
    troubles = [f"{_clock(one.time)}  {_words(one.who)}: {_words(one.message)}" for one in report.troubles]
    yield from _lines("Troubles", _bounded(troubles), "")
    yield from _lines("What is not known", map(_words, report.unknown), "")
    yield from _clocks(report)
    yield from _timeline(report)


def _lines(title: str, lines: Any, none: str) -> Iterator[RenderableType]:
    found = list(lines) or ([none] if none else [])
    if found:
        yield Text(title, "bold")
        yield from (Text(f"  {shortened(line, _LINE_MOST)}") for line in found)
        yield ""


def _bounded(lines: list[str], most: int = 20) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most:,} more; the timeline and --json have them"]


def _death(one: Death) -> Iterator[str]:
    what = f", process {one.pid} on {_words(one.host)}" if one.pid else " (it has kept no events)"
    yield f"{_clock(one.noticed or one.last)}  {_words(one.who)}{what}"
    if one.last:
        yield f"  last event: {_clock(one.last)}"
    if one.noticed:
        yield f"  noticed: {_clock(one.noticed)} by {_words(one.by)}"
    again = "another one serves since" if one.who == _CONTROLLER else "began again:"
    yield f"  {again} {_clock(one.back)}" if one.back else "  has not begun again"


def _absence(one: Absence) -> str:
    until = f"until {_clock(one.until)}" if one.until else "and still"
    return f"{_clock(one.since)}  DP group {one.group}, shard {one.shard}, {until}"


def _recovery(one: Recovery) -> Iterator[RenderableType]:
    number = "" if one.incarnation is None else f" (incarnation {one.incarnation})"
    yield Text(f"  {_clock(one.time)}  {_SOURCES.get(one.source, _words(one.source))}{number}")
    facts = [
        one.after and f"after {_words(one.after)}",
        one.why and _words(one.why),
        one.committed is not None and f"last committed iteration: {one.committed}",
        one.next is not None and f"first iteration trained after: {one.next}",
        _repeated(one),
    ]
    yield from (Text(f"    {fact}") for fact in facts if fact)
    if one.steps:
        table = FittedTable("", "step", "seconds", "slowest", numbers=("seconds",))
        for step in one.steps:
            table.add_row(step.name, f"{step.seconds:,.3f}", _words(step.who))
        yield table


def _repeated(one: Recovery) -> str:
    if one.repeated is None:
        return (
            "" if one.next in (None, 0) else "what was repeated is not known: no rank has said how far it was"
        )
    if not one.repeated:
        return "repeated: nothing"
    last, first = one.trained, one.next
    return f"repeated: {counted(one.repeated, 'iteration')}, {first} to {last}"


def _clocks(report: JobReport) -> Iterator[RenderableType]:
    yield Text("Clocks", "bold")
    yield "  Each time is by the clock of its own host. Clocks of hosts differ, and so may the order below."
    for one in report.clocks:
        differs = f"{abs(one.ahead):.3f} s {'ahead of' if one.ahead >= 0 else 'behind'} this host's"
        yield Text(f"  shadow node {one.node}: {differs}, within {one.within:.3f} s")
    yield "  Of hosts that did not answer just now, the difference is not known."
    yield ""


def _timeline(report: JobReport) -> Iterator[RenderableType]:
    shown = [one for one in report.events if one["event"] != ITERATION_COMMITTED.name]
    left_out = len(shown) - TIMELINE_MOST
    title = "Timeline" if left_out <= 0 else f"Timeline: the last {TIMELINE_MOST} events; --json has all"
    table = FittedTable(title, "time", "who", "event", "what", folds=("what",))
    several = len({(one["host"], one["pid"]) for one in shown if one["source"] == _CONTROLLER}) > 1
    for one in shown[-TIMELINE_MOST:]:
        who = str(one["source"])
        if several and who == _CONTROLLER:
            who = f"{who}, process {one['pid']} on {one['host']}"
        table.add_row(_clock(one["time"]), _words(who), _words(one["event"]), _what(one))
    yield table


def _what(event: Mapping[str, Any]) -> str:
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
