"""Whole jobs with copies by hosts: gradients that are changed on their way, and encrypted ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.ports import free_port
from tests.shadow.test_part_streams import Meddler
from tests.support.waiting import wait_until
from tests.training.test_host_copies import ITERATIONS, RANKS, LoopbackJob, folder

__all__ = ["folder"]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
    pytest.mark.timeout(300),
]


def holds(job: LoopbackJob) -> list[dict[str, Any]]:
    nodes = json.loads(job.command("status", "--json").stdout)["nodes"]["mine"]
    return [hold for node in nodes.values() for hold in node["holds"]]


@pytest.mark.slow
def test_a_shard_whose_gradients_were_changed_on_their_way_joins_again(folder: Path) -> None:
    job = LoopbackJob(folder, "ddp", ranks=RANKS)
    port = free_port()
    data = yaml.safe_load(job.file.read_text())
    data["shadow_nodes"][0]["gradients"] = f"127.0.0.1:{port}"
    job.file.write_text(yaml.safe_dump(data))
    meddler = Meddler(port, 100_000)  # in the fourth iteration of one rank
    with job.nodes():
        data["shadow_nodes"][0]["gradients"] = f"127.0.0.1:{meddler.port}"
        job.file.write_text(yaml.safe_dump(data))  # the trainers' job file
        training = job.train("changed", seconds=0.3)
        (job.folder / "changed" / "pause").unlink()
        assert training.wait(120) == 0, job.log("changed")
        wait_until(lambda: all(hold["live"] for hold in holds(job)), "both shards to be live")
        assert {hold["stepped"] for hold in holds(job)} == {ITERATIONS - 1}
    meddler.server.close()
    log = job.log("shadow0")
    assert "the part of iteration 3 does not fit its authentication code" in log
    assert "it joins again at iteration" in log
    assert "does not fit its authentication code" not in job.log("shadow1")
    assert "Traceback" not in log + job.log("shadow1") + job.log("changed")


def test_an_encrypted_job_on_a_way_of_its_own(folder: Path) -> None:
    job = LoopbackJob(
        folder, "alone", ranks=1, encrypt=True, sending={"source": "lo", "limit": "1G", "dscp": 8}
    )
    with job.nodes():
        training = job.train("encrypted")
        (job.folder / "encrypted" / "pause").unlink()
        assert training.wait(120) == 0, job.log("encrypted")
        wait_until(lambda: {hold["stepped"] for hold in holds(job)} == {ITERATIONS - 1}, "all iterations")
        assert all(hold["live"] for hold in holds(job))
    assert "does not take this rank's gradients" not in job.log("encrypted")
    assert "Traceback" not in job.log("shadow0") + job.log("shadow1") + job.log("encrypted")
