"""Each example loses a rank, resumes at the right iteration, and ends as if nothing had happened."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from checkmate.examples import complete
from tests.support.labs.made import on_one_switch
from tests.support.training import faulty
from topologies.describe.topology import Topology, build, load
from topologies.torchrun import Starter
from topologies.training.job import JobPlan, training_lab
from topologies.training.orders import Kill
from topologies.training.record import JobRecord
from topologies.training.verdict import differences, leaves

pytestmark = [*faulty.marks, pytest.mark.slow]

ITERATIONS, KILLED = 30, 13
PAIR = build("pair", on_one_switch(2, (1, 1)))


def meshed(name: str, hosts: int, **mesh: int) -> Topology:
    """Return a lab of hosts with two ranks each, and two shadow nodes."""
    topology_data: dict[str, object] = {"title": "two ranks on each host", "switches": ["tor"], "mesh": mesh}
    nics = {"hosts": [["tor"]] * hosts, "gpus_per_host": 2, "shadow_nodes": [["tor"]] * 2}
    return build(name, topology_data | nics)


THREE_REPLICAS = meshed("three_replicas", 3, dp_replicate=3, dp_shard=2)
STAGES = meshed("stages", 4, pp=2, dp_replicate=2, dp_shard=2)
SMALL_GPT = ("--layers", "1", "--width", "64", "--heads", "2", "--context", "32")


def train(name: str, topology: Topology, plan: JobPlan, folder: Path) -> tuple[JobRecord, dict[str, object]]:
    """Train in a new lab; return the ranks' records and the state that rank 0 saved."""
    with training_lab(topology, "softswitch", name, plan, folder) as job:
        job.start()
        job.finish(faulty.SECONDS)
        return job.record(), job.state()


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


@pytest.mark.parametrize(
    ("example", "topology", "options"),
    [
        ("gpt.train", PAIR, SMALL_GPT),
        ("resnet", PAIR, ()),
        ("pipeline", load("two_stages"), ()),
        ("pipeline", STAGES, ("--shard",)),
        ("pipeline", STAGES, ("--shard", "--schedule")),
        ("hsdp", load("hsdp"), ()),
        ("hsdp", THREE_REPLICAS, ("--layers", "1")),
        ("loader", PAIR, ()),
        ("complete", PAIR, ()),
        pytest.param("accelerated", PAIR, (), marks=needs("accelerate")),
        pytest.param("lightning", PAIR, (), marks=needs("lightning")),
        pytest.param(
            "titan.train",
            load("hsdp"),
            (),
            marks=[needs("torchtitan"), pytest.mark.timeout(300)],  # its imports take seconds
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_resumes(
    name: str, tmp_path: Path, example: str, topology: Topology, options: tuple[str, ...]
) -> None:
    lose_a_rank(name, tmp_path, example, topology, options, "torchrun")


@pytest.mark.parametrize(
    ("example", "topology", "options"),
    [
        ("pipeline", load("two_stages"), ()),
        ("pipeline", STAGES, ("--shard",)),
        ("pipeline", STAGES, ("--shard", "--schedule")),
        ("hsdp", load("hsdp"), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_recovers_in_place(
    name: str, tmp_path: Path, example: str, topology: Topology, options: tuple[str, ...]
) -> None:
    lose_a_rank(name, tmp_path, example, topology, options, "launch")


def lose_a_rank(
    name: str, tmp_path: Path, example: str, topology: Topology, options: tuple[str, ...], starter: Starter
) -> None:
    """Train with a kill and without one, and compare."""
    module, arguments = f"checkmate.examples.{example}", ("--iterations", str(ITERATIONS), *options)
    forwards = complete.MICRO if example == "complete" else 1
    kill = Kill(1, forwards * (KILLED + 1) - 1, "before the step")  # it counts forwards
    undisturbed = JobPlan(arguments, module, reduce="untagged")
    reference, expected = train(name, topology, undisturbed, tmp_path / "undisturbed")
    killed = JobPlan(arguments, module, kills=(kill,), starter=starter)
    record, state = train(name, topology, killed, tmp_path / "killed")
    (recovery,) = record.recoveries()
    assert recovery.in_place is (starter == "launch")
    assert KILLED - 1 <= recovery.resumed_with <= KILLED
    resumed = {
        event.more["iteration"]
        for events in record.events.values()
        for event in events
        if event.name == "restored" and event.more["iteration"]
    }
    assert resumed == {recovery.resumed_with}  # on all ranks, of all groups
    assert list(record.curve) == list(range(ITERATIONS))
    assert record.losses == reference.losses
    assert not record.changed_when_repeated
    assert record.digests == reference.digests
    assert len(leaves(state)) > 3
    assert differences(state, expected) == []
    first, last = (
        sum(record.curve[i] for i in indices) for indices in (range(5), range(ITERATIONS - 5, ITERATIONS))
    )
    assert last < first  # it learns
