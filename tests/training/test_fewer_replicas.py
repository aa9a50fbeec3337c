"""A job that goes on with the replicas of its model that are there, and takes the others back."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.units import NOBODY
from tests.support.waiting import wait_until
from tests.training.test_host_copies import LoopbackJob, folder

__all__ = ["folder"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ITERATIONS = 60
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"ranks": 3, "min_replicas": 2},
    "hsdp": {"mesh": {"dp_replicate": 3, "dp_shard": 2}, "min_replicas": 2},
}


class PartialRun:
    """A run of `tests.scripts.fewer_replicas` under one launcher, some of whose hosts seem to be away."""

    def __init__(self, folder: Path, kind: str, *, keep: bool = False) -> None:
        self.job = LoopbackJob(folder, kind, **KINDS[kind], replacement_seconds=2)
        self.results = folder / "out"
        self.results.mkdir()
        os.chown(self.results, NOBODY, NOBODY)
        self._arguments = [kind, str(self.results), str(ITERATIONS), "0.15", *(["keep"] if keep else [])]

    def start(self) -> subprocess.Popen[bytes]:
        script = ["-m", "tests.scripts.fewer_replicas", *self._arguments]
        return self.job.start("train", "checkmate.cli.entry", "launch", "--", *script)

    def lines(self, rank: int) -> list[dict[str, Any]]:
        return self.job.lines("out", rank)

    def away(self, rank: int) -> Path:
        return self.results / f"away-{rank}"

    def lose(self, rank: int) -> None:
        """Kill a rank, and keep its next process from coming."""
        self.away(rank).touch()
        os.kill(self.lines(rank)[-1]["pid"], signal.SIGKILL)

    def await_world(self, size: int) -> None:
        """Wait until this number of ranks train."""
        wait_until(lambda: bool(self.lines(0)) and self.lines(0)[-1]["world"] == size, f"{size} ranks", 60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_without_a_replica_and_takes_it_back(folder: Path, kind: str) -> None:
    run = PartialRun(folder, kind)
    ranks_of_replica = {"ddp": 1, "hsdp": 2}[kind]
    lost = ranks_of_replica  # the first rank of the second replica
    whole = 3 * ranks_of_replica
    with run.job.nodes():
        training = run.start()
        wait_until(lambda: len(run.lines(lost)) > 8, "iterations", 60)
        run.lose(lost)
        run.await_world(whole - ranks_of_replica)
        seen = len(run.lines(0))
        wait_until(lambda: len(run.lines(0)) > seen + 5, "iterations of fewer replicas")
        run.job.command(
            "consolidate", str(run.job.file), "--format", "torch", "--out", str(folder / "partial")
        )
        run.away(lost).unlink()
        run.await_world(whole)
        assert training.wait(60) == 0, run.job.log("train")
    checkpoint = torch.load(next(folder.glob("partial*")), weights_only=True)
    assert checkpoint["present"] == [0, 2]
    log = run.job.log("train")
    assert "training goes on with 2 of 3 replicas of the model" in log
    assert "Traceback" not in log
    for rank in range(whole):
        lines = run.lines(rank)
        iterations = [line["iteration"] for line in lines]
        assert sorted(set(iterations)) == iterations or len(iterations) - len(set(iterations)) == 1
        assert iterations[-1] == ITERATIONS - 1
        replica = rank // ranks_of_replica
        if replica != 1:  # it keeps its process, and what is its own
            assert set(iterations) == set(range(ITERATIONS))
            assert {line["extra"] for line in lines} == {f"rank {rank}"}
            assert len({line["pid"] for line in lines}) == 1
            assert {line["world"] for line in lines} == {whole, whole - ranks_of_replica}


def test_a_rank_that_waits_to_the_end_ends_well(folder: Path) -> None:
    """Another rank of its replica is away. Its process ends with those of the others."""
    run = PartialRun(folder, "hsdp")
    with run.job.nodes():
        training = run.start()
        wait_until(lambda: len(run.lines(2)) > 8, "iterations", 60)
        run.lose(2)
        run.await_world(4)
        ended = "rank 3: training has ended, with the ranks that were there"
        wait_until(lambda: ended in run.job.log("train"), "the end", 60)
        assert run.lines(0)[-1]["iteration"] == ITERATIONS - 1
        training.send_signal(signal.SIGINT)
        training.wait(30)
    assert "Traceback" not in run.job.log("train")
