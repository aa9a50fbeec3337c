"""`checkmate run`: apply jobs, then serve as their stub TCP endpoint."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import MofNCompleteColumn

import checkmate
from checkmate.base.privileges import keep_only, to_listen, to_read
from checkmate.base.systemd import notify, stay_alive
from checkmate.base.wording import counted
from checkmate.cli.common import (
    AsLog,
    Events,
    FabricOption,
    Insecure,
    JobArguments,
    LogFormat,
    Metrics,
    UsageFault,
    err,
    event_log_capabilities,
    log_to_stderr,
    metrics_ports,
    open_event_log,
    out,
    require_switches,
    show_errors,
    view_console,
)
from checkmate.cli.switch_status import switch_lines, switch_tables
from checkmate.doctor import subjects
from checkmate.doctor.diagnosis import warn
from checkmate.events.kinds import (
    CONTROLLER_DISPLACED,
    CONTROLLER_ENDED,
    CONTROLLER_PRIMARY,
    CONTROLLER_STANDBY,
    CONTROLLER_STARTED,
)
from checkmate.events.process_log import say
from checkmate.job.following import JobFiles, JobsToServe
from checkmate.job.schema import Job
from checkmate.job.yaml_lines import JobError
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import progress
from controlplane.errors import AnotherPrimary, ControlError, SwitchUnreachable
from controlplane.hello_keys import HelloKeys
from controlplane.serve import Fleet, follow, log_refusals, status_now
from controlplane.standby import Standby
from controlplane.status import SwitchStatus
from controlplane.tasks import until_first

if TYPE_CHECKING:
    from checkmate.base.metrics import MetricsServer
    from controlplane.metrics import SwitchReading

VIEW_SECONDS = 1.0
REFUSED_SECONDS = 5.0
"""After a takeover that a switch has refused; another controller may have more luck."""


@show_errors
def run(
    jobs: JobArguments,
    once: Annotated[bool, typer.Option("--once", help="Write what is missing, and end.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Load the program, whatever the switch runs.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait as long as another controller has the same jobs.")
    ] = False,
    view: Annotated[
        bool | None,
        typer.Option("--view/--no-view", help="Live view of the streams.", show_default="on a terminal"),
    ] = None,
    metrics: Metrics = None,
    events: Events = None,
    log_format: AsLog = LogFormat.TEXT,
    fabric: FabricOption = None,
    insecure: Insecure = False,
) -> None:
    """Install jobs on their switches, then serve as the stub TCP endpoint until stopped.

    The switches get exactly these jobs: a second run of the same jobs writes nothing, and entries of
    other jobs are removed. Edit, add or remove job files while it runs: it follows them. Stopping it
    leaves everything installed, so connected streams continue; `checkmate remove` removes a job. Needs each
    job's folder of keys of role controller.

    With --standby, any number of controllers may run with the same job files: one serves, and if it ends,
    another one takes over.

    With --fabric, the jobs are of several owners: each has only what that file grants it. A file that claims
    more is refused, and what is served of its job stays.

    Exit status: 2 bad input, 3 switch unreachable, 4 wrong program, 5 another primary, 6 write refused.

    Example: checkmate run jobs/
    """
    if standby and (once or load):
        raise UsageFault("--standby waits and serves; use --once or --load without it")
    live = view_console(view, log_format)
    keys = HelloKeys(insecure=insecure, remember=fabric is not None)
    files = JobFiles(jobs, fabric, keys.files)
    job_files = _first(files, keys, all_sound=once or load)
    first = job_files.jobs
    require_switches(first, "run")
    keep_only(
        *to_read(_read_later(job_files.files, first)),
        *to_listen(metrics_ports(metrics)),
        *event_log_capabilities(events),
    )
    log_to_stderr(log_format)
    warn(map(subjects.controller, first), insecure=insecure)
    logging.getLogger("finsy").setLevel(logging.ERROR)
    controller = _Controller(files, keys, load=load, live=live)
    with open_event_log("controller", "", events), _log_lifetime(first):
        log_refusals(files, job_files)
        asyncio.run(_until_stopped(controller.work(job_files, standby=standby, once=once, metrics=metrics)))


def _first(files: JobFiles, keys: HelloKeys, *, all_sound: bool) -> JobsToServe:
    """Return the jobs to begin with. Bad input is refused before anything is started.

    With several owners, sound jobs are enough, unless `all_sound`: one owner's mistake must not keep the
    controller from starting again.
    """
    job_files = files.jobs_to_serve(keys.unusable)
    if not job_files.files:
        raise UsageFault(f"no job file (*.yaml) in {files}")
    if job_files.faults and (all_sound or not job_files.jobs):
        raise JobError(job_files.faults)
    files.note_served(job_files)
    return job_files


@contextmanager
def _log_lifetime(jobs: Sequence[Job]) -> Iterator[None]:
    """Say when the controller begins, and when it ends for a reason that it knows."""
    event = CONTROLLER_STARTED(version=checkmate.__version__, jobs=[job.job for job in jobs])
    say(logging.DEBUG, event, "the controller has started")
    try:
        yield
    except ControlError as error:
        say(logging.DEBUG, CONTROLLER_DISPLACED(why=str(error)), "the controller ends: %s", error)
        say(logging.DEBUG, CONTROLLER_ENDED(), "the controller has ended")
        raise
    say(logging.DEBUG, CONTROLLER_ENDED(), "the controller has ended")


def _read_later(files: Iterable[Path], jobs: Iterable[Job]) -> Iterator[Path]:
    """Yield what `run` reads while it serves: job files, keys, and TLS files of switches."""
    yield from files
    for job in jobs:
        if job.keys is not None:
            yield role_folder(job.keys, job.job, Role.CONTROLLER)
        for switch in job.fabric.switches:
            pem_files = {} if switch.tls is None else vars(switch.tls)
            yield from (pem for pem in pem_files.values() if pem is not None)


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Work until it ends, or a signal does."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await until_first(work, stopped.wait(), stay_alive())
    finally:
        notify("STOPPING=1")


class _Controller:
    """The work of `run`, with its options."""

    def __init__(self, files: JobFiles, keys: HelloKeys, *, load: bool, live: Console | None) -> None:
        self._files, self._keys, self._load, self._live = files, keys, load, live
        self.reading: SwitchReading | None = None

    async def work(self, job_files: JobsToServe, *, standby: bool, once: bool, metrics: str | None) -> None:
        """Serve or stand by, with metrics or without."""
        with nullcontext() if metrics is None else self._measured(metrics):
            await (self.stand_by(job_files) if standby else self.serve(job_files.jobs, once=once))

    def _measured(self, address: str) -> MetricsServer:
        from checkmate.base.metrics import MetricsServer  # noqa: PLC0415 - an extra
        from controlplane.metrics import SwitchReading  # noqa: PLC0415

        self.reading = SwitchReading(asyncio.get_running_loop())
        return MetricsServer(address, self.reading.collect, self.reading.not_ready)

    async def serve(
        self, jobs: Sequence[Job], *, once: bool = False, now: Sequence[str] | None = None
    ) -> None:
        """Write what is missing; unless `once`, serve. With `now`, these switches are enough to begin."""
        fleet = Fleet(self._keys)
        try:
            await _apply(fleet, jobs, self._load, now)
            if once:
                return
            if self.reading is not None:
                self.reading.fleet = fleet
            notify("READY=1", "STATUS=serving")
            out.print("serving; stop with Ctrl-C")
            view = [] if self._live is None else [_view(fleet, self._live)]
            await until_first(fleet.serve(), follow(self._files, fleet, self._keys.unusable), *view)
        finally:
            if self.reading is not None:
                self.reading.fleet = None
            await fleet.stop()

    async def stand_by(self, job_files: JobsToServe) -> None:
        """Serve whenever no other controller does."""

        def check(jobs: Sequence[Job]) -> None:
            Fleet(self._keys).prepare(jobs)

        check(job_files.jobs)  # faults are found now, not when it is needed
        standby = Standby(self._files, job_files, check, self._keys.unusable)
        while True:
            notify("READY=1", "STATUS=standing by")
            out.print("standing by; stop with Ctrl-C")
            say(logging.DEBUG, CONTROLLER_STANDBY(), "standing by")
            self._standing_by(True)
            now = await standby.wait()
            self._standing_by(False)
            try:
                await self.serve(standby.jobs, now=now)
            except (AnotherPrimary, SwitchUnreachable) as error:
                say(logging.WARNING, CONTROLLER_DISPLACED(why=str(error)), "%s", error)
            except (ControlError, KeysError) as error:
                displaced = CONTROLLER_DISPLACED(why=str(error))
                say(logging.ERROR, displaced, "%s; standing by for %g s", error, REFUSED_SECONDS)
                await asyncio.sleep(REFUSED_SECONDS)
            standby.read_again()

    def _standing_by(self, waits: bool) -> None:
        if self.reading is not None:
            self.reading.standby = waits


async def _apply(fleet: Fleet, jobs: Sequence[Job], load: bool, now: Sequence[str] | None) -> None:
    with progress(err, MofNCompleteColumn()) as bar:
        first = bar.add_task("connecting to the switches", total=None)
        rows = {}

        def show_written(switch: str, count: int, total: int) -> None:
            bar.update(first, visible=False)
            if switch not in rows:
                rows[switch] = bar.add_task(f"writing to {switch}")
            bar.update(rows[switch], completed=count, total=total)

        reports = await fleet.start(jobs, replace=load, now=now, progress=show_written)
    event = CONTROLLER_PRIMARY(
        switches=[report.switch for report in reports],
        updates=sum(report.updates for report in reports),
        seconds=round(sum(report.seconds for report in reports), 3),
    )
    say(logging.DEBUG, event, "serves %s", counted(len(reports), "switch", "switches"))
    for report in reports:
        loaded = "program loaded, " if report.loaded else ""
        updates = counted(report.updates, "update")
        line = f"switch {report.switch}: {loaded}{updates} written in {report.seconds:.2f} s"
        out.print(line, markup=False)


async def _view(fleet: Fleet, console: Console) -> None:
    with Live(Group(), console=console, refresh_per_second=4) as live:
        while True:
            live.update(_picture(await _read(fleet)))
            await asyncio.sleep(VIEW_SECONDS)


def _picture(statuses: Sequence[SwitchStatus]) -> Group:
    """Return the live view: lines first, because a table may be longer than the terminal."""
    lines = [line for status in statuses for line in switch_lines(status)]
    return Group(*lines, "", *(table for status in statuses for table in switch_tables(status)))


async def _read(fleet: Fleet) -> list[SwitchStatus]:
    statuses = [await status_now(controller) for controller in list(fleet.controllers.values())]
    return [status for status in statuses if status is not None]
