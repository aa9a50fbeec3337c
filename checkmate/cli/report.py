"""`checkmate report`: what happened to a job, from the events of all its processes."""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from checkmate.base.privileges import keep_only, to_read
from checkmate.cli.common import (
    AsJson,
    Insecure,
    JobArgument,
    UsageFault,
    err,
    lab_hint,
    out,
    print_json,
    readable_role,
    show_errors,
)
from checkmate.events.event_log import FOLDER, SUFFIX
from checkmate.events.reading import MAX_TIME
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.keys.access import access
from checkmate.keys.roles import role_folder
from checkmate.nodes.stubs import Stubs
from checkmate.output.consoles import spinner
from checkmate.report.gathering import Gathered, ask_nodes, read_logs
from checkmate.report.page import page
from checkmate.report.processes import merge_events
from checkmate.report.records import JobReport
from checkmate.report.summary import summary

_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_AGO: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d)")


@show_errors
def report(
    job: JobArgument,
    events: Annotated[
        list[Path] | None,
        typer.Option(
            "--events",
            metavar="PATH",
            help="An event log, or a folder of them; repeat it for several. $CHECKMATE_EVENTS is read, too.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="2026-11-23T21:00:00Z, or how long ago: 90min, 2h.")
    ] = "1d",
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Report what happened to a job: who died when, what was committed, and how long recovery took.

    Asks the job's shadow nodes, and reads the event logs of dead nodes, controllers and ranks from --events.
    The page says what is not known because somebody could not be asked. Needs one of the job's folders of
    keys, such as that of role reader. Changes nothing.

    Exit status: 0 also if nobody could be asked; 2 bad input.

    Example: checkmate report jobs/gpt.yaml --events /var/lib/checkmate-shadow/events --since 2h
    """
    loaded = read_job(job)
    now = time.time()
    try:
        start = parse_since(since, now)
    except ValueError as error:
        raise UsageFault(f"--since: {error}") from None
    role = readable_role(loaded)
    keys = [] if loaded.keys is None else [role_folder(loaded.keys, loaded.job, role)]
    default = Path(os.environ.get(FOLDER) or "/dev/null")
    paths = [*(events or ()), *([default] if any(default.glob(f"*{SUFFIX}")) else ())]
    keep_only(*to_read([*keys, *paths]))
    gathered = Gathered()
    read_logs(paths, gathered)
    with (
        spinner(err, "asking the shadow nodes"),
        Stubs(loaded, access(loaded, role, insecure=insecure).keys) as stubs,
    ):
        ask_nodes(loaded, stubs, start, gathered)
    if not gathered.live and (hint := lab_hint([job], "report")):
        gathered.notes.append(f"no shadow node answers{hint}")
    _print(_report(loaded, gathered, start, now), as_json=as_json)


def parse_since(text: str, now: float) -> float:
    """Return the seconds since the epoch of `2026-11-23T21:00:00Z`, `2026-11-23`, or `90min` before `now`.

    A time without a zone is local. Raises `ValueError` with what would be right.
    """
    try:
        if match := _AGO.fullmatch(text.strip()):
            since = now - float(match[1]) * _UNITS[match[2]]
        else:
            since = dt.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        since = -1.0
    if not 0 <= since < MAX_TIME:  # no event has another one
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-23T21:00:00Z, or how long ago: 90min, 2h or 3d"
        )
    return since


def _report(job: Job, gathered: Gathered, since: float, until: float) -> JobReport:
    return summary(
        job,
        merge_events(gathered.events, job.job),
        since=since,
        until=until,
        live=gathered.live,
        silent=gathered.silent,
        clocks=gathered.clocks,
        notes=gathered.notes,
    )


def _print(report: JobReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    for part in page(report):
        out.print(part, soft_wrap=isinstance(part, str), markup=False)
