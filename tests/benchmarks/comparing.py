"""A small job that a comparator protects, for its tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.checkfreq import CheckFreq
from benchmarks.comparators.flat import FlatState
from benchmarks.comparators.system import CheckpointFolders
from benchmarks.evaluation.systems import COMPARATORS, is_installed, system_of
from topologies.training.verdict import digest

SYSTEMS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not is_installed(name), reason="make comparators has not installed its package"
        ),
    )
    for name in ("none", *COMPARATORS)
]


def train_with_late_copies(
    rank: int, _: int, name: str, folder: str, interval: int, until: int
) -> tuple[int, str]:
    """Train as `train` does, while copies in the background take longer than a forward."""

    def late(copy: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_copy(*args: Any) -> Any:
            time.sleep(0.05)
            return copy(*args)

        return wait_and_copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatState, "read", late(FlatState.read))
        patch.setattr(CheckFreq, "_copy", late(CheckFreq._copy))
        return train(rank, _, name, folder, interval, until)


def train(
    rank: int, _: int, name: str, folder: str, interval: int, until: int, killed: int | None = None
) -> tuple[int, str]:
    """Train up to an iteration. Return the iteration with which it began, and the final state's digest.

    With `killed`, the process kills itself after the optimizer's step of that iteration.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 65), nn.BatchNorm1d(65), nn.ReLU(), nn.Linear(65, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    system = system_of(name, CheckpointFolders(Path(folder, "disk"), Path(folder, f"memory{rank}"), interval))
    system.attach(ddp, optimizer)
    first = system.recover()
    for iteration in range(first, until):
        generator = torch.Generator().manual_seed(1000 * iteration + rank)
        loss = ddp(torch.randn(4, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + iteration)
        optimizer.step()
        system.after_step(iteration)
        if iteration == killed:
            os.kill(os.getpid(), signal.SIGKILL)
    system.close()
    return first, digest([model.state_dict(), optimizer.state_dict()]).hex()
