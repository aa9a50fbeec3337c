"""Commit of iterations: which iteration all live nodes of a job have in full, and which node decides that.

Pure: a node's view of the others, driven by messages and the clock (design, section 7, *Commit*).
The live node with the lowest id decides. Each node reports its progress to every node with a lower id, and
these answer up to which iteration to step. If all nodes with lower ids are gone, a node therefore has the
information to take over.

A step cannot be undone. Live holds therefore wait, as long as their buffers have room, if a step would leave
a shard behind. This is a shard whose only live holder is silent and may return; or a shard without a live
holder, after a gap, whose state is still complete at the last committed iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from checkmate.nodes.standing import Shard

NEVER: Final = -2
"""An iteration before -1, which is the state before the first iteration."""

KeptShard = tuple[Shard, int]
"""The shard of a hold that is not live but has complete state, and its last stepped iteration."""

MIN_SILENCE, MAX_SILENCE = 1.0, 5.0
"""Bounds, in seconds, of the silence after which a node no longer counts."""

PRESSED_SILENCE = 0.5
"""The silence, in seconds, for which a node without room waits, with copies by hosts: two heartbeats."""

PATIENCE = 600.0
"""Upper bound, in seconds, of the time until there is no more room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a node: over all live holds, the oldest iteration in full and the newest stepped.

    `pressed` is true if a live hold has no room for further iterations.
    """

    incarnation: int
    in_full: int
    stepped: int
    live: bool
    patience: float = PATIENCE
    shards: frozenset[Shard] = frozenset()
    kept_shards: tuple[KeptShard, ...] = ()
    pressed: bool = False
    start: bytes = b""


@dataclass(slots=True)
class _Peer:
    """Another node, as reported by itself. If its id is lower than ours, it is `live` if it may decide."""

    heard_at: float
    progress: Progress | None = None  # None: unknown
    is_gone: bool = False


@dataclass
class Committee:
    """One incarnation from the view of one node. All live holds step up to `committed`.

    `start` distinguishes incarnations of the same number, because numbers wrap. If it `passes_laggards`, live
    nodes that have no more room do not wait for live ones that lag: with copies by hosts, these cannot tell
    that their gradients are lost before they have read all that is before the mark.
    """

    me: int
    nodes: Iterable[int]
    incarnation: int
    began: float
    committed: int = NEVER
    start: bytes = b""
    passes_laggards: bool = False
    shards: frozenset[Shard] = frozenset()
    """All shards of the job."""
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(
            incarnation=self.incarnation, in_full=NEVER, stepped=NEVER, live=False, start=self.start
        )
        self._peers = {node: _Peer(self.began) for node in sorted(self.nodes) if node != self.me}
        self._lower = {node: peer for node, peer in self._peers.items() if node < self.me}
        self._higher = {node: peer for node, peer in self._peers.items() if node > self.me}
        self._was_whole = False
        self.behind: dict[int, int] = {}
        """If we decide: live nodes that do not count, and the number of committed iterations they lack."""

    def report(self, progress: Progress) -> None:
        """Update our own progress."""
        self.progress = progress

    def hear_report(self, node: int, progress: Progress, now: float) -> None:
        """Process a report of a node with a higher id. A node of another start has lost this one."""
        peer = self._higher.get(node)
        if peer is None:
            return
        if (progress.incarnation, progress.start) != (self.incarnation, self.start):
            peer.is_gone = peer.progress is not None
            return
        peer.heard_at, peer.progress, peer.is_gone = now, progress, False
        if progress.live:
            self.committed = max(self.committed, progress.stepped)

    def hear_decision(
        self,
        node: int,
        step_to: int,
        active: bool,
        now: float,
        kept_shards: tuple[KeptShard, ...] = (),
        shards: frozenset[Shard] = frozenset(),
        patience: float = PATIENCE,
        whole: bool = False,
    ) -> None:
        """Process an answer of a node with a lower id."""
        if peer := self._lower.get(node):
            progress = Progress(
                incarnation=self.incarnation,
                in_full=step_to,
                stepped=step_to,
                live=active,
                patience=patience,
                shards=shards,
                kept_shards=kept_shards,
            )
            peer.heard_at, peer.progress, peer.is_gone = now, progress, False
            self.committed = max(self.committed, step_to)
            self._was_whole |= whole

    def is_whole(self, now: float) -> bool:
        """Return whether each of the job's shards has, or has had, a live hold in this start of training.

        Only the node that decides knows that of all; the others hear it.
        """
        if self._was_whole or self.decider(now) != self.me:
            return self._was_whole
        live = [self.progress.shards]
        live += [
            peer.progress.shards
            for peer in self._higher.values()
            if peer.progress and peer.progress.live and self._counts(peer, now)
        ]
        self._was_whole = frozenset[Shard]().union(*live) >= self.shards
        return self._was_whole

    def note_end(self, node: int) -> None:
        """Record that a node's process has ended, and its state is lost."""
        if peer := self._peers.get(node):
            peer.is_gone = True

    def reporters(self) -> tuple[set[int], set[int]]:
        """Return the nodes that have reported: those whose processes have ended since, and the others."""
        ends = {node: peer.is_gone for node, peer in self._peers.items() if peer.progress is not None}
        return {node for node, is_gone in ends.items() if is_gone}, {node for node in ends if not ends[node]}

    def decider(self, now: float) -> int | None:
        """Return the lowest live id, or `None` if it is not known yet."""
        for node, peer in self._lower.items():
            if not self._counts(peer, now):
                continue
            if peer.progress is None:
                return None
            if peer.progress.live:
                return node
        return self.me if self.active else None

    @property
    def active(self) -> bool:
        """Whether we may decide: live, and not left behind while others considered us dead."""
        return self.progress.live and self.progress.in_full >= self.committed

    @property
    def silence(self) -> float:
        """Seconds until a silent node no longer counts: a quarter of the shortest patience, within bounds."""
        if self.passes_laggards and self._pressed():
            return PRESSED_SILENCE
        patiences = [peer.progress.patience for peer in self._higher.values() if peer.progress]
        return min(MAX_SILENCE, max(MIN_SILENCE, min([self.progress.patience, *patiences]) / 4))

    def nobody_live(self, now: float) -> bool:
        """Return whether no node is live, so that no agreement is needed. Unknown nodes may be live."""
        if self.progress.live:
            return False
        return not any(
            self._counts(peer, now) if peer.progress is None else peer.progress.live and not peer.is_gone
            for peer in self._peers.values()
        )

    def decide(self, now: float) -> int:
        """Advance `committed` if we decide and all live nodes have more in full. Return it.

        If this would leave a shard behind, advance by one, and only if a node has no more room. So it is if a
        live node lags and `passes_laggards`.
        """
        self.behind = {}
        if self.decider(now) != self.me:
            return self.committed
        live = [self.progress]
        for node, peer in self._higher.items():
            progress = peer.progress
            if not self._counts(peer, now):
                continue
            if progress is None:
                return self.committed  # unknown until it reports, or has been silent too long
            if not progress.live:
                continue
            if progress.in_full < self.committed:
                # It was silent, and others continued without it.
                self.behind[node] = self.committed - progress.in_full
                continue
            live.append(progress)
        target = max(self.committed, min(progress.in_full for progress in live))
        if target > self.committed:
            covered = frozenset[Shard]().union(*(progress.shards for progress in live))
            if not (self._silent(now) | self._level(now)) <= covered:
                target = self.committed + any(progress.pressed for progress in live)
        elif self.passes_laggards:
            target += any(progress.pressed and progress.in_full > target for progress in live)
        self.committed = target
        return self.committed

    def _pressed(self) -> bool:
        """Return whether we have no more room, or a node that reports to us has none."""
        peers = [peer.progress for peer in self._higher.values() if peer.progress and not peer.is_gone]
        return any(progress.live and progress.pressed for progress in (self.progress, *peers))

    def _counts(self, peer: _Peer, now: float) -> bool:
        """Return whether a node is neither gone nor silent."""
        return not peer.is_gone and now - peer.heard_at <= self.silence

    def _silent(self, now: float) -> set[Shard]:
        """Return shards of live nodes that are silent but may still have room in their buffers."""
        shards: set[Shard] = set()
        for peer in self._peers.values():
            progress = peer.progress
            if progress is None or not progress.live or peer.is_gone:
                continue
            if self.silence < now - peer.heard_at <= progress.patience:
                shards |= progress.shards
        return shards

    def _level(self, now: float) -> set[Shard]:
        """Return shards of holds that are not live, but whose state is at the last committed iteration."""
        kept_shards = set(self.progress.kept_shards)
        for peer in self._peers.values():
            if peer.progress and self._counts(peer, now):
                kept_shards.update(peer.progress.kept_shards)
        return {shard for shard, at in kept_shards if at == self.committed}
