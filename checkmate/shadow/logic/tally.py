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

    def count_steps(self, seconds: float) -> None:
        """Count a round of steps, of all holds that were due, which took these seconds."""
        self.steps += 1
        self.step_seconds += seconds

    def count_gap(self) -> None:
        """Count a loss of gradients."""
        self.gaps += 1

    def count_mismatch(self) -> None:
        """Count a step after which a hold differed from the trainers."""
        self.mismatches += 1

    def count_seeds(self) -> None:
        """Count a stream of seeds."""
        self.seeds += 1
