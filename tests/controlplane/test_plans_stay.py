"""Plans of jobs whose ranks have a host each are the ones of earlier versions, entry by entry.

tests/data/plans.json has the digests. `python -m tests.controlplane.test_plans_stay` renews them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checkmate.job.files import read_job
from checkmate.job.schema import Job
from controlplane import plan as planning
from controlplane.plan import SwitchPlan
from testbed.jobs import job
from topologies.describe import job_files
from topologies.describe.topology import load, names

FILE = Path(__file__).parents[1] / "data" / "plans.json"
EARLIER = ("paper_testbed", "single_tor", "two_stages", "two_tor")
"""The labs of that time."""


def test_plans_are_as_they_were() -> None:
    assert set(EARLIER) <= set(names())
    with tempfile.TemporaryDirectory() as folder:
        assert digests(Path(folder)) == json.loads(FILE.read_text())


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each switch's entries, groups and streams, by job and switch."""
    return {
        f"{name} {switch}": digest(plan)
        for name, job in jobs(folder)
        for switch, plan in planning.plan([job]).items()
    }


def jobs(folder: Path) -> Iterator[tuple[str, Job]]:
    for name in EARLIER:
        for file, text in job_files.files(load(name), name, "softswitch").items():
            folder.joinpath(file).write_text(text)
        yield name, read_job(folder / job_files.JOB_FILE)
    yield "groups", job(groups=3, ranks=4, nodes=3, channels=2, replicas=2, switches=2, further=1)
    yield "pair", job(groups=2, ranks=2, nodes=2, nics=1)


def digest(plan: SwitchPlan) -> str:
    streams = [
        (key, s.boundary.job, s.boundary.number, s.channel, s.shadow_id, s.node.id, str(s.nic.ip))
        for key, s in plan.streams.items()
    ]
    text = "\n".join([*map(str, plan.holdings), *map(str, streams)])
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(digests(Path(folder)), indent=1) + "\n")
