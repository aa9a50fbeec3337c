"""The report of a game day: a timeline of acts, recoveries and alerts, and what was checked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.gameday.rules import FASTER
from tests.gameday.run import Outcome

_WIDTH = 46


def text(outcome: Outcome) -> str:
    """Return the report."""
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"game day, seed {outcome.seed}: {len(outcome.past)} incidents in {outcome.seconds:.0f} s"
    yield ""
    yield from _timeline(outcome)
    yield ""
    for job, count in outcome.iterations.items():
        yield f"{job}: {count} iterations, {outcome.repeated[job]} repeated"
        yield from (f"  {text}" for text in outcome.resumes[job])
    must = sum(text.must for text in outcome.expected)
    if outcome.without_alerts:
        yield f"alerts were not checked: {outcome.without_alerts}"
    else:
        yield (
            f"alerts: {must} had to fire, {len(outcome.alarms)} fired; times in the rules were "
            f"{FASTER} times as short as in deploy/"
        )
    yield from (f"problem: {problem}" for problem in outcome.problems)
    yield "FAIL" if outcome.problems else "pass"


def _timeline(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each act, recovery and alert, in order of time; the bar of an act shows how long."""
    rows: list[tuple[float, str]] = []
    for past in outcome.past:
        for act in past.acts:
            bar = "=" * min(max(round(act.seconds), 1), _WIDTH - 16)
            rows.append((act.at, f"{act.kind:6} {act.who:14} {bar}"))
        rows.append((past.well, "all is well"))
    alarms = Counter((alarm.at, alarm.short) for alarm in outcome.alarms)
    rows += [(at, f"ALERT  {event}" + f" x {n}" * (n > 1)) for (at, event), n in alarms.items()]
    for at, event in sorted(rows):
        yield f"{int(at) // 60:3}:{at % 60:04.1f}  {event}"
