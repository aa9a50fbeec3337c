"""`checkmate remove`: take jobs off their switches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from checkmate.cli.common import JobArguments, jobs_of, out, says_errors, switch_extra
from checkmate.schema import Job
from controlplane.remove import remove_jobs


@says_errors
def remove(jobs: JobArguments) -> None:
    """Take jobs off their switches: their entries, groups and connected streams. Others lose nothing.

    While `checkmate run` serves a switch it is the one to do this: remove the job's file from it.

    Example: checkmate remove jobs/gpt.yaml
    """
    switch_extra()
    asyncio.run(_remove(jobs_of(jobs)))


async def _remove(jobs: Sequence[Job]) -> None:
    for report in await remove_jobs(jobs):
        out.print(f"switch {report.switch}: {report.updates} updates written, {report.held} entities stay")
