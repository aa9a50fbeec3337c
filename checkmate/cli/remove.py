"""`checkmate remove`: remove jobs from their switches."""

from __future__ import annotations

import asyncio

from checkmate.base.wording import counted
from checkmate.cli.common import (
    AsJson,
    FabricOption,
    JobArguments,
    err,
    out,
    print_json,
    read_job_set,
    require_switches,
    show_errors,
)
from checkmate.output.consoles import spinner
from controlplane.errors import AnotherPrimary
from controlplane.remove import remove_jobs


@show_errors
def remove(jobs: JobArguments, fabric: FabricOption = None, as_json: AsJson = False) -> None:
    """Remove jobs from their switches: entries, groups and connected streams. Other jobs are not affected.

    While `checkmate run` serves a switch, remove the job's file from its folder instead.

    Example: checkmate remove jobs/gpt.yaml
    """
    try:
        loaded = read_job_set(jobs, fabric).require()
        require_switches(loaded, "remove")
        with spinner(err, "removing"):
            reports = asyncio.run(remove_jobs(loaded))
    except AnotherPrimary as error:
        raise AnotherPrimary(
            f"{error}. Stop that `checkmate run` and try again; or remove the job's file from the folder "
            "that it serves, and it removes the job itself"
        ) from None
    if as_json:
        print_json({"switches": {r.switch: {"updates": r.updates, "entities": r.entities} for r in reports}})
        return
    for report in reports:
        stay = counted(report.entities, "entity stays", "entities stay")
        out.print(f"switch {report.switch}: {counted(report.updates, 'update')} written, {stay}")
