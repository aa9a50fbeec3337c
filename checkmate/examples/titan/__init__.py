"""torchtitan's own trainer, protected by Checkmate: a small llama on Python's own documentation, on CPUs.

torchtitan 0.3.0 is made for GPUs and PyTorch 2.14. What it lacks on CPUs and with 2.13 is put in here, before
it is imported, because it asks for the device only then.
"""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def _use_cpus() -> None:
    """Give PyTorch what torchtitan calls. Nothing of it concerns Checkmate."""
    missing: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1),
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
    }
    for name, function in missing.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    if not hasattr(dist, "set_timeout"):  # since PyTorch 2.14
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    # torchtitan divides gradients by its own count of tokens, so FSDP's factor is 1. Gloo can't multiply.
    dist.ReduceOp.PREMUL_SUM = lambda factor: dist.ReduceOp.SUM  # type: ignore[assignment]
    warnings.filterwarnings("ignore", "DTensor .* may not have complete support on cpu|'set_vital'")
    logging.getLogger().setLevel(logging.ERROR)  # torchtitan's own; it warns of the GPU that is not there


_use_cpus()
