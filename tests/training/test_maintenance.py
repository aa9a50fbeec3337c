"""What operators do while training runs: restart shadow nodes in turn, load the switch's program again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.labs.made import on_one_switch
from tests.support.training import faulty
from tests.support.training.faulty import ITERATIONS, Faulty
from topologies.crew import CHECKMATE
from topologies.describe.topology import CONTROLLER, build

pytestmark = [*faulty.marks, pytest.mark.slow]

REPLICATED = on_one_switch(4, (2, 2), channels=2, replicas=2)


def go_on_while_it_runs(run: Faulty, *command: str | Path) -> None:
    """Run a command, and train slowly until it has ended well: at least one iteration meanwhile."""
    before = run.training.next_iteration()
    member = run.crew.start("operator", CONTROLLER, [*CHECKMATE, *command])
    at = before
    while member.running:
        at = min(run.training.next_iteration() + 1, ITERATIONS - 4)
        run.training.let(at)
        run.pause(0.4)
    run.train(at)
    assert member.process.returncode == 0, member.error_text()
    assert before < run.training.next_iteration() < ITERATIONS - 4


def restored(run: Faulty) -> list[int]:
    events = run.training.record().events[0]
    return [event.more["iteration"] for event in events if event.name == "restored"]


def test_nodes_are_drained_and_restarted_in_turn(name: str, tmp_path: Path) -> None:
    """A rank dies whenever a node is away: the other one has the newest iteration."""
    with faulty.job(name, tmp_path, gated=True, topology=build("replicated", REPLICATED)) as run:
        run.train(5)
        for node in (0, 1):
            run.until(lambda: run.live(0) and run.live(1), "both nodes to be live")
            go_on_while_it_runs(run, "drain", run.lab.job_file, "--id", str(node), "--timeout", "60")
            at = run.training.next_iteration()
            run.crew.kill_children(run.training.ranks[f"rank{node}"])
            run.training.restart_shadow_node(node)
            run.until(lambda node=node: len(restored(run)) == 2 + node, "training to resume")  # type: ignore[misc]
            assert restored(run)[-1] >= at - 1
            while not run.live(node):
                run.train(run.training.next_iteration() + 1)
                run.pause(1.2)  # longer than a node's own interval of one second
        faulty.check(run, repeated=2)


def test_the_switchs_program_is_loaded_again_without_a_gap(name: str, tmp_path: Path) -> None:
    """Training waits meanwhile, nodes lose nothing, and a rank that dies after that resumes from them."""
    with faulty.job(name, tmp_path, gated=True) as run:
        run.train(5)
        shadows = run.training.shadows.values()
        before = [node.error_text() for node in shadows]
        run.controller.stop()
        go_on_while_it_runs(run, "run", "--once", "--load", "--no-view", run.lab.job_file)
        run.controller.restart()
        at = run.training.next_iteration()
        run.until(lambda: all(run.stepped(node) >= at - 1 for node in (0, 1)), "nodes to have followed")
        assert [node.error_text() for node in shadows] == before, "a node has lost copies, for example"
        run.crew.kill_children(run.training.ranks["rank2"])
        run.until(lambda: len(restored(run)) == 2, "training to resume")
        assert restored(run)[-1] >= at - 1
        faulty.check(run, repeated=1)
