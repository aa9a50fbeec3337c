"""Orders for the driver inside a rank, as JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal, get_args

Reduce = Literal["checkmate", "untagged", "gloo"]
Phase = Literal["forward", "reduce-scatter", "all-gather", "before the step", "after the step"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""The phases of an iteration, in order."""


@dataclass(frozen=True)
class Kill:
    """Kill of rank `rank` in iteration `iteration`, in this rank's start number `attempt` (0: the first).

    In phase "restore" it is killed when it has restored that iteration, before all others have.
    In the ring's phases, it is killed while it sends Checkmate's bucket `bucket`.
    """

    rank: int
    iteration: int
    phase: Phase | Literal["restore"]
    attempt: int = 0
    bucket: int = 1


@dataclass(frozen=True)
class Orders:
    """Orders, the same for all ranks.

    Attributes:
        reduce: The AllReduce: Checkmate, its ring without tags and shadow nodes, or DDP's own.
        gate: A file with the number of the first iteration that may not begin yet, and a mode.
        events: A folder for `rank{r}.events.jsonl`.
        cpus: The CPUs to use once everything is set up.
        extension: A module whose `install(driven, ddp, optimizer)` is called at that time; `driven` has
            iteration and mode.
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
        """Return the JSON for `read`."""
        return json.dumps(asdict(self))


def read(text: str) -> Orders:
    """Return the orders that `Orders.to_json` wrote."""
    said = json.loads(text)
    kills = tuple(Kill(**kill) for kill in said.pop("kills"))
    cpus = said.pop("cpus")
    arguments = tuple(said.pop("arguments"))
    return Orders(**said, arguments=arguments, kills=kills, cpus=None if cpus is None else tuple(cpus))
