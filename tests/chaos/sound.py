"""Which shadow nodes may have lost state, as the facts from which the oracle predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tests.chaos.oracle import Fact


class SoundnessWatch:
    """Notes when nodes lose state, and when they are live again."""

    def __init__(self, nodes: Iterable[int], is_live: Callable[[int], tuple[int, bool]]) -> None:
        """Begin without any node known to be live.

        `is_live` returns the number of a node's statuses since its start, and whether the last one is live.
        """
        self._is_live = is_live
        self._unsure: dict[int, float] = dict.fromkeys(nodes, 0.0)
        self.facts: list[Fact] = []

    @property
    def unsure(self) -> set[int]:
        """The nodes that are not known to be live."""
        return set(self._unsure)

    def lose(self, node: int, settled: float) -> None:
        """Note that a node may have lost state; what it says counts from the time `settled` on."""
        self.facts.append(Fact(time.monotonic(), "lost", node))
        self._unsure[node] = max(self._unsure.get(node, 0.0), settled)

    def look(self, down: Callable[[int], bool]) -> None:
        """Check for nodes that are live again, except those that are `down`."""
        now = time.monotonic()
        for node, settled in list(self._unsure.items()):
            if now < settled or down(node):
                continue
            count, live = self._is_live(node)
            if live and count > 1:
                del self._unsure[node]
                self.facts.append(Fact(now, "live", node))

    def protected(self, at: float) -> None:
        """Note that training has begun at that time: nodes without events since their start are live."""
        lost_nodes = {fact.node for fact in self.facts if fact.kind == "lost"}
        for node in set(self._unsure) - lost_nodes:
            del self._unsure[node]
            self.facts.append(Fact(at, "live", node))
