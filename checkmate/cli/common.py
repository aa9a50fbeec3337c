"""Shared by all commands: consoles, argument types, and the conversion of errors to messages."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from checkmate.base.extras import ExtraMissing, needs, needs_of
from checkmate.base.privileges import Capability, to_write
from checkmate.base.wording import JSON_VERSION, counted
from checkmate.cli.completing import job_paths
from checkmate.events.event_log import EventLog, EventsError, configured_folder, find_folder
from checkmate.events.process_log import keep_in, log_everything_as_json, print_as_json
from checkmate.job.files import JobError, JobSet, Located
from checkmate.job.following import JobFiles
from checkmate.job.schema import JOB_VARIABLE, Job
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import has_cursor, text_console
from checkmate.output.log_lines import TextLines

P = ParamSpec("P")
R = TypeVar("R")

_ROLES: Final = (Role.READER, Role.TRAINER, Role.CONTROLLER, Role.SHADOW)

out = text_console()
err = text_console(stderr=True)

JobArguments = Annotated[
    list[Path],
    typer.Argument(
        help="Job files, or folders of them.",
        metavar="JOB",
        envvar=JOB_VARIABLE,
        show_default=False,
        autocompletion=job_paths,
    ),
]
_job: Final = typer.Argument(
    help="A job file.", metavar="JOB", envvar=JOB_VARIABLE, show_default=False, autocompletion=job_paths
)
JobArgument = Annotated[Path, _job]
OptionalJobArgument = Annotated[Path | None, _job]
FabricOption = Annotated[
    Path | None,
    typer.Option(
        "--fabric",
        metavar="FILE",
        help="The operator's fabric file: each job may have what it grants.",
        show_default="every job may have everything",
        autocompletion=job_paths,
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no keys: whoever reaches the job's addresses can read it.")
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Serve metrics there.", show_default="nowhere"),
]


class LogFormat(StrEnum):
    """The format of lines of the log."""

    TEXT = "text"
    JSON = "json"


AsLog = Annotated[
    LogFormat, typer.Option("--log-format", help="Lines on standard error: for people, or JSON each.")
]
Events = Annotated[
    Path | None,
    typer.Option(
        "--events",
        metavar="FOLDER",
        help="Keep events there, for `report`.",
        show_default="$CHECKMATE_EVENTS, else events/ in systemd's $STATE_DIRECTORY, else in memory only",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text, errors included.")]


class UsageFault(Exception):
    """A command line that cannot be carried out; the message explains how to correct it."""

    exit_code = 2
    data: Mapping[str, object] = MappingProxyType({})
    """Keys that `--json` prints beside the error."""


class Declined(UsageFault):
    """The user does not want what a command is about to do."""

    exit_code = 1


def metrics_ports(metrics: str | None) -> list[int]:
    """Return the TCP port of `--metrics`, if there is one. Raise `MetricsError` if it is not HOST:PORT."""
    if metrics is None:
        return []
    from checkmate.base.metrics import host_and_port  # noqa: PLC0415 - an extra

    return [host_and_port(metrics)[1]]


def check_node(job: Job, node: int) -> None:
    """Raise `UsageFault` if a job has no shadow node with this id."""
    ids = [shadow_node.id for shadow_node in job.shadow_nodes]
    if node not in ids:
        ids_text = ", ".join(map(str, ids))
        raise UsageFault(f"job {job.job} has no shadow node {node}; its ids are {ids_text}")


def confirm(question: str, otherwise: str) -> None:
    """Ask on the terminal. Raise `Declined`, with the words of `otherwise`, unless the answer is yes."""
    err.print(f"{question} [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined(otherwise)


def print_json(data: Mapping[str, object], *, line: bool = False) -> None:
    """Print one JSON document on standard output, on a line of its own if several follow each other."""
    text = json.dumps({"version": JSON_VERSION, **data}, indent=None if line else 2, default=str)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_job_set(arguments: Sequence[Path], fabric: Path | None = None) -> JobSet:
    """Read the job files of a command line, faults included. Raise `UsageFault` if there are none.

    `fabric`: the operator's fabric file, if jobs have only what it grants them.
    """
    files = JobFiles(arguments, fabric)
    job_set = files.read()
    if not job_set.jobs_read:
        raise UsageFault(f"no job file (*.yaml) in {files}")
    return job_set


def require_switches(jobs: Sequence[Job], command: str) -> None:
    """Raise `UsageFault` if there are jobs, but none has a switch, so that a command has nothing to do."""
    if jobs and all(job.copies == "host" for job in jobs):
        names = ", ".join(job.job for job in jobs)
        raise UsageFault(
            f"`checkmate {command}` is about switches, and hosts send the copies of {names} themselves "
            "(copies: host): it is not needed"
        )


def readable_role(job: Job) -> Role:
    """Return the first role whose keys this host has: all of them may read status and events."""
    folders = {} if job.keys is None else {role: role_folder(job.keys, job.job, role) for role in _ROLES}
    # `Path.is_dir` raises an error if a folder above is another user's, which reading the keys says better.
    return next((role for role, folder in folders.items() if os.path.isdir(folder)), Role.READER)


def print_error(
    message: str, exit_code: int, faults: Sequence[Located] = (), more: Mapping[str, object] | None = None
) -> None:
    """Print the error as `--json` does (docs/cli.md): on one line, because some commands stream lines."""
    documents = [{"file": str(f.file), "line": f.line, "path": f.path, "message": f.message} for f in faults]
    print_json({"error": message, "exit": exit_code, "faults": documents, **(more or {})}, line=True)


def show_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors meant for users into a message and an exit code, and into data with `--json`."""

    @wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with needs_of(command.__module__.rpartition(".")[2]):
                return command(*args, **kwargs)
        except typer.Exit:  # it has an exit status too, but the command has printed its result
            raise
        except Exception as error:
            faults = error.faults if isinstance(error, JobError) else ()
            code = 2 if faults else getattr(error, "exit_code", None)
            if not isinstance(code, int):
                raise
            if kwargs.get("as_json"):
                where = getattr(error, "where", "the job files")
                message = f"{counted(len(faults), 'fault')} in {where}" if faults else str(error)
                print_error(message, code, faults, getattr(error, "data", None))
            for line in faults or (error,):
                if kwargs.get("log_format") is LogFormat.JSON:
                    print_as_json(logging.ERROR, str(line))
                else:
                    err.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)
            raise typer.Exit(code) from None

    return wrapper


TIME: Final = "%Y-%m-%d %H:%M:%S"
"""Local time, as in the switch's own log."""


def view_console(view: bool | None, log_format: LogFormat = LogFormat.TEXT) -> Console | None:
    """Return the console of a live view, or `None` without one; by default there is one on a terminal.

    It is the log's if that is on a terminal: two consoles on one terminal would overwrite each other. Beside
    a log of JSON there is none; raise `UsageFault` if one is wanted.
    """
    if log_format is LogFormat.JSON:
        if view:
            raise UsageFault("--view is for people, and --log-format json is not; use one of them")
        return None
    if not (has_cursor(out) if view is None else view):
        return None
    return err if err.is_terminal else out


def log_to_stderr(log_format: LogFormat = LogFormat.TEXT) -> None:
    """Log to standard error, each line with its time so that logs of several machines can be merged."""
    if log_format is LogFormat.JSON:
        log_everything_as_json()
        return
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(TextLines("%(asctime)s %(message)s", TIME))
    if err.is_terminal:
        handler = RichHandler(
            console=err, show_path=False, show_level=False, log_time_format=TIME, omit_repeated_times=False
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def lab_hint(jobs: Sequence[Path], command: str) -> str:
    """Return how to run a command in the lab of a job file, if it is of one and this shell is outside."""
    try:
        with needs("labs", "demo"):
            from topologies import state  # noqa: PLC0415 - only after a failure
    except ExtraMissing:  # then this machine has no labs
        return ""
    labs = dict.fromkeys(lab for job in jobs if (lab := state.lab_outside(job)) is not None)
    return "".join(
        f"; outside lab {lab}, use checkmate lab exec {lab} ctl -- checkmate {command}" for lab in labs
    )


def event_log_capabilities(folder: Path | None) -> tuple[Capability, ...]:
    """Return what writing the event log takes, for an option `--events`."""
    events_folder = find_folder(folder)
    return () if events_folder is None else to_write(events_folder)


@contextmanager
def open_event_log(source: str, job: str, folder: Path | None) -> Iterator[EventLog]:
    """Keep this process's events, on disk if there is a folder for them.

    Raise `EventsError` if somebody has named the folder, and it can't be written. A folder that only systemd
    names is a convenience: without it, events stay in memory.
    """
    try:
        log = EventLog(source, job, find_folder(folder)).start()
    except EventsError as error:
        if configured_folder(folder) is not None:
            raise
        logging.getLogger("checkmate").warning("%s; they are kept in memory only", error)
        log = EventLog(source, job).start()
    keep_in(log)
    try:
        yield log
    finally:
        keep_in(None)
        log.close()
