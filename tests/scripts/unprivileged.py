"""A rank that reports its capabilities: `python -m tests.scripts.unprivileged FOLDER`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.base.privileges import effective


def main() -> None:
    """Protect and train two iterations; write what this process and a child of it may do then."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = sorted(capability.name for capability in effective())
    with checkmate.protect(ddp, optimizer) as protection:
        for _ in protection.steps(range(2)):
            ddp(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        child = subprocess.run(
            ["grep", "CapEff", "/proc/self/status"], capture_output=True, text=True, check=True
        )
    again, second_model = "", DistributedDataParallel(nn.Linear(4, 1))
    try:
        checkmate.protect(second_model, torch.optim.SGD(second_model.parameters(), lr=0.1))
    except checkmate.CheckmateError as error:
        again = str(error)
    report = {
        "user": os.geteuid(),
        "before": before,
        "after": sorted(capability.name for capability in effective()),
        "child": int(child.stdout.split()[1], 16),
        "again": again,
    }
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
