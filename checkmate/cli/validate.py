"""`checkmate validate`: every fault of job files at once."""

from __future__ import annotations

from checkmate.cli.common import (
    AsJson,
    JobArguments,
    faults_as,
    jobs_of,
    out,
    print_json,
    says_errors,
    switch_extra,
)
from checkmate.jobs import job_files


@says_errors
def validate(jobs: JobArguments, as_json: AsJson = False) -> None:
    """Check job files: each by itself, against each other, and against their switches' capacity.

    Every fault is reported, with its line, its path in the file and what would be right. Exit status 2
    where there is one.

    Example: checkmate validate jobs/gpt.yaml
    """
    switch_extra()
    from checkmate.cli.plan import checked_plan  # noqa: PLC0415

    with faults_as(as_json):
        loaded = jobs_of(jobs)
        plans = checked_plan(loaded, job_files(jobs))
    if as_json:
        print_json({"valid": True, "faults": [], "jobs": [job.job for job in loaded]})
        return
    for job in loaded:
        ranks = sum(len(group.ranks) for group in job.dp_groups)
        count = sum(1 for plan in plans.values() for s in plan.streams.values() if s.boundary.job == job.job)
        out.print(
            f"{job.job}: valid; {len(job.dp_groups)} DP groups, {ranks} ranks, {len(job.shadow_nodes)} shadow"
            f" nodes, {job.channels} channels, {count} streams"
        )
