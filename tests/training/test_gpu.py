"""Training on a GPU in a lab, killed and resumed from the shadow nodes' CPUs. The ranks share the GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.labs.made import on_one_switch
from tests.support.training import lab as training_labs
from tests.support.training.lab import LabRun, equal
from tests.support.training.orders import ScriptOrders
from topologies.describe.topology import build
from topologies.training.job import JobPlan, start_all, training_lab
from topologies.training.orders import Kill
from topologies.training.record import JobRecord

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gradients on a GPU need a CUDA device"),
    pytest.mark.timeout(300),
]

ITERATIONS = 20


def trained(
    collective: str, folder: Path, kills: tuple[Kill, ...]
) -> tuple[JobRecord, dict[str, torch.Tensor]]:
    """Train two ranks; return the record and the final parameters."""
    plan = JobPlan(("--iterations", str(ITERATIONS), "--device", "cuda"), kills=kills, restarts=len(kills))
    topology = build("gpu", on_one_switch(2, (1, 1), channels=2) | {"collective": collective})
    with training_lab(topology, "softswitch", f"testgpu{collective}", plan, folder) as job:
        start_all([job])
        try:
            job.finish(200, lambda: None)
        finally:
            job.keep_logs()
        assert not any("not tagged" in rank.complaints() for rank in job.ranks.values())
        return job.record(), torch.load(folder / "final.pt", map_location="cpu")["model"]


@pytest.mark.parametrize("collective", ["ring", "nccl"])
def test_a_killed_training_goes_on_where_it_was(collective: str, tmp_path: Path) -> None:
    """A GPU's own sums differ in the last bits from run to run, and training makes such differences grow."""
    whole, expected = trained(collective, tmp_path / "whole", ())
    resumed, found = trained(collective, tmp_path / "resumed", (Kill(1, 10, "before the step"),))
    assert sorted(resumed.curve) == list(range(ITERATIONS))
    assert len(resumed.repeated) <= 1
    assert resumed.curve == pytest.approx(whole.curve, rel=1e-3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("collective", ["ring", "nccl"])
def test_a_loss_scaler_is_restored(collective: str, tmp_path: Path) -> None:
    """Iteration 3 overflows, so the scaler skips its step and halves the scale."""
    wanted = {"device": "cuda", "amp": True, "autocast": True, "infinite": (3,), "accumulate": 2}
    with training_labs.training_lab(on_one_switch(2, (1, 1), channels=2)) as lab:
        if collective == "nccl":
            lab.use_nccl()

        def train(name: str, kill_at: int | None = None, **more: Any) -> LabRun:
            orders = ScriptOrders(str(tmp_path / name), iterations=8, pause=0.1, **{**wanted, **more})
            return lab.train(orders, kill_at=kill_at)

        whole = train("whole", restore=False)
        completed = max(train("killed", 5, restore=False).losses(0))
        resumed = train("killed", seed=99)
        assert resumed.resumed() >= completed
        for rank in range(2):
            assert resumed.losses(rank) == pytest.approx(whole.losses(rank), rel=1e-3, nan_ok=True)
        found, expected = resumed.state(0), whole.state(0)
        for part in ("scaler", "scheduler", "random", "python", "numpy", "sampler"):
            assert equal(found[part], expected[part])
        for name, tensor in expected["model"].items():
            torch.testing.assert_close(found["model"][name], tensor, rtol=1e-2, atol=1e-3)
        assert all("not tagged" not in rank.complaints() for rank in lab.ranks)
