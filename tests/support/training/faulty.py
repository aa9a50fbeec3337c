"""Small training jobs in labs with failures, and the same job undisturbed, for comparison."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.dying_shadow import STOPPED
from topologies.crew import Crew, LabController, serving
from topologies.describe.job_files import Target
from topologies.describe.topology import Topology, load
from topologies.lab import Lab
from topologies.training.job import SCRIPT, JobPlan, TrainingJob
from topologies.training.orders import Kill
from topologies.training.record import JobRecord
from topologies.training.verdict import differences, leaves

ITERATIONS = 40
SMALL = (
    *("--layers", "1", "--width", "64", "--heads", "2"),
    *("--context", "32", "--batch", "1", "--bucket-mb", "0.05"),
)
"""Five buckets in two shards, with iterations of about a tenth of a second."""
TINY = ("--layers", "1", "--width", "16", "--heads", "1", "--context", "16", "--batch", "1")
"""For switches that take a second for 35 kB."""
SECONDS = 100.0

marks = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(400),
]


@dataclass(frozen=True)
class Finished:
    """The results of a job: its ranks' records, and the parameters and optimizer state that rank 0 saved."""

    record: JobRecord
    state: dict[str, object]


class Faulty:
    """A job in a lab, with the parts that tests may break."""

    def __init__(
        self, lab: Lab, crew: Crew, controller: LabController, training: TrainingJob, shape: tuple[str, ...]
    ) -> None:
        self.lab = lab
        self.crew = crew
        self.controller = controller
        self.training = training
        self.shape = shape

    def until(self, condition: Callable[[], bool], event: str, seconds: float = SECONDS) -> None:
        """Wait for a condition; failures meanwhile are quoted."""
        self.crew.wait(condition, event, seconds)

    def train(self, iterations: int) -> None:
        """Let the ranks train up to this iteration, and wait until they are there."""
        self.training.let(iterations)
        self.training.await_iterations(iterations, SECONDS)

    def pause(self, seconds: float) -> None:
        """Wait, and check that nothing fails meanwhile."""
        end = time.monotonic() + seconds
        self.crew.wait(lambda: time.monotonic() > end, "time to pass", seconds + 1)

    def await_iteration(self, iteration: int) -> None:
        """Wait until training has reached this iteration."""
        self.until(lambda: self.training.next_iteration() >= iteration, f"iteration {iteration}")

    def await_stopped(self, node: int) -> None:
        """Wait until a `dying_shadow` has stopped at its point."""
        member = self.training.shadows[f"shadow{node}"]
        self.until(lambda: STOPPED in member.output_text(), f"shadow{node} to stop")

    def starts(self, rank: int) -> int:
        """Return the number of starts of a rank."""
        return sum(event.name == "started" for event in self.training.record().events[rank])

    def hold(self, node: int) -> dict[str, Any]:
        """Return a shadow node's status of its only hold, once it has told of it: it does so each second."""
        self.until(lambda: bool(self.training.status(node).get("holds")), f"a hold of shadow{node}")
        (hold_status,) = self.training.status(node)["holds"]
        return dict(hold_status)

    def stepped(self, node: int) -> int:
        """Return the last iteration that a shadow node has stepped in all of its holds; -1 without any."""
        holds = self.training.status(node).get("holds", [])
        return min((int(hold["stepped"]) for hold in holds), default=-1)

    def live(self, node: int) -> bool:
        """Return whether a shadow node's hold is live."""
        holds = self.training.status(node).get("holds", [])
        return bool(holds) and all(hold["live"] for hold in holds)

    def finish(self) -> Finished:
        """Let the job train to its end."""
        self.training.let(ITERATIONS)
        self.training.finish(SECONDS)
        return Finished(self.training.record(), self.training.state())


@contextlib.contextmanager
def job(
    name: str,
    folder: Path,
    *kills: Kill,
    gated: bool = False,
    reduce: Any = "checkmate",
    topology: str | Topology = "single_tor",
    target: Target = "softswitch",
    shape: tuple[str, ...] = SMALL,
    loss: float = 0.0,
    copy_loss: float = 0.0,
    jitter: float = 0.0,
    script: str = SCRIPT,
    shadow_options: tuple[str, ...] = (),
    shadow_programs: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Faulty]:
    """Yield a job whose ranks are ready to train, or already train if it is not `gated`."""
    plan = JobPlan(
        ("--iterations", str(ITERATIONS), *shape),
        script,
        kills=kills,
        gated=gated,
        reduce=reduce,
        shadow_options=shadow_options,
    )
    described = load(topology) if isinstance(topology, str) else topology
    with (
        Lab(described, target, name=name, loss=loss, copy_loss=copy_loss, jitter=jitter) as lab,
        Crew(lab) as crew,
        serving(crew) as controller,
    ):
        training = TrainingJob(crew, plan, folder)
        if reduce == "checkmate":
            training.start_shadow_nodes(shadow_programs)
        training.start()
        training.await_ready(SECONDS)
        try:
            yield Faulty(lab, crew, controller, training, shape)
        except BaseException:
            training.keep_logs()
            raise


@functools.cache
def undisturbed(shape: tuple[str, ...] = SMALL) -> Finished:
    """Return the results of the same job over the same ring without tags and shadow nodes; it is cached."""
    with (
        tempfile.TemporaryDirectory() as folder,
        job(f"u{os.getpid()}", Path(folder), reduce="untagged", shape=shape) as run,
    ):
        return run.finish()


def same(outcome: Finished, shape: tuple[str, ...] = SMALL) -> None:
    """Check that all losses and the final state equal the undisturbed job's."""
    reference = undisturbed(shape)
    assert outcome.record.losses == reference.record.losses
    assert not outcome.record.changed_when_repeated
    assert set(outcome.record.digests.values()) == set(reference.record.digests.values())
    assert sorted(outcome.record.digests) == [0, 1, 2, 3]
    assert len(leaves(outcome.state)) > 20
    assert differences(outcome.state, reference.state) == []


def check(run: Faulty, repeated: int = 0) -> Finished:
    """Train to the end; compare with the undisturbed job, and the shadow nodes with the trainers.

    At most `repeated` completed iterations were repeated.
    """
    outcome = run.finish()
    same(outcome, run.shape)
    assert sum(count - 1 for count in outcome.record.repeated.values()) <= repeated
    nodes = range(len(run.lab.topology.shadow_nodes))
    last = ITERATIONS - 1
    run.until(lambda: all(run.stepped(node) == last for node in nodes), "shadow nodes at the end", 20)
    assert differences(run.training.consolidated(last), outcome.state) == []
    return outcome
