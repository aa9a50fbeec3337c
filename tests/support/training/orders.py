"""Orders for `tests.scripts.training`, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ScriptOrders:
    """A training run.

    Attributes:
        kills: (rank, iteration) pairs; the rank kills itself when that iteration begins.
        open_end: Whether it continues until the file `end` in its folder has the number of iterations.
        keep_each: Whether it saves its state after each iteration, and the restored state.
        plain: Whether the protection is closed by the interpreter's exit.
        fail_at: It raises an error when that iteration begins.
        workers: Number of processes that a DataLoader forks in each iteration.
        frozen_mb: Size of a parameter without gradient.
        nccl: A release of NCCL, of which a double reduces gradients, such as 2.29.
        sharded: Whether `fully_shard` shards the model, over the job's DP groups, instead of DDP.
        together: Whether all DP groups train one model.
        tensor: Whether tensor parallelism splits the model over the DP groups, before `fully_shard` does.
        narrow: Whether a sharded model's parameters are bf16, and their gradients fp32.
        turned: `OddShapes` beside the layers, in these memory formats.
    """

    folder: str
    device: str = "cpu"
    iterations: int = 12
    layers: int = 3
    width: int = 64
    batch: int = 4
    dropout: float = 0.1
    batch_norm: bool = True
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    bucket_mb: float = 0.02
    accumulate: int = 1
    together: bool = False
    autocast: bool = False
    amp: bool = False
    infinite: tuple[int, ...] = ()
    clip: float = 0.5
    seed: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    kills: tuple[tuple[int, int], ...] = ()
    pause: float = 0.0
    wait: float = 30.0
    timeout: float = 30.0
    checkpoints: str | None = None
    only_restore: bool = False
    keep_each: bool = False
    plain: bool = False
    fail_at: int | None = None
    restore: bool = True
    workers: int = 0
    frozen_mb: int = 0
    nccl: str = ""
    sharded: bool = False
    tensor: bool = False
    narrow: bool = False
    turned: tuple[str, ...] = ()
    open_end: bool = False

    def write(self, file: Path) -> Path:
        """Write the orders for `read`."""
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def read(cls, file: Path) -> ScriptOrders:
        """Return the orders that `write` wrote."""
        return cls(**json.loads(file.read_text()))
