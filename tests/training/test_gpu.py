"""Training on a GPU in a lab, killed and resumed from the shadow nodes' CPUs. The ranks share the GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import variables
from tests.support.labs.made import on_one_switch
from tests.support.training import lab as training_labs
from tests.support.training.lab import LabRun, equal
from tests.support.training.orders import ScriptOrders
from topologies.describe.topology import build
from topologies.training.job import SCRIPT, JobPlan, start_all, training_lab
from topologies.training.orders import Kill
from topologies.training.record import JobRecord

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gradients on a GPU need a CUDA device"),
    pytest.mark.timeout(300),
]

ITERATIONS = 20


PAIR = on_one_switch(2, (1, 1), channels=2)
HSDP = {
    "title": "two replicas in two shards, each rank on a host of its own",
    "switches": ["tor"],
    "mesh": {"dp_replicate": 2, "dp_shard": 2},
    "hosts": [["tor"]] * 4,
    "gpus_per_host": 1,
    "shadow_nodes": [["tor"]] * 2,
    "channels": 2,
}
"""NCCL refuses two ranks of a host on one GPU, so hosts have one each."""


def trained(
    name: str, lab: dict[str, Any], script: tuple[str, ...], folder: Path, kills: tuple[Kill, ...]
) -> tuple[JobRecord, dict[str, torch.Tensor]]:
    """Train a lab's ranks; return the record and the final parameters."""
    nccl = variables(shared_object()) if lab["collective"] == "nccl" else {}
    module, *options = script
    arguments = ("--iterations", str(ITERATIONS), "--device", "cuda", *options)
    plan = JobPlan(arguments, module, kills=kills, restarts=len(kills), environment=nccl)
    with training_lab(build("gpu", lab), "softswitch", f"testgpu{name}", plan, folder, pinned=False) as job:
        start_all([job])
        try:
            job.finish(200, lambda: None)
        finally:
            job.keep_logs()
        assert not any("not tagged" in rank.error_text() for rank in job.ranks.values())
        return job.record(), torch.load(folder / "final.pt", map_location="cpu")["model"]


@pytest.mark.parametrize(
    ("name", "lab", "script"),
    [
        ("ring", PAIR | {"collective": "ring"}, (SCRIPT,)),
        ("nccl", PAIR | {"collective": "nccl"}, (SCRIPT,)),
        ("hsdpring", HSDP | {"collective": "ring"}, ("checkmate.examples.hsdp",)),
        ("hsdpnccl", HSDP | {"collective": "nccl"}, ("checkmate.examples.hsdp",)),
        ("offload", HSDP | {"collective": "ring"}, ("checkmate.examples.hsdp", "--offload")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_killed_training_goes_on_where_it_was(
    name: str, lab: dict[str, Any], script: tuple[str, ...], tmp_path: Path
) -> None:
    """A GPU's own sums differ in the last bits from run to run, and training makes such differences grow."""
    whole, expected = trained(name, lab, script, tmp_path / "whole", ())
    resumed, parameters = trained(name, lab, script, tmp_path / "resumed", (Kill(1, 10, "before the step"),))
    assert sorted(resumed.curve) == list(range(ITERATIONS))
    assert len(resumed.repeated) <= 1
    assert resumed.curve == pytest.approx(whole.curve, rel=1e-3)
    for parameter, tensor in expected.items():
        torch.testing.assert_close(parameters[parameter], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("collective", ["ring", "nccl"])
def test_a_loss_scaler_is_restored(collective: str, tmp_path: Path) -> None:
    """Iteration 3 overflows, so the scaler skips its step and halves the scale."""
    options = {"device": "cuda", "amp": True, "autocast": True, "infinite": (3,), "accumulate": 2}
    with training_labs.training_lab(PAIR) as lab:
        if collective == "nccl":
            lab.use_nccl()

        def train(name: str, kill_at: int | None = None, **more: Any) -> LabRun:
            orders = ScriptOrders(str(tmp_path / name), iterations=8, pause=0.1, **{**options, **more})
            return lab.train(orders, kill_at=kill_at)

        whole = train("whole", restore=False)
        lab.reset()
        completed = max(train("killed", 5, restore=False).losses(0))
        resumed = train("killed", seed=99)
        assert resumed.resumed() >= completed
        for rank in range(2):
            assert resumed.losses(rank) == pytest.approx(whole.losses(rank), rel=1e-3, nan_ok=True)
        resumed_state, expected = resumed.state(0), whole.state(0)
        for part in ("scaler", "scheduler", "random", "python", "numpy", "sampler"):
            assert equal(resumed_state[part], expected[part])
        for name, tensor in expected["model"].items():
            torch.testing.assert_close(resumed_state["model"][name], tensor, rtol=1e-2, atol=1e-3)
        assert all("not tagged" not in rank.error_text() for rank in lab.ranks)
