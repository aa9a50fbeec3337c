"""One rank that trains sharded twins (HSDP) in turns, as in `benchmarks.training.twins`, each over its ring.

The options are those of `checkmate.examples.hsdp`: --iterations is the number of timed turns, and --seed
rotates the order in which twins are created.
"""

from __future__ import annotations

import torch.distributed as dist

import checkmate
from benchmarks.training.twins import race
from checkmate.examples import hsdp


def main() -> None:
    """Train all, and write the time of each turn to --out."""
    options = hsdp.parse()
    device = hsdp.device_of(options.device)
    dist.init_process_group(hsdp.backend_of(device))
    mesh = checkmate.shard_mesh(device.type)
    race(options, lambda: hsdp.Trainer(options, device, mesh))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
