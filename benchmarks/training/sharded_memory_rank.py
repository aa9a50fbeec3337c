"""One rank that trains a sharded GPT, and measures its memory.

CHECKMATE_BENCH_MESH says how replicas are averaged: by Checkmate (`job`), or by FSDP itself (`native`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import checkmate
from checkmate.examples import hsdp
from testbed.process_memory import peak_resident, resident

MESH: Final = "CHECKMATE_BENCH_MESH"
_WARM_UP: Final = 3


def main() -> None:
    """Train, and write this rank's memory in bytes to --out."""
    options = hsdp.parse()
    device = hsdp.device_of(options.device)
    dist.init_process_group(hsdp.backend_of(device))
    trainer = hsdp.Trainer(options, device, _mesh(device.type))
    peaks, rests = [], []
    with contextlib.ExitStack() as stack:
        mark = _protect(trainer, stack) if os.environ[MESH] == "job" else lambda: None
        for iteration in range(options.iterations):
            Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
            trainer.step()
            mark()
            if iteration >= _WARM_UP:
                peaks.append(peak_resident())
                rests.append(resident())
        local = sum(parameter.to_local().nbytes for parameter in trainer.model.parameters())
    memory = {"peak": peaks, "rest": rests, "buckets": local}
    Path(options.out, f"rank{dist.get_rank()}.memory.json").write_text(json.dumps(memory))
    dist.destroy_process_group()


def _mesh(device_type: str) -> DeviceMesh:
    if os.environ[MESH] == "job":
        return checkmate.shard_mesh(device_type)
    return init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def _protect(trainer: hsdp.Trainer, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Have shadow nodes follow until `stack` ends; return what marks the end of an iteration."""
    model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
    checkmate.restore(model, optimizer, scheduler=scheduler)
    return stack.enter_context(checkmate.protect(model, optimizer, scheduler=scheduler)).mark


if __name__ == "__main__":
    main()
