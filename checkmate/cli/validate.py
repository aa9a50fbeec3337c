"""`checkmate validate`: report every fault of job files at once."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from checkmate.cli.common import (
    AsJson,
    JobArguments,
    UsageFault,
    out,
    print_json,
    says_errors,
    set_of,
)
from checkmate.job.files import JobError, unreadable_tls
from checkmate.wording import counted


class Invalid(JobError):
    """The result of `validate` if a file has a fault."""

    data = MappingProxyType({"valid": False})


@says_errors
def validate(
    jobs: JobArguments,
    as_json: AsJson = False,
    init: Annotated[
        bool, typer.Option("--init", help="Make the keys of valid jobs; complete and renew those there.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", help="With --init: folder of keys.  [default: the job's, keys/]"),
    ] = None,
) -> None:
    """Check job files: each by itself, against each other, and against the capacity of their switches.

    Every fault is reported with its line, its path in the file and a correction. TLS files of switches
    must be readable on this host. Exit status 2 if there is a fault.
    With --init, for files without a fault: makes a certificate authority for each job, and a folder of keys
    for each role, and prints where to copy each folder. Run again, it keeps what is there, and issues
    certificates that are missing, end within 60 days, or lack a host of the job.

    Example: checkmate validate jobs/gpt.yaml

    Example: checkmate validate --init jobs/gpt.yaml
    """
    from checkmate.cli import init_keys  # noqa: PLC0415
    from checkmate.cli.planning.plan import checked_plan  # noqa: PLC0415

    if keys is not None and not init:
        raise UsageFault("--keys needs --init")
    found = set_of(jobs)
    try:
        loaded, plans = checked_plan(found, unreadable_tls(found))
    except JobError as error:
        raise Invalid(error.faults) from None
    made = init_keys.make(loaded, keys) if init else []
    if as_json:
        more = {"keys": [init_keys.data(one) for one in made]} if init else {}
        print_json({"valid": True, "faults": [], "jobs": [job.job for job in loaded], **more})
        return
    for job in loaded:
        ranks = sum(len(group.ranks) for group in job.dp_groups)
        streams = sum(s.boundary.job == job.job for plan in plans.values() for s in plan.streams.values())
        has = (
            (len(job.dp_groups), "DP group"),
            (ranks, "rank"),
            (len(job.shadow_nodes), "shadow node"),
            (job.channels, "channel"),
            (streams, "stream"),
        )
        out.print(f"{job.job}: valid; {', '.join(counted(*one) for one in has)}")
    for one in made:
        init_keys.show(one, out)
