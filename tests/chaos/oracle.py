"""The promises that follow from the events. Pure.

A shadow node is *sound* from the time it was observed live until it may have lost state: it was killed, its
link was down, or copies to it may have been dropped. A crash may cost more than an iteration only if some
shard had no holder that was sound all the time between the crash and the next start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.scenario import Event, NetworkSpec

CRASH = 1
"""Maximum of completed iterations that are repeated after a crash; it is 0 after a clean stop."""
LATE_CRASH = 100
"""The same if copies are lost: iterations of 10 ms within a second, until all of them were sent again."""


@dataclass(frozen=True)
class Fact:
    """Observation that a shadow node was `live`, or may have `lost` state."""

    at: float
    kind: str
    node: int


@dataclass(frozen=True)
class PastStart:
    """A past start of training.

    Attributes:
        resumed: Its first iteration.
        completed: The last iteration that a rank completed, or `None`.
        over: The time when its first rank ended.
        clean: Whether all ranks closed their protection.
    """

    resumed: int
    completed: int | None
    over: float
    clean: bool


@dataclass(frozen=True)
class ResumePromise:
    """Promise for the next start: the earliest iteration at which it resumes.

    Attributes:
        lost: Shards that may be lost, counted over all DP groups.
        unknown: Whether the job may be unknown to all nodes, so that training restarts without an error.
        on_disk: Whether there is a checkpoint, which is used if no shard is available.
    """

    at_least: int
    lost: tuple[int, ...] = ()
    unknown: bool = False
    on_disk: bool = False

    def __str__(self) -> str:
        if self.unknown:
            return "nothing (no shadow node holds anything)" + (", the disk has" if self.on_disk else "")
        if self.lost:
            return f"the disk or an error (shards {', '.join(map(str, self.lost))} may be lost)"
        return f"{self.at_least} or later"

    def broken_by(self, resumed: int | None, *, silent: bool = False) -> str:
        """Return the broken promise of a start that resumed there (`None`: a RestoreError), or "".

        With `silent`, it restarted from the beginning without an error.
        """
        if resumed is None:
            if not self.lost:
                return f"RestoreError, promised was {self}"
            return "RestoreError, and there is a checkpoint on disk" if self.on_disk else ""
        if silent and not self.unknown and self.at_least > 0:
            return f"restarted from the beginning without an error; the promise was {self}"
        if not self.lost and resumed < self.at_least:
            return f"resumed with {resumed}, {self.at_least - resumed} earlier than promised"
        return ""


def promise(
    network: NetworkSpec, facts: Sequence[Fact], before: PastStart, until: float, *, on_disk: bool
) -> ResumePromise:
    """Return the promise for the start at time `until`, after the start `before`."""
    unsound = {node for node in range(len(network.nodes)) if not _sound(facts, node, before.over, until)}
    lost_shards = [number for number, nodes in enumerate(network.holders()) if unsound.issuperset(nodes)]
    repeats = 0 if before.clean else LATE_CRASH if network.copy_loss else CRASH
    reached = before.resumed if before.completed is None else before.completed + 1 - repeats
    at_least = max(before.resumed, reached)
    return ResumePromise(at_least, tuple(lost_shards), len(unsound) == len(network.nodes), on_disk)


def _sound(facts: Sequence[Fact], node: int, since: float, until: float) -> bool:
    """Return whether a node was sound during the whole interval."""
    sound = False
    for fact in sorted(facts, key=lambda candidate: candidate.at):
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
    """Return the shadow nodes that may lose state because of an event.

    A switch drops copies that are forwarded from another switch. If a switch restarts without a controller,
    or a controller without its switch, the connected streams are unknown.
    """
    everyone = list(range(len(network.nodes)))
    if event.who.startswith("shadow"):
        return [int(event.who.removeprefix("shadow"))] if event.kind in ("kill", "down") else []
    if event.kind == "kill" and event.who.startswith("tor"):
        return everyone if network.switches > 1 or controller_is_down else []
    return []


def settles(event: Event) -> float:
    """Return the seconds after an event until a live status is reliable: gaps are detected late."""
    return 5.0 if event.kind == "down" or event.who.startswith("tor") else 0.0
