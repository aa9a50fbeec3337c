"""`checkmate validate`: report every fault of job files at once."""

from __future__ import annotations

import datetime as dt
from types import MappingProxyType

from rich.text import Text

from checkmate.base.wording import counted
from checkmate.cli.common import (
    AsJson,
    FabricOption,
    JobArguments,
    err,
    out,
    print_json,
    read_job_set,
    show_errors,
)
from checkmate.job import checks, mesh
from checkmate.job.files import JobError
from checkmate.keys.checking import check_files


class Invalid(JobError):
    """The result of `validate` if a file has a fault."""

    data = MappingProxyType({"valid": False})


@show_errors
def validate(
    jobs: JobArguments,
    fabric: FabricOption = None,
    as_json: AsJson = False,
) -> None:
    """Check job files: each by itself, against each other, and against the capacity of their switches.

    Every fault is reported with its line, its path in the file and a correction. Of keys and TLS files, those
    that belong on this host are checked. With --fabric, each job may have only what that file grants it.
    Exit status 2 if there is a fault.

    Example: checkmate validate jobs/gpt.yaml
    """
    from checkmate.cli.planning.plan import check_plan  # noqa: PLC0415

    job_set = read_job_set(jobs, fabric)
    files = check_files(job_set, dt.datetime.now(dt.UTC))
    try:
        loaded, plans = check_plan(job_set, files.faults)
    except JobError as error:
        raise Invalid(error.faults) from None
    notes = [*files.notes, *(note for job in loaded for note in checks.notes(job))]
    for note in notes:
        err.print(Text.assemble(("note:", "yellow"), f" {note}"), soft_wrap=True)
    if as_json:
        data = {"valid": True, "faults": [], "notes": notes, "jobs": [job.job for job in loaded]}
        print_json(data)
        return
    for job in loaded:
        ranks = job.rank_count
        streams = sum(s.boundary.job == job.job for plan in plans.values() for s in plan.streams.values())
        copies = (
            ((job.channels, "channel"), (streams, "stream"))
            if job.copies == "switch"
            else ((job.replicas, "copy of each shard, by hosts", "copies of each shard, by hosts"),)
        )
        has = (
            (len(job.dp_groups), f"DP group{mesh.sizes(job)}", f"DP groups{mesh.sizes(job)}"),
            (ranks, "rank"),
            (len(job.shadow_nodes), "shadow node"),
            *copies,
        )
        out.print(f"{job.job}: valid; {', '.join(counted(*part) for part in has)}")
