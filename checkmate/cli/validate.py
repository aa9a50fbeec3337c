"""`checkmate validate`: report every fault of job files at once."""

from __future__ import annotations

from types import MappingProxyType

from checkmate.cli.common import (
    AsJson,
    JobArguments,
    out,
    print_json,
    says_errors,
    set_of,
    switch_extra,
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
) -> None:
    """Check job files: each by itself, against each other, and against the capacity of their switches.

    Every fault is reported with its line, its path in the file and a correction. TLS files of switches
    must be readable on this host. Exit status 2 if there is a fault.

    Example: checkmate validate jobs/gpt.yaml
    """
    switch_extra()
    from checkmate.cli.planning.plan import checked_plan  # noqa: PLC0415

    found = set_of(jobs)
    try:
        loaded, plans = checked_plan(found, unreadable_tls(found))
    except JobError as error:
        raise Invalid(error.faults) from None
    if as_json:
        print_json({"valid": True, "faults": [], "jobs": [job.job for job in loaded]})
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
