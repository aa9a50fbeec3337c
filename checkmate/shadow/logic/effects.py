"""Effects: actions that a node's state requests, and that `node.Node` carries out in order; and due steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkmate.events.kinds import Occurrence
from checkmate.shadow.logic.group import ShadowGroup
from checkmate.shadow.logic.hold import Hold


class Connect(NamedTuple):
    """Connect all streams of a hold."""

    hold: Hold


class Join(NamedTuple):
    """Close a hold's streams, and open new ones that receive from its `joined` on."""

    hold: Hold


class Empty(NamedTuple):
    """Discard a hold's parameters and optimizer state."""

    hold: Hold


class Close(NamedTuple):
    """Close a hold for good."""

    hold: Hold


class Release(NamedTuple):
    """End one reservation of an iteration, on all holds."""

    iteration: int


class Log(NamedTuple):
    """Log a message, at a level of `logging`, with its event if it tells of one."""

    level: int
    message: str
    event: Occurrence | None = None


Effect = Connect | Join | Empty | Close | Release | Log


@dataclass(frozen=True, slots=True)
class DueStep:
    """A step to do now."""

    group: ShadowGroup
    hold: Hold
    iteration: int
