"""What is promised, from what happened when. Pure.

A shadow node is *sound* from the moment it was seen live until it may have lost something: it was killed, its
link was down, or copies on the way to it may have been dropped. A crash may cost more than an iteration only
if, between it and the next start, some shard had no holder that was sound all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.scenario import Event, NetworkSpec

CRASH = 1
"""Completed iterations that are repeated at most after a crash; after a clean stop none is."""


@dataclass(frozen=True)
class Fact:
    """A shadow node was found `live`, or may have `lost` something."""

    at: float
    kind: str
    node: int


@dataclass(frozen=True)
class PastStart:
    """A start of training that was followed by another one, or ended training.

    `resumed`: with which iteration; `completed`: the last that a rank completed, `None` for none; `over`:
    when its first rank ended; `clean`: all ranks closed their protection.
    """

    resumed: int
    completed: int | None
    over: float
    clean: bool


@dataclass(frozen=True)
class ResumePromise:
    """Of the start after: with which iteration it resumes at least. `lost`: shards that may be lost.

    `anew`: nothing may be known of the job at all, so that training begins without a word. `on_disk`: there
    is a checkpoint, so a start that finds no shard takes that.
    """

    at_least: int
    lost: tuple[int, ...] = ()
    anew: bool = False
    on_disk: bool = False

    def __str__(self) -> str:
        if self.anew:
            return "nothing (no shadow node holds anything)" + (", the disk has" if self.on_disk else "")
        if self.lost:
            return f"the disk or an error (shards {', '.join(map(str, self.lost))} may be lost)"
        return f"{self.at_least} or later"

    def broken_by(self, resumed: int | None, *, silent: bool = False) -> str:
        """What is wrong with a start that resumed there (`None`: a RestoreError); "" for nothing.

        `silent`: it began anew without an error.
        """
        if resumed is None:
            if not self.lost:
                return f"RestoreError, promised was {self}"
            return "RestoreError, and there is a checkpoint on disk" if self.on_disk else ""
        if silent and not self.anew and self.at_least > 0:
            return f"began anew without an error, promised was {self}"
        if not self.lost and resumed < self.at_least:
            return f"resumed with {resumed}, {self.at_least - resumed} earlier than promised"
        return ""


def promise(
    network: NetworkSpec, facts: Sequence[Fact], before: PastStart, until: float, *, on_disk: bool
) -> ResumePromise:
    """Of the start that resumes at `until`, after the start `before`."""
    unsound = {node for node in range(len(network.nodes)) if not _sound(facts, node, before.over, until)}
    lost = [s for s in range(len(network.nodes)) if unsound.issuperset(network.holders(s))]
    repeats = 0 if before.clean else CRASH
    reached = before.resumed if before.completed is None else before.completed + 1 - repeats
    at_least = max(before.resumed, reached)
    return ResumePromise(at_least, tuple(lost), len(unsound) == len(network.nodes), on_disk)


def _sound(facts: Sequence[Fact], node: int, since: float, until: float) -> bool:
    """Whether a node was sound all the time between."""
    sound = False
    for fact in sorted(facts, key=lambda one: one.at):
        if fact.node != node or fact.at > until:
            continue
        if fact.kind == "lost":
            sound = False
            if fact.at >= since:
                return False
        elif fact.at <= since:
            sound = True
    return sound


def loses(event: Event, network: NetworkSpec, controller_is_down: bool) -> list[int]:
    """The shadow nodes that may lose something by an event, as it happens.

    A switch on the way from another one's ranks drops copies that these have made. A switch that restarts
    without a controller, or a controller without its switch, has nobody who knows the connected streams.
    """
    everyone = list(range(len(network.nodes)))
    if event.who.startswith("shadow"):
        return [int(event.who.removeprefix("shadow"))] if event.kind in ("kill", "down") else []
    if event.kind == "kill" and event.who.startswith("tor"):
        return everyone if network.switches > 1 or controller_is_down else []
    return []


def settles(event: Event) -> float:
    """Seconds after an event's end until a node's word that it is live counts: a gap shows late."""
    return 5.0 if event.kind == "down" or event.who.startswith("tor") else 0.0
