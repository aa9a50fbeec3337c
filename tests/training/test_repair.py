"""Copies are lost on their way to shadow nodes: with `lossless: false`, ranks send them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.training import faulty
from topologies.describe.topology import load

pytestmark = [*faulty.marks, pytest.mark.slow]
LOSSY = replace(load("single_tor"), lossless=False)


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_lost_copies_are_sent_again(name: str, tmp_path: Path, share: float) -> None:
    """No shard loses its standing, and all is stepped at the end, the last iteration too."""
    with faulty.job(name, tmp_path, topology=LOSSY, copy_loss=share) as run:
        outcome = faulty.check(run)
        nodes = range(len(run.lab.topology.shadow_nodes))
        assert sum(int(run.hold(node)["repairs"]) for node in nodes) > 0
        for node in nodes:
            text = run.training.shadows[f"shadow{node}"].error_text()
            assert "joins again" not in text

    assert outcome.record.repeated == {}
