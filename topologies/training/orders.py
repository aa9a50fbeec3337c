"""What the driver inside a rank is told, as JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal, get_args

Reduce = Literal["checkmate", "untagged", "gloo"]
Phase = Literal["forward", "reduce-scatter", "all-gather", "before the step", "after the step"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Of an iteration, in order."""


@dataclass(frozen=True)
class Kill:
    """Rank `rank` dies in iteration `iteration`, in this rank's start number `attempt` (0: the first).

    In phase "restore" it dies when it has restored that iteration, before all others have.

    `bucket`: which of Checkmate's buckets is on its way then, where the phase is one of the ring's.
    """

    rank: int
    iteration: int
    phase: Phase | Literal["restore"]
    attempt: int = 0
    bucket: int = 1


@dataclass(frozen=True)
class Orders:
    """For each rank the same.

    `reduce`: what averages gradients: Checkmate, its ring without tags and shadow nodes, or DDP's own.
    `gate`: a file with the number of the first iteration that may not begin yet, and a mode. `events`: a
    folder for `rank{r}.events.jsonl`. `cpus`: where to run from the moment that all is set up. `extension`: a
    module whose `install(driven, ddp, optimizer)` is called then; `driven` tells it iteration and mode.
    """

    module: str
    arguments: tuple[str, ...]
    events: str
    reduce: Reduce = "checkmate"
    gate: str | None = None
    kills: tuple[Kill, ...] = ()
    cpus: tuple[int, ...] | None = None
    extension: str | None = None

    def to_json(self) -> str:
        """As `read` takes it."""
        return json.dumps(asdict(self))


def read(text: str) -> Orders:
    """The orders that `Orders.to_json` wrote."""
    said = json.loads(text)
    kills = tuple(Kill(**kill) for kill in said.pop("kills"))
    cpus = said.pop("cpus")
    arguments = tuple(said.pop("arguments"))
    return Orders(**said, arguments=arguments, kills=kills, cpus=None if cpus is None else tuple(cpus))
