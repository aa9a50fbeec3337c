"""`checkmate run`: apply jobs, then serve as their stub TCP endpoint."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import MofNCompleteColumn

from checkmate.cli.common import (
    Insecure,
    JobArguments,
    err,
    log_to_stderr,
    out,
    read_files,
    says_errors,
    view_console,
)
from checkmate.cli.status import switch_lines, switch_tables
from checkmate.job.files import JobFiles
from checkmate.job.schema import Job
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import progress
from checkmate.privileges import keep_only, to_read
from checkmate.wording import counted
from controlplane.errors import SwitchUnreachable
from controlplane.serve import Fleet, follow
from controlplane.status import SwitchStatus, read_status
from controlplane.tasks import until_first

VIEW_SECONDS = 1.0


@says_errors
def run(
    jobs: JobArguments,
    once: Annotated[bool, typer.Option("--once", help="Write what is missing, and end.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Load the program, whatever the switch runs.")] = False,
    view: Annotated[
        bool | None,
        typer.Option("--view/--no-view", help="Live view of the streams.", show_default="on a terminal"),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Install jobs on their switches, then serve as the stub TCP endpoint until stopped.

    The switches get exactly these jobs: a second run of the same jobs writes nothing, and entries of
    other jobs are removed. Edit, add or remove job files while it runs: it follows them. Stopping it
    leaves everything installed, so connected streams continue; `checkmate remove` removes a job. Needs each
    job's folder of keys of role controller.

    Exit status: 2 bad input, 3 switch unreachable, 4 wrong program, 5 another primary, 6 write refused.

    Example: checkmate run jobs/
    """
    files = JobFiles(jobs)
    found = read_files(files)
    first = found.require()  # bad input is refused before anything is started
    keep_only(*to_read(_read_later(found.files, first)))
    log_to_stderr()
    logging.getLogger("finsy").setLevel(logging.ERROR)
    asyncio.run(_run(Fleet(insecure=insecure), files, first, once=once, load=load, live=view_console(view)))


def _read_later(files: Iterable[Path], jobs: Iterable[Job]) -> Iterator[Path]:
    """Yield what `run` reads while it serves: job files, keys, and TLS files of switches."""
    yield from files
    for job in jobs:
        if job.keys is not None:
            yield role_folder(job.keys, job.job, Role.CONTROLLER)
        for switch in job.fabric.switches:
            named = {} if switch.tls is None else dict(switch.tls)
            yield from (pem for pem in named.values() if pem is not None)


async def _run(
    fleet: Fleet, files: JobFiles, jobs: list[Job], *, once: bool, load: bool, live: Console | None
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await until_first(_work(fleet, files, jobs, once=once, load=load, live=live), stopped.wait())
    finally:
        await fleet.stop()


async def _work(
    fleet: Fleet, files: JobFiles, jobs: list[Job], *, once: bool, load: bool, live: Console | None
) -> None:
    await _apply(fleet, jobs, load)
    if once:
        return
    out.print("serving; stop with Ctrl-C")
    works = [fleet.serve(), follow(files, fleet), *([_view(fleet, live)] if live is not None else [])]
    await until_first(*works)


async def _apply(fleet: Fleet, jobs: list[Job], load: bool) -> None:
    with progress(err, MofNCompleteColumn()) as bar:
        first = bar.add_task("connecting to the switches", total=None)
        rows = {}

        def written(switch: str, done: int, total: int) -> None:
            bar.update(first, visible=False)
            if switch not in rows:
                rows[switch] = bar.add_task(f"writing to {switch}")
            bar.update(rows[switch], completed=done, total=total)

        done = await fleet.start(jobs, replace=load, progress=written)
    for report in done:
        loaded = "program loaded, " if report.loaded else ""
        updates = counted(report.updates, "update")
        line = f"switch {report.switch}: {loaded}{updates} written in {report.seconds:.2f} s"
        out.print(line, markup=False)


async def _view(fleet: Fleet, console: Console) -> None:
    with Live(Group(), console=console, refresh_per_second=4) as live:
        while True:
            live.update(_picture(await _read(fleet)))
            await asyncio.sleep(VIEW_SECONDS)


def _picture(found: Sequence[SwitchStatus]) -> Group:
    """Return the live view: lines first, because a table may be longer than the terminal."""
    lines = [f"switch {status.switch}: {line}" for status in found for line in switch_lines(status)]
    return Group(*lines, "", *(table for status in found for table in switch_tables(status)))


async def _read(fleet: Fleet) -> list[SwitchStatus]:
    found = []
    task = asyncio.current_task()
    for name, controller in list(fleet.controllers.items()):
        session, network = controller.session, controller.network
        if session is None or name not in network.switches:
            continue
        try:
            found.append(await read_status(session, network, controller.held))
        except SwitchUnreachable:
            continue  # `serve` logs it, and reconnects
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            continue  # the session was closed under the read
    return found
