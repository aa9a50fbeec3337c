"""Labs without any switch: hosts copy gradients to shadow nodes over a kernel bridge."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import COMMAND
from tests.support.labs.live import needs_root
from tests.support.labs.remains import ROOT, lab_command
from tests.support.training.lab import equal
from topologies.crew import Crew, checkmate, controlled
from topologies.describe.topology import build, load
from topologies.kernel import namespaces
from topologies.lab import Lab
from topologies.training.job import JobPlan, TrainingJob, training_lab
from topologies.training.orders import Kill, Reduce

ITERATIONS, KILLED = 14, 6
EXAMPLES = {
    "ddp_hosts": ("checkmate.examples.gpt.train", ("--layers", "1", "--width", "64", "--heads", "2")),
    "fsdp_hosts": ("checkmate.examples.hsdp", ("--layers", "1", "--width", "64", "--heads", "2")),
    "hsdp": ("checkmate.examples.hsdp", ("--layers", "1", "--width", "64", "--heads", "2", "--both")),
}
"""The example of each lab, and its options."""
REPLICAS: dict[str, Any] = {
    "title": "two replicas in two shards, over which FSDP reduces itself",
    "copies": "host",
    "hosts": 2,
    "gpus_per_host": 2,
    "mesh": {"dp_replicate": 2, "dp_shard": 2},
    "shadow_nodes": 2,
}


def without_compiler(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose PATH leads to no compiler."""
    assert shutil.which("clang", path=str(tmp_path)) is None
    return {"PATH": str(tmp_path)}


def finished(training: TrainingJob) -> dict[str, object]:
    """Train to the end; return rank 0's final state."""
    training.start()
    training.finish(200)
    return training.state()


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(400)  # four ranks start three times
@pytest.mark.parametrize("lab", sorted(EXAMPLES))
def test_a_killed_rank_resumes_bit_for_bit_in(lab: str, name: str, tmp_path: Path) -> None:
    module, options = EXAMPLES[lab]
    arguments = ("--iterations", str(ITERATIONS), *options)

    def plan(reduce: Reduce, *kills: Kill) -> JobPlan:
        return JobPlan(arguments, module, reduce, kills, environment=without_compiler(tmp_path))

    topology = build(lab, REPLICAS) if lab == "hsdp" else load(lab)
    with training_lab(
        topology, "softswitch", f"{name}_u", plan("gloo"), tmp_path / "undisturbed"
    ) as training:
        expected = finished(training)
        reference = training.record()
    killed = plan("checkmate", Kill(3, KILLED, "before the step"))
    with training_lab(topology, "softswitch", f"{name}_k", killed, tmp_path / "killed") as training:
        state = finished(training)
        record = training.record()
        shadow_state = training.consolidated(ITERATIONS - 1)
        assert not training.crew.lab.log("controller").exists()
        assert "copies by hosts" in checkmate(training.crew, "status", training.crew.lab.job_file)
    (recovery,) = record.recoveries()
    assert KILLED - 1 <= recovery.resumed_with <= KILLED
    assert list(record.curve) == list(range(ITERATIONS))
    assert record.losses == reference.losses
    assert not record.changed_when_repeated
    assert sum(count - 1 for count in record.repeated.values()) <= 1
    assert len(record.digests) == len(topology.ranks)
    assert record.digests == reference.digests
    assert equal(state, expected)
    assert equal(shadow_state["model"], state["model"])


@needs_root
def test_a_lab_without_switches_is_up_until_it_is_removed(name: str) -> None:
    with Lab(load("ddp_hosts"), name=name) as lab, Crew(lab) as crew, controlled(crew) as controller:
        assert controller is None and not namespaces.processes(namespaces.of_lab(name))
        listed = json.loads(lab_command("list", "--json").stdout)["labs"]
        (shown,) = (entry for entry in listed if entry["name"] == name)
        assert (shown["target"], shown["up"], shown["topology"]) == (None, True, "ddp_hosts")
        assert re.search(rf"{name} +ddp_hosts +no switch +up", lab_command("list").stdout)
        ping = "import socket; socket.create_connection(('172.31.2.1', 7000), 1)"
        refused = lab_command("exec", name, "host1", "--", "python", "-c", ping)
        assert "Connection refused" in refused.stderr  # the bridge leads there
        outside = subprocess.run(
            [*COMMAND, "status", str(lab.job_file)], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert outside.returncode == 3
        hint = f"outside lab {name}, use checkmate lab exec {name} ctl -- checkmate status"
        assert hint in " ".join(outside.stderr.split())
        namespaces.remove(lab.namespace("shadow1"))
        assert re.search(rf"{name} +ddp_hosts +no switch +left over", lab_command("list").stdout)


@pytest.mark.parametrize(
    "option", [("--loss", "1%"), ("--jitter", "5ms"), ("--mtu", "9000"), ("--target", "bmv2")]
)
def test_what_needs_a_switch_is_refused(option: tuple[str, ...]) -> None:
    result = lab_command("up", "ddp_hosts", *option)
    assert result.returncode == 2
    assert "has neither switches nor training links" in result.stderr


def test_no_rings_run_through_a_lab_without_switches() -> None:
    result = lab_command("run", "ddp_hosts")
    assert result.returncode == 2
    assert "use checkmate lab up ddp_hosts, and then checkmate lab train ddp_hosts" in result.stderr
