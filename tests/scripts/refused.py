"""A rank whose script is refused, and that goes on or ends without a word.

`python -m tests.scripts.refused MODE`, with torchrun's environment. MODE is `caught` (the script catches the
error around each batch) or `unstored` (what `extra` returns after the last iteration can't be stored).
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate

ITERATIONS, CHANGED_AT = 5, 2


def main(mode: str) -> None:
    """Train without closing the protection: it ends with the process."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    extra_state: dict[str, object] = {}
    checkmate.protect(ddp, optimizer, extra=lambda: extra_state)
    for iteration in range(ITERATIONS):
        with contextlib.suppress(RuntimeError) if mode == "caught" else contextlib.nullcontext():
            ddp(torch.ones(3, 4)).sum().backward()
            if mode == "unstored" and iteration == ITERATIONS - 1:
                extra_state["stream"] = sys.intern  # captured with the optimizer's step
            optimizer.step()
            optimizer.zero_grad()
        if mode == "caught" and iteration == CHANGED_AT:
            ddp.module.weight.data.mul_(2)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
