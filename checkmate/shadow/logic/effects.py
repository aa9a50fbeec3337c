"""What a node's state wants done, in the order in which it is to be done. `node.Node` does it."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.shadow.logic.hold_state import HoldState


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect all streams of a hold."""

    hold: HoldState
    incarnation: int


@dataclass(frozen=True, slots=True)
class Join:
    """Close a hold's streams, and make new ones that take everything from its `joined` on."""

    hold: HoldState
    incarnation: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Forget a hold's parameters and optimizer state."""

    hold: HoldState


@dataclass(frozen=True, slots=True)
class Close:
    """Receive nothing more for a hold."""

    hold: HoldState


@dataclass(frozen=True, slots=True)
class Release:
    """Take one reservation of an iteration back, on all holds."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Log:
    """Say something in the log, at a level of `logging`."""

    level: int
    message: str


Effect = Connect | Join | Empty | Close | Release | Log
