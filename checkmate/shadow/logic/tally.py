"""What a shadow node has done since its start, counted for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts of a node. They change under the node's lock."""

    steps: int = 0
    step_seconds: float = 0.0
    gaps: int = 0
    mismatches: int = 0
    seeds: int = 0
