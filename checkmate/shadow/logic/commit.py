"""When a step is certain: which iteration all live nodes of a job have in full, and who decides that.

Pure: a node's view of the others, moved by what it hears and by the clock (design, section 7, *Commit*).
The live node with the lowest id decides. Each node tells every node with a lower id what it has, and hears
from these up to where to step; so a node whose lower ones have all gone knows all it needs to take over.

What is stepped can't be taken back. So live holds wait, as long as their buffers have room, if to go on would
leave a shard behind: one whose only live holder is silent, and may come back; or one without a live holder,
after a gap, whose state is still whole at the iteration that was committed last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from checkmate.nodes.shards import Shard

NEVER: Final = -2
"""Before iteration -1, which is the state before the first iteration."""

Kept = tuple[Shard, int]
"""A hold that isn't live, but whose state is whole, and the iteration that it stepped last."""

SILENCE_MIN, SILENCE_MAX = 1.0, 5.0
"""Bounds, in seconds, of the silence after which a node is not asked any more."""

PATIENCE = 600.0
"""Seconds for which a socket buffer lasts at most, as far as anybody plans with it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a node has: of all its live holds the least in full and the most stepped, and their shards.

    `pressed`: a live hold has no room for more than is in full.
    """

    incarnation: int
    in_full: int
    stepped: int
    live: bool
    patience: float = PATIENCE
    shards: frozenset[Shard] = frozenset()
    kept: tuple[Kept, ...] = ()
    pressed: bool = False
    start: bytes = b""


@dataclass(slots=True)
class _Higher:
    """A node with a higher id than ours, as far as it has told us."""

    heard: float
    progress: Progress | None = None
    gone: bool = False


@dataclass(slots=True)
class _Lower:
    """A node with a lower id than ours: whether it may decide."""

    heard: float
    active: bool | None = None  # None: not known yet
    gone: bool = False
    kept: tuple[Kept, ...] = ()
    shards: frozenset[Shard] = frozenset()
    patience: float = PATIENCE


@dataclass
class Committee:
    """One incarnation as one node sees it. `committed`: all live holds step up to it.

    `start` tells it from another of the same number, for these come round.
    """

    me: int
    nodes: Iterable[int]
    incarnation: int
    began: float
    committed: int = NEVER
    start: bytes = b""
    mine: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.mine = Progress(self.incarnation, NEVER, NEVER, False, start=self.start)
        others = set(self.nodes) - {self.me}
        self._higher = {node: _Higher(self.began) for node in others if node > self.me}
        self._lower = {node: _Lower(self.began) for node in others if node < self.me}
        self.behind: dict[int, int] = {}
        """Where we decide: live nodes that are not counted, and how many committed iterations they lack."""

    def report(self, progress: Progress) -> None:
        """What we have ourselves."""
        self.mine = progress

    def heard(self, node: int, progress: Progress, now: float) -> None:
        """A node with a higher id says what it has; one that has forgotten this start has lost it."""
        other = self._higher.get(node)
        if other is None:
            return
        if (progress.incarnation, progress.start) != (self.incarnation, self.start):
            other.gone = other.progress is not None
            return
        other.heard, other.progress, other.gone = now, progress, False
        if progress.live:
            self.committed = max(self.committed, progress.stepped)

    def told(
        self,
        node: int,
        step_to: int,
        active: bool,
        now: float,
        kept: tuple[Kept, ...] = (),
        shards: frozenset[Shard] = frozenset(),
        patience: float = PATIENCE,
    ) -> None:
        """A node with a lower id says where to step, whether it may decide, and what it has."""
        if node in self._lower:
            self._lower[node] = _Lower(now, active, False, kept, shards, patience)
            self.committed = max(self.committed, step_to)

    def gone(self, node: int) -> None:
        """A node's process has ended: what it had is lost until it is heard again."""
        if node in self._lower:
            self._lower[node].gone = True
        elif node in self._higher:
            self._higher[node].gone = True

    def decider(self, now: float) -> int | None:
        """Who decides: the lowest live id; `None` where none is known, or a lower one may yet be."""
        for node in sorted(self._lower):
            other = self._lower[node]
            if other.gone or now - other.heard > self.silence:
                continue
            if other.active is not False:
                return node if other.active else None
        return self.me if self.active else None

    @property
    def active(self) -> bool:
        """Whether we may decide: live, and not left behind while others took us for dead."""
        return self.mine.live and self.mine.in_full >= self.committed

    @property
    def silence(self) -> float:
        """A quarter of the shortest time for which a socket buffer lasts, within bounds."""
        told = [other.progress.patience for other in self._higher.values() if other.progress]
        return min(SILENCE_MAX, max(SILENCE_MIN, min([self.mine.patience, *told]) / 4))

    def nobody_live(self, now: float) -> bool:
        """Whether no node is live: then there is nothing to agree on. One not heard of yet may be."""
        if self.mine.live:
            return False
        known: list[tuple[_Higher | _Lower, bool | None]] = [
            *((other, other.progress.live if other.progress else None) for other in self._higher.values()),
            *((other, other.active) for other in self._lower.values()),
        ]
        return all(
            other.gone or live is False or (live is None and now - other.heard > self.silence)
            for other, live in known
        )

    def decide(self, now: float) -> int:
        """`committed`, moved up if we decide and all live nodes allow it.

        One at a time, and only for want of room, if that would leave a shard behind.
        """
        self.behind = {}
        if self.decider(now) != self.me:
            return self.committed
        live = [self.mine]
        for node, other in self._higher.items():
            progress = other.progress
            if other.gone or now - other.heard > self.silence:
                continue
            if progress is None:
                return self.committed  # not heard of yet; its silence ends this
            if not progress.live:
                continue
            if progress.in_full < self.committed:
                # It was silent, and others went on without it.
                self.behind[node] = self.committed - progress.in_full
                continue
            live.append(progress)
        target = max(self.committed, min(progress.in_full for progress in live))
        if target > self.committed:
            covered = frozenset[Shard]().union(*(progress.shards for progress in live))
            if not (self._silent(now) | self._level(now)) <= covered:
                target = self.committed + any(progress.pressed for progress in live)
        self.committed = target
        return self.committed

    def _silent(self, now: float) -> frozenset[Shard]:
        """Shards of live nodes that are silent, and whose own buffers may not be full yet."""
        found: set[Shard] = set()
        for lower in self._lower.values():
            if lower.active and not lower.gone and self.silence < now - lower.heard <= lower.patience:
                found |= lower.shards
        for higher in self._higher.values():
            said = higher.progress
            if said is None or not said.live or higher.gone:
                continue
            if self.silence < now - higher.heard <= said.patience:
                found |= said.shards
        return frozenset(found)

    def _level(self, now: float) -> frozenset[Shard]:
        """Shards that a hold has, which isn't live, in the state after the iteration committed last."""
        kept = set(self.mine.kept)
        for lower in self._lower.values():
            if not lower.gone and now - lower.heard <= self.silence:
                kept.update(lower.kept)
        for higher in self._higher.values():
            if higher.progress and not higher.gone and now - higher.heard <= self.silence:
                kept.update(higher.progress.kept)
        return frozenset(shard for shard, at in kept if at == self.committed)
