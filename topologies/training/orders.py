"""Orders for the driver inside a rank, as JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import TypeAdapter

Reduce = Literal["checkmate", "untagged", "gloo"]
Phase = Literal["forward", "reduce-scatter", "all-gather", "before the step", "after the step"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""The phases of an iteration, in order."""


@dataclass(frozen=True)
class Kill:
    """Kill of rank `rank` in iteration `iteration`, in this rank's start number `attempt` (0: the first).

    In phase "restore" it is killed when it has restored that iteration, before all others have.
    In the ring's phases, it is killed while it sends Checkmate's bucket `bucket`. A process that recovers in
    place has the same start number as before.
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
        extension: A module whose `install(hooks, ddp, optimizer)` is called at that time; `hooks` has
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
        return _ORDERS.dump_json(self).decode()


_ORDERS: Final = TypeAdapter(Orders)


def read(text: str) -> Orders:
    """Return the orders that `Orders.to_json` wrote."""
    return _ORDERS.validate_json(text)
