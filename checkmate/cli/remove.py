"""`checkmate remove`: take jobs off their switches."""

from __future__ import annotations

import asyncio

from checkmate.cli.common import (
    AsJson,
    JobArguments,
    jobs_of,
    out,
    print_json,
    says_errors,
    switch_extra,
)
from checkmate.wording import counted
from controlplane.errors import AnotherPrimary
from controlplane.remove import remove_jobs


@says_errors
def remove(jobs: JobArguments, as_json: AsJson = False) -> None:
    """Take jobs off their switches: their entries, groups and connected streams. Others lose nothing.

    While `checkmate run` serves a switch it is the one to do this: remove the job's file from it.

    Example: checkmate remove jobs/gpt.yaml
    """
    switch_extra()
    try:
        reports = asyncio.run(remove_jobs(jobs_of(jobs)))
    except AnotherPrimary as error:
        raise AnotherPrimary(
            f"{error}. Stop that `checkmate run` and try again; or take the job's file out of the folder "
            "that it serves: it then removes the job itself"
        ) from None
    if as_json:
        print_json({r.switch: {"updates": r.updates, "entities": r.held} for r in reports})
        return
    for report in reports:
        stay = counted(report.held, "entity stays", "entities stay")
        out.print(f"switch {report.switch}: {counted(report.updates, 'update')} written, {stay}")
