"""A job goes on with another mesh, from what the shadow nodes hold: as from disk, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.units import NOBODY
from tests.support.waiting import wait_until
from tests.training.test_host_copies import LoopbackJob, folder, installed

__all__ = ["folder"]

RANKS_CHANGED: Final = "training restarts with other ranks than before"
MESHES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "ddp-2": (2, {"ranks": 2, "replicas": 2}),
    "ddp-3": (3, {"ranks": 3}),
    "ddp-4": (4, {"ranks": 4, "replicas": 2}),
    "fsdp-2": (2, {"mesh": {"dp_shard": 2}}),
    "fsdp-4": (4, {"mesh": {"dp_shard": 4}}),
    "hsdp-4": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
    "tensor-4": (4, {"mesh": {"dp_shard": 2, "tp": 2}}),
}
"""Ranks, and what a job file says of them, by the script's kind and that number."""


class MeshJob(LoopbackJob):
    """A job whose file is changed between starts."""

    def __init__(self, folder: Path, mesh: str, optimizer: str = "") -> None:
        super().__init__(folder, mesh, **MESHES[mesh][1])
        self._optimizer = optimizer

    def change(self, mesh: str) -> None:
        """Give the job file another mesh."""
        data = yaml.safe_load(self.file.read_text())
        same = {name: data[name] for name in ("job", "copies", "shadow_nodes")}
        self.file.write_text(yaml.safe_dump({**same, **MESHES[mesh][1]}))

    def train_on(self, name: str, mesh: str, iterations: int, checkpoints: Path | None = None) -> None:
        """Train up to an iteration, in a process for each rank."""
        (results := self.folder / name).mkdir()
        os.chown(results, NOBODY, NOBODY)
        ranks, kind = MESHES[mesh][0], mesh.partition("-")[0]
        kind = f"{kind}-{self._optimizer}" if self._optimizer else kind
        self._environment.pop("CHECKMATE_CHECKPOINTS", None)
        if checkpoints is not None:
            self._environment["CHECKMATE_CHECKPOINTS"] = str(checkpoints)
        torchrun = ["torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        script = ["-m", "tests.scripts.any_mesh", kind, str(results), str(iterations)]
        assert self.start(name, *torchrun, *script).wait(120) == 0, self.log(name)

    def check_like_disk(self, mesh: str, iterations: int, checkpoint: Path) -> None:
        """Fail unless the run `from-memory` is that which resumes from a checkpoint, with new nodes."""
        with self.nodes():
            self.train_on("from-disk", mesh, iterations, checkpoint)
        for rank in range(MESHES[mesh][0]):
            assert self.lines("from-memory", rank) == self.lines("from-disk", rank) != []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("ddp-2", "fsdp-2", ""),
        ("ddp-3", "fsdp-2", ""),
        ("ddp-4", "ddp-2", ""),
        ("ddp-2", "hsdp-4", ""),
        ("fsdp-4", "ddp-3", ""),
        ("fsdp-2", "fsdp-4", ""),
        ("hsdp-4", "tensor-4", ""),
        ("tensor-4", "fsdp-2", ""),
        ("ddp-4", "ddp-2", "soap"),
        ("ddp-2", "fsdp-4", "lion"),
    ],
)
def test_another_mesh_resumes_from_memory_as_from_disk(
    folder: Path, before: str, after: str, optimizer: str
) -> None:
    installed(optimizer)
    job = MeshJob(folder, before, optimizer)
    with job.nodes():
        job.train_on("first", before, 6)
        job.command("consolidate", str(job.file), "--format", "torch", "--out", str(folder / "on-disk"))
        job.change(after)
        job.train_on("from-memory", after, 10)
        assert "resumed from the shadow nodes' state of" in job.log("from-memory")
        assert "training begins without" not in job.log("from-memory")
        nodes = json.loads(job.command("status", "--json").stdout)["nodes"]["mine"].values()
        assert {(hold["live"], hold["stepped"]) for node in nodes for hold in node["holds"]} == {(True, 9)}
        job.train_on("again", after, 12)
        assert "resumed from the shadow nodes: iteration 10 comes next" in job.log("again")
        for node in range(2):
            log = job.log(f"shadow{node}")
            assert log.count(RANKS_CHANGED) == log.count("the job has all shards again") == 1
            assert "Traceback" not in log
    job.check_like_disk(after, 10, folder / "on-disk")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_start_that_ends_before_its_first_iteration_loses_nothing(folder: Path) -> None:
    """Nodes have filled their new holds by themselves, and got the record apart from seeds."""
    job = MeshJob(folder, "fsdp-2")
    with job.nodes():
        job.train_on("first", "fsdp-2", 6)
        job.command("consolidate", str(job.file), "--format", "torch", "--out", str(folder / "on-disk"))
        job.change("ddp-3")
        job.train_on("nothing", "ddp-3", 6)
        job.train_on("from-memory", "ddp-3", 9)
        assert "resumed from the shadow nodes' state of 2 DP groups of 1 rank" in job.log("from-memory")
    job.check_like_disk("ddp-3", 9, folder / "on-disk")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_without_the_new_job_file_is_named(folder: Path) -> None:
    """Nothing is lost: with the file as it was, training goes on."""
    job = MeshJob(folder, "ddp-2")
    with job.nodes():
        job.train_on("first", "ddp-2", 4)
        original = job.file
        job.file = folder / "new.yaml"  # of trainers alone
        job.file.write_text(original.read_text())
        job.change("ddp-3")
        job._environment["CHECKMATE_JOB"] = str(job.file)
        with pytest.raises(AssertionError, match="its job file has 1 DP group of 2 ranks, but the job now"):
            job.train_on("refused", "ddp-3", 6)
        assert "To go on with other ranks, copy the job file to the hosts of all shadow nodes" in job.log(
            "refused"
        )
        job.file = original
        job._environment["CHECKMATE_JOB"] = str(original)
        job.train_on("second", "ddp-2", 6)
        assert "resumed from the shadow nodes: iteration 4 comes next" in job.log("second")
    wait_until(lambda: len(job.lines("second", 0)) == 3, "all iterations")
