"""What the commands share: consoles, argument types, and one place where errors become messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from checkmate.jobs import JobError, job_files, read_jobs
from checkmate.schema import Job

P = ParamSpec("P")
R = TypeVar("R")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

JobArguments = Annotated[
    list[Path], typer.Argument(help="Job files, or folders of them.", show_default=False)
]
JobArgument = Annotated[Path, typer.Argument(help="A job file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Data instead of text.")]


class UsageFault(Exception):
    """A command line that can't be carried out; the message says what would be right."""

    exit_code = 2


def print_json(data: object) -> None:
    """One JSON document on standard output."""
    json.dump(data, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def jobs_of(arguments: list[Path]) -> list[Job]:
    """The jobs of a command line; `UsageFault` where there are none."""
    files = job_files(arguments)
    if not files:
        folders = ", ".join(str(argument) for argument in arguments)
        raise UsageFault(f"no job file (*.yaml) in {folders}")
    return read_jobs(files)


@contextmanager
def faults_as(as_json: bool) -> Iterator[None]:
    """With `--json`, faults are data too; they are raised all the same."""
    try:
        yield
    except JobError as error:
        if as_json:
            faults = [
                {"file": str(f.file), "line": f.line, "path": f.path, "message": f.message}
                for f in error.faults
            ]
            print_json({"valid": False, "faults": faults})
        raise
    except UsageFault as error:
        if as_json:
            fault = {"file": None, "line": None, "path": "(command line)", "message": str(error)}
            print_json({"valid": False, "faults": [fault]})
        raise


def switch_extra() -> None:
    """Say which install is missing where the control plane's libraries are."""
    try:
        import finsy  # noqa: F401, PLC0415
    except ImportError:
        raise UsageFault(
            "this command speaks P4Runtime, which needs: pip install 'checkmate-training[switch]'"
        ) from None


def says_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the errors that users are meant to see into a message and an exit code."""

    @wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except JobError as error:
            for fault in error.faults:
                err.print(f"[red]error:[/red] {_plain(fault)}", soft_wrap=True)
            raise typer.Exit(2) from None
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if not isinstance(code, int):
                raise
            err.print(f"[red]error:[/red] {_plain(error)}", soft_wrap=True)
            raise typer.Exit(code) from None

    return wrapper


def _plain(value: Any) -> str:
    """Text in which rich sees no markup."""
    return str(value).replace("[", r"\[")
