"""`checkmate status`: show the streams of jobs, as their switches or shadow nodes report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from checkmate.base.extras import needs
from checkmate.cli.common import (
    AsJson,
    FabricOption,
    JobArguments,
    lab_hint,
    print_json,
    read_job_set,
    show_errors,
)
from checkmate.job.schema import Job


@show_errors
def status(
    jobs: JobArguments,
    fabric: FabricOption = None,
    as_json: AsJson = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all streams of the jobs are connected.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until --wait times out.")] = 30.0,
) -> None:
    """Show the streams of jobs: connected, packets, bytes, lost. Only reads, even while `run` serves.

    Of jobs with copies by hosts, which have no switches, it shows what the shadow nodes have.

    With --wait, exit status 7 if a stream is still not connected after --timeout. If a switch can't be read,
    the others are shown, and the exit status tells why.

    Jobs that are not installed on a switch are reported as such, with --json in its "not_installed".

    Example: checkmate status jobs/gpt.yaml --wait --json
    """
    loaded = read_job_set(jobs, fabric).require()
    by_hosts = [job for job in loaded if job.copies == "host"]
    by_switch = [job for job in loaded if job.copies == "switch"]
    seconds = timeout if wait else 0.0
    data: dict[str, Any] = {"switches": {}}
    checks: list[Callable[[], None]] = []
    if by_hosts:
        checks.append(_nodes(by_hosts, jobs, data, seconds, wait=wait, as_json=as_json))
    if by_switch:
        checks.append(_switches(by_switch, jobs, data, seconds, wait=wait, as_json=as_json))
    for check in checks:
        check()
    if as_json:
        print_json(data)


def _nodes(
    jobs: Sequence[Job],
    files: Sequence[Path],
    data: dict[str, Any],
    seconds: float,
    *,
    wait: bool,
    as_json: bool,
) -> Callable[[], None]:
    """Read and print what shadow nodes have. Return what raises what is wrong, once all is printed."""
    with needs("`checkmate status`", "trainer"):
        from checkmate.cli import node_status  # noqa: PLC0415 - an extra
    answers = node_status.read_nodes(jobs, seconds)
    data["nodes"] = node_status.node_data(answers)
    if not as_json:
        node_status.show_nodes(jobs, answers)
    return lambda: node_status.check_nodes(
        jobs, answers, data, wait=wait, hint=lambda: lab_hint(files, "status")
    )


def _switches(
    jobs: Sequence[Job],
    files: Sequence[Path],
    data: dict[str, Any],
    seconds: float,
    *,
    wait: bool,
    as_json: bool,
) -> Callable[[], None]:
    """Read and print what switches have. Return what raises what is wrong, once all is printed."""
    from checkmate.cli import switch_status  # noqa: PLC0415 - an extra

    statuses, errors = switch_status.read_switches(jobs, seconds)
    data["switches"] = {status.switch: status.data() for status in statuses}
    if not as_json:
        switch_status.show_switches(statuses)

    def check() -> None:
        hint = lab_hint(files, "status") if errors else ""
        switch_status.check_switches(statuses, errors, data, hint, seconds if wait else None)

    return check
