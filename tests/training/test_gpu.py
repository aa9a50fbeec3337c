"""Training on a GPU in a lab, killed and resumed from the shadow nodes' CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.labs.made import on_one_switch
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


def trained(folder: Path, kills: tuple[Kill, ...]) -> tuple[JobRecord, dict[str, torch.Tensor]]:
    """Train two ranks; return the record and the final parameters."""
    plan = JobPlan(("--iterations", str(ITERATIONS), "--device", "cuda"), kills=kills, restarts=len(kills))
    with training_lab(build("gpu", on_one_switch(2, (1, 1))), "softswitch", "testgpu", plan, folder) as job:
        start_all([job])
        job.finish(200, lambda: None)
        return job.record(), torch.load(folder / "final.pt", map_location="cpu")["model"]


def test_a_killed_training_goes_on_where_it_was(tmp_path: Path) -> None:
    """A GPU's own sums differ in the last bits from run to run, and training makes such differences grow."""
    whole, expected = trained(tmp_path / "whole", ())
    resumed, found = trained(tmp_path / "resumed", (Kill(1, 10, "before the step"),))
    assert sorted(resumed.curve) == list(range(ITERATIONS))
    assert len(resumed.repeated) <= 1
    assert resumed.curve == pytest.approx(whole.curve, rel=1e-3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)
