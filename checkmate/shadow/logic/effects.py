"""Effects: actions that a node's state requests, and that `node.Node` carries out in order."""

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
    """Close a hold's streams, and open new ones that receive from its `joined` on."""

    hold: HoldState
    incarnation: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Discard a hold's parameters and optimizer state."""

    hold: HoldState


@dataclass(frozen=True, slots=True)
class Close:
    """Close a hold for good."""

    hold: HoldState


@dataclass(frozen=True, slots=True)
class Release:
    """End one reservation of an iteration, on all holds."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Log:
    """Log a message, at a level of `logging`."""

    level: int
    message: str


Effect = Connect | Join | Empty | Close | Release | Log
