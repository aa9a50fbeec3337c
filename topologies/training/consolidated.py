"""The state that a lab's shadow nodes hold, by `checkmate consolidate`."""

from __future__ import annotations

from typing import Any

import torch

from topologies.controller import CHECKMATE
from topologies.describe.topology import CONTROLLER, LabError
from topologies.training.job import TrainingJob


def state(training: TrainingJob, iteration: int, seconds: float = 60) -> dict[str, Any]:
    """Return parameters and optimizer state (`model`, `optimizer`) after the newest iteration.

    Raises:
        LabError: The newest iteration is not `iteration`, or the state is not available in time.
    """
    file = training.folder / "checkpoint.pt"
    job = str(training.crew.lab.job_file)
    argv = [*CHECKMATE, "consolidate", job, "--out", str(file), "--format", "torch"]
    training.crew.run("consolidate", CONTROLLER, argv, seconds)
    found = torch.load(file, weights_only=True)
    if found["iteration"] != iteration:
        raise LabError(f"the shadow nodes' newest iteration is {found['iteration']}, not {iteration}")
    return {key: found[key] for key in ("model", "optimizer")}
