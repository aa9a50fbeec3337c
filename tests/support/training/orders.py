"""What `training_script` is told, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ScriptOrders:
    """A training run. `kills`: (rank, iteration) pairs: it dies by SIGKILL as that iteration begins.

    `open_end`: it goes on until the file `end` in its folder names the number of iterations.
    `keep_each`: it saves what it has after each iteration, and what it has restored. `plain`: it leaves the
    closing of the protection to the interpreter's exit. `fail_at`: it raises as that iteration begins.
    `workers`: a DataLoader forks so many in each iteration. `frozen_mb`: of a parameter without gradient.
    `turned`: `OddShapes` beside the layers, in the memory formats that it names.
    """

    folder: str
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
    fresh: bool = False
    checkpoints: str | None = None
    only_restore: bool = False
    keep_each: bool = False
    plain: bool = False
    fail_at: int | None = None
    restore: bool = True
    workers: int = 0
    frozen_mb: int = 0
    turned: tuple[str, ...] = ()
    open_end: bool = False

    def write(self, file: Path) -> Path:
        """As `read` takes it."""
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def read(cls, file: Path) -> ScriptOrders:
        """What `write` wrote."""
        return cls(**json.loads(file.read_text()))
