"""Shadow nodes are killed while training runs: it continues, and they catch up when they are back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.labs.made import on_one_switch
from tests.support.training import faulty
from tests.support.training.faulty import Faulty
from topologies.describe.topology import build

pytestmark = [*faulty.marks, pytest.mark.slow]

REPLICATED = on_one_switch(4, (2, 2), channels=2, replicas=2)


def dying(where: str, iteration: int = 0) -> list[str]:
    return [sys.executable, "-m", "tests.scripts.dying_shadow", where, str(iteration)]


def come_back(run: Faulty, node: int) -> None:
    """Restart a shadow node while training waits, and train slowly until it is live."""
    run.training.restart_shadow_node(node)
    at = run.training.next_iteration()
    while not run.live(node):
        at += 1
        assert at < faulty.ITERATIONS - 2, f"shadow{node} is not live: {run.training.status(node)}"
        run.train(at)
        run.pause(1.2)  # longer than its own interval of one second


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("where", ["receive", "step"])
def test_a_shadow_node_dies_and_comes_back(name: str, tmp_path: Path, where: str, node: int) -> None:
    """Node 0 decides what is committed; node 1 follows."""
    with faulty.job(name, tmp_path, gated=True, shadow_programs={node: dying(where, 8)}) as run:
        run.training.let(14)
        run.await_stopped(node)
        run.crew.kill(run.training.shadows[f"shadow{node}"])
        run.train(14)
        come_back(run, node)
        faulty.check(run)


def test_a_rank_dies_after_a_shadow_node_has_come_back(name: str, tmp_path: Path) -> None:
    with faulty.job(name, tmp_path, gated=True, shadow_programs={1: dying("step", 8)}) as run:
        run.training.let(14)
        run.await_stopped(1)
        run.crew.kill(run.training.shadows["shadow1"])
        run.train(14)
        come_back(run, 1)
        before = run.training.next_iteration()
        run.training.let(before + 4)
        run.await_iteration(before + 2)
        run.crew.kill_children(run.training.ranks["rank1"])
        outcome = faulty.check(run, repeated=1)
    restored = [e.more["iteration"] for e in outcome.record.events[0] if e.name == "restored"]
    assert len(restored) == 2
    assert restored[1] >= before + 1


def test_every_shadow_node_dies_and_training_goes_on(name: str, tmp_path: Path) -> None:
    with faulty.job(name, tmp_path, gated=True) as run:
        run.train(8)
        for member in run.training.shadows.values():
            run.crew.kill(member)
        outcome = run.finish()
    faulty.same(outcome)
    assert outcome.record.repeated == {}


def test_with_two_replicas_a_dead_shadow_node_costs_nothing(name: str, tmp_path: Path) -> None:
    """The other node holds every shard: training resumes from it alone."""
    with faulty.job(name, tmp_path, gated=True, topology=build("replicated", REPLICATED)) as run:
        run.train(8)
        run.crew.kill(run.training.shadows["shadow0"])
        run.training.let(14)
        run.await_iteration(11)
        run.crew.kill_children(run.training.ranks["rank2"])
        outcome = run.finish()
    faulty.same(outcome)
    restored = [e.more["iteration"] for e in outcome.record.events[0] if e.name == "restored"]
    assert restored[1] >= 10


def test_a_shadow_node_dies_while_it_is_restored_from(name: str, tmp_path: Path) -> None:
    """With a second holder of every shard, the job resumes from that one."""
    lab = build("replicated", REPLICATED)
    programs = {0: dying("fetch")}
    with faulty.job(name, tmp_path, gated=True, topology=lab, shadow_programs=programs) as run:
        run.training.let(14)
        run.await_iteration(8)
        run.crew.kill_children(run.training.ranks["rank3"])
        run.await_stopped(0)
        run.crew.kill(run.training.shadows["shadow0"])
        outcome = run.finish()
    faulty.same(outcome)
