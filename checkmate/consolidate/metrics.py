"""The work of `consolidate --every` as metrics of Prometheus. Pure but for the clock that callers pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from checkmate.consolidate.follow import SavedCheckpoint


@dataclass
class KeeperTally:
    """The checkpoints of one job since the process began. One thread changes it."""

    job: str
    every: int
    """Iterations between two checkpoints."""
    iteration: int = -1
    """The iteration of the newest checkpoint; -1: none."""
    at: float = 0.0
    """The time at which it was complete, in seconds since 1970."""
    count: int = 0
    seconds: float = 0.0
    """The time that all checkpoints took together."""
    failures: int = 0
    trouble: str = ""
    """Why the newest is old, or ""."""
    since: int = -1
    """The iteration of the run's newest checkpoint, or the first of the run that was seen."""
    _run: str = ""

    def note_progress(self, run: str, iteration: int) -> None:
        """Note what the shadow nodes have. What was before this process is not its to keep."""
        if run != self._run:
            self._run, self.since = run, iteration

    def note_saved(self, checkpoint: SavedCheckpoint, now: float) -> None:
        """Note a checkpoint that is complete."""
        self.iteration, self.at, self.trouble = checkpoint.iteration, now, ""
        self.count, self.seconds = self.count + 1, self.seconds + checkpoint.seconds
        self._run, self.since = checkpoint.run, checkpoint.iteration

    def note_failure(self, why: str) -> None:
        """Note that state can't be read, or a checkpoint not written."""
        self.failures, self.trouble = self.failures + 1, why

    def note_recovery(self) -> None:
        """Note that state can be read again."""
        self.trouble = ""

    def not_ready(self) -> str:
        """Return why no checkpoint is written, or ""."""
        return self.trouble


def families(tally: KeeperTally) -> Iterator[Metric]:
    """Yield the metrics `checkmate_consolidate_*`."""
    for name, text, value in (
        ("every_iterations", "Iterations between two checkpoints.", tally.every),
        ("since_iteration", "Of the run's newest checkpoint, or else the first that was seen.", tally.since),
        ("saved_iteration", "The iteration of the newest checkpoint; -1: none.", tally.iteration),
        ("saved_timestamp_seconds", "When the newest checkpoint was complete, or 0.", tally.at),
    ):
        gauge = GaugeMetricFamily(f"checkmate_consolidate_{name}", text, labels=("job",))
        gauge.add_metric((tally.job,), value)
        yield gauge
    took = SummaryMetricFamily(
        "checkmate_consolidate_duration_seconds", "Checkpoints that were written.", labels=("job",)
    )
    took.add_metric((tally.job,), tally.count, tally.seconds)
    yield took
    failures = CounterMetricFamily(
        "checkmate_consolidate_failures",
        "How often state could not be read, or a checkpoint not be written.",
        labels=("job",),
    )
    failures.add_metric((tally.job,), tally.failures)
    yield failures
