"""Hypothesis strategies for jobs."""

from __future__ import annotations

from hypothesis import strategies as st

from checkmate.job.schema import Job
from testbed.jobs import job


@st.composite
def lists_of_jobs(draw: st.DrawFn, most: int = 3) -> list[Job]:
    """Return one to `most` jobs that can share a fabric."""
    switches = draw(st.integers(1, 3))
    jobs = []
    for number in range(draw(st.integers(1, most))):
        nodes = draw(st.integers(1, 3))
        jobs.append(
            job(
                f"job{number}",
                groups=draw(st.integers(1, 2)),
                ranks=draw(st.integers(2, 4)),
                nodes=nodes,
                nics=draw(st.integers(1, 2)),
                channels=draw(st.integers(1, 3)),
                replicas=draw(st.integers(1, nodes)),
                switches=switches,
                number=number,
                further=draw(st.integers(0, 2)),
                shared=draw(st.booleans()),
                collective=draw(st.sampled_from(["ring", "tree"])),
            )
        )
    return jobs
