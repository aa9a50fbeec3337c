"""Random jobs that restart with other ranks, killed at any moment; and that each seed is one job."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.elastic import draw, trial_of


def test_a_seed_gives_one_job_whose_mesh_changes() -> None:
    jobs = [draw(seed) for seed in range(200)]
    assert jobs == [draw(seed) for seed in range(200)]
    for starts in jobs:
        assert all(before.mesh != after.mesh for before, after in itertools.pairwise(starts))
        assert sum(start.node_at is not None and not start.stopped for start in starts) <= 1
        assert [start.kill_at is None for start in starts] == [False] * (len(starts) - 1) + [True]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 104))
def test_no_state_is_lost_from_mesh_to_mesh(seed: int) -> None:
    with trial_of(seed) as trial:
        assert trial.problems == []
