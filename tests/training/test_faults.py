"""Ranks are killed at every point of an iteration, in real labs: training continues bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.training import faulty
from topologies.training.orders import Kill

pytestmark = faulty.marks


@pytest.mark.parametrize(
    "kill",
    [
        *(
            pytest.param(kill, marks=pytest.mark.slow)  # quick: tests/training/test_lab.py
            for kill in (
                Kill(2, 12, "all-gather"),
                Kill(1, 12, "forward"),
                Kill(2, 12, "reduce-scatter"),
                Kill(0, 12, "reduce-scatter", bucket=0),
                Kill(0, 12, "all-gather", bucket=4),
                Kill(3, 12, "all-gather", bucket=2),
                Kill(3, 12, "all-gather", bucket=3),
                Kill(0, 12, "before the step"),
                Kill(2, 12, "before the step"),
                Kill(3, 12, "after the step"),
                Kill(1, 0, "all-gather"),
            )
        ),
    ],
    ids=lambda kill: f"rank{kill.rank}-{kill.iteration}-{kill.phase}-{kill.bucket}".replace(" ", "_"),
)
def test_a_rank_is_killed(name: str, tmp_path: Path, kill: Kill) -> None:
    with faulty.job(name, tmp_path, kill) as run:
        outcome = faulty.check(run, repeated=1)
    (recovery,) = outcome.record.recoveries()
    assert (recovery.rank, recovery.iteration, recovery.phase) == (kill.rank, kill.iteration, kill.phase)
    # An iteration's record is sent in the next forward: the last one may have died with the rank.
    assert kill.iteration - 1 <= recovery.resumed_with <= kill.iteration + 1


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_two_ranks_are_killed_within_two_seconds(name: str, tmp_path: Path, after: float) -> None:
    """The second dies while the first one's kernel still sends, processes end, or they restart."""
    with faulty.job(name, tmp_path, Kill(3, 12, "all-gather", bucket=4)) as run:
        run.until(lambda: _killed(run), "the first to die")
        time.sleep(after)
        run.crew.kill_children(run.training.ranks["rank0"])
        outcome = faulty.check(run, repeated=1)
    assert [r.iteration for r in outcome.record.recoveries()] == [12]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_is_killed_again_when_it_has_restored(name: str, tmp_path: Path, rank: int) -> None:
    kills = (Kill(2, 12, "reduce-scatter"), Kill(rank, 12, "restore", attempt=1))
    with faulty.job(name, tmp_path, *kills) as run:
        outcome = faulty.check(run, repeated=1)
    assert {e.more["phase"] for es in outcome.record.events.values() for e in es if e.name == "killed"} == {
        "reduce-scatter",
        "restore",
    }


@pytest.mark.slow
def test_all_is_restored_every_second_iteration(name: str, tmp_path: Path) -> None:
    """Twenty times, from models filled with noise: the run equals the undisturbed one, bit for bit."""
    with faulty.job(name, tmp_path, script="tests.scripts.restoring") as run:
        outcome = faulty.check(run)
    assert outcome.record.repeated == {}
    restored = [e.more["iteration"] for e in outcome.record.events[3] if e.name == "restored"]
    assert restored == list(range(0, faulty.ITERATIONS, 2))


def _killed(run: faulty.Faulty) -> bool:
    return any(event.name == "killed" for event in run.training.record().events[3])
