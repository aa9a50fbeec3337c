"""The cost of protection for training on a GPU over NCCL, in comparison with DDP over NCCL without Checkmate.

Twins take turns in the same processes (`benchmarks.training.twins`). Two ranks share the GPU, each as a host
of its own, and what both send passes through the embedded switch, which copies tagged segments in software:
the ratio is not a forecast for hardware, so it has no limit.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.figures import Result, Skipped
from benchmarks.training.twin_labs import cost, race
from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import variables
from topologies.describe.topology import build

TITLE: Final = (
    "Iteration time on a GPU: a GPT of 5 million parameters, 256 x 64 bytes per rank, 2 ranks on one GPU"
)
STARTS, TURNS = 2, 100
_LAB: Final = {
    "title": "two ranks that share a GPU",
    "collective": "nccl",
    "channels": 2,
    "switches": ["tor"],
    "dp_groups": [{"ranks": ["tor", "tor"]}],
    "shadow_nodes": [["tor"], ["tor"]],
}
_OPTIONS: Final = ("--device", "cuda", "--batch", "256", "--dropout", "0")
_cost: Final = partial(cost, base="DDP over NCCL", aim=None, floor=None)


def measure() -> list[Result]:
    """Return the cost, if this machine has a GPU."""
    if os.geteuid() != 0:
        return [Skipped("iteration time on a GPU", "needs root, for network namespaces")]
    if not torch.cuda.is_available():
        return [Skipped("iteration time on a GPU", "needs a GPU with CUDA")]
    # NCCL of the twins without Checkmate takes the training network, too, and not the one for management.
    environment = {**variables(shared_object()), "NCCL_SOCKET_IFNAME": "data0"}
    lab = build("gpu", _LAB)
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
        raced = race(
            Path(folder),
            lab,
            "benchmarks.training.twins",
            _OPTIONS,
            STARTS,
            TURNS,
            environment=environment,
            pinned=False,
            results=_cost,
        )
        return _cost(raced, len(lab.ranks))
