"""Small training jobs in labs in which something fails, and the same one undisturbed to compare with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.crew import Crew
from topologies.describe import Topology, load
from topologies.lab import Lab
from topologies.orders import Kill
from topologies.serving import Controller, serving
from topologies.training import Plan, Training
from topologies.training_record import Record
from topologies.training_verdict import differences, tensors

ITERATIONS = 40
SMALL = (
    *("--layers", "1", "--width", "64", "--heads", "2"),
    *("--context", "32", "--batch", "1", "--bucket-mb", "0.05"),
)
"""Six buckets in two shards, and a tenth of a second or so an iteration."""
SECONDS = 100.0


@dataclass(frozen=True)
class Finished:
    """What a job left: its ranks' notes, and the parameters and optimizer state that rank 0 saved."""

    record: Record
    state: dict[str, object]


class Faulty:
    """A job that trains in a lab, and the parts of it that a test may break."""

    def __init__(self, lab: Lab, crew: Crew, controller: Controller, training: Training) -> None:
        self.lab = lab
        self.crew = crew
        self.controller = controller
        self.training = training

    def until(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait for something; what fails meanwhile is quoted."""
        self.crew.wait(condition, what, seconds)

    def train(self, iterations: int, pause: float = 0.0) -> None:
        """Let the ranks train up to here, `pause` seconds between iterations, and wait until they have."""
        done = 0 if pause else iterations
        while pause and done < iterations:
            done = self.training.next_iteration() + 1
            self.training.let(min(done, iterations))
            self.training.await_iterations(min(done, iterations), SECONDS)
            time.sleep(pause)
        self.training.let(iterations)
        self.training.await_iterations(iterations, SECONDS)

    def hold(self, node: int) -> dict[str, Any]:
        """What a shadow node says of its only hold."""
        (one,) = self.training.status(node)["holds"]
        return dict(one)

    def stepped(self, node: int) -> int:
        """The last iteration that a shadow node has stepped."""
        return int(self.hold(node)["stepped"])

    def live(self, node: int) -> bool:
        """Whether a shadow node's hold is seeded, and counts."""
        return all(hold["live"] for hold in self.training.status(node).get("holds", [{"live": False}]))

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
    loss: float = 0.0,
    jitter: float = 0.0,
) -> Iterator[Faulty]:
    """A job whose ranks are ready to train, or train already where it isn't `gated`."""
    plan = Plan(("--iterations", str(ITERATIONS), *SMALL), kills=kills, gated=gated, reduce=reduce)
    described = load(topology) if isinstance(topology, str) else topology
    with (
        Lab(described, name=name, loss=loss, jitter=jitter) as lab,
        Crew(lab) as crew,
        serving(crew) as controller,
    ):
        training = Training(crew, plan, folder)
        if reduce == "checkmate":
            training.start_shadow_nodes()
        training.start()
        training.await_ready(SECONDS)
        yield Faulty(lab, crew, controller, training)


def undisturbed(name: str, folder: Path) -> Finished:
    """The same job over the same ring without tags and shadow nodes, to its end."""
    with job(name, folder, reduce="untagged") as run:
        return run.finish()


def check(run: Faulty, reference: Finished, repeated: int = 0) -> Finished:
    """Train to the end: all losses and the final state are the undisturbed job's, and the shadow nodes'
    checkpoint is the trainers' state. At most `repeated` completed iterations were repeated.
    """
    found = run.finish()
    assert found.record.losses == reference.record.losses
    assert not found.record.changed_when_repeated
    assert set(found.record.digests.values()) == set(reference.record.digests.values())
    assert sorted(found.record.digests) == [0, 1, 2, 3]
    assert len(tensors(found.state)) > 20
    assert differences(found.state, reference.state) == []
    assert sum(count - 1 for count in found.record.repeated.values()) <= repeated
    nodes = range(len(run.lab.topology.shadow_nodes))
    last = ITERATIONS - 1
    run.until(lambda: all(run.stepped(node) == last for node in nodes), "shadow nodes at the end", 20)
    return found
