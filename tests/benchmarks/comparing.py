"""A small job that a comparator protects, for its tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.checkfreq import CheckFreq
from benchmarks.comparators.concurrent import ConcurrentCheckpoints
from benchmarks.comparators.gemini import Gemini, GeminiBlocking
from benchmarks.comparators.saving import DcpAsyncSave, DcpSave, TorchSave
from benchmarks.comparators.system import CheckpointSystem, NoCheckpoints, Place
from topologies.training.verdict import digest

SYSTEMS: dict[str, type[CheckpointSystem]] = {
    system.name: system
    for system in (
        NoCheckpoints,
        TorchSave,
        DcpSave,
        DcpAsyncSave,
        CheckFreq,
        ConcurrentCheckpoints,
        Gemini,
        GeminiBlocking,
    )
}


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
    system = SYSTEMS[name](Place(Path(folder, "disk"), Path(folder, f"memory{rank}"), interval))
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
