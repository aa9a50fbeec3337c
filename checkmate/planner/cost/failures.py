"""Simulation of failures: the spread around the closed form, and effects that it omits. Pure and seeded.

GPUs fail independently at a constant rate (a Poisson process). Between two checkpoints is a *segment*: its
iterations and then the stall. A failure anywhere in it, stall included, undoes the segment. A restart takes
time, and a failure during the restart repeats it. A segment therefore takes a geometric number of attempts,
and each failed attempt takes an exponential time, truncated at the segment's length. Both are drawn directly,
which is exact and needs no clock.

Checkmate's segment is one iteration without a stall. Its shadow nodes fail, too, and are reseeded by other
holders or by trainers. If none of the `replicas` holders of a shard is seeded when a GPU fails, training is
restored from the newest checkpoint on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkmate.planner.cost.model import TrainingRun
from checkmate.planner.units import HOUR_S, show_seconds

Hours = NDArray[np.float64]
Counts = NDArray[np.int64]

DRAWS_AT_ONCE: Final = 1_000_000
DRAWS_MAX: Final = 5e8
"""Maximum number of failures in all runs, which take about half a minute."""


class NeverDone(ValueError):
    """Failures prevent progress, or are too many to simulate; the message has the reason."""


@dataclass(frozen=True)
class ShadowNodes:
    """Shadow nodes: their number, holders per shard, failure rate, and time of seeding.

    Shard s is held by nodes s .. s + replicas - 1, modulo the number of nodes. `disk_every_hours` is the time
    between checkpoints on disk.
    """

    nodes: int
    replicas: int
    failures_per_node_hour: float
    seed_hours: float
    disk_every_hours: float

    def gone_probability(self, recovery_hours: float) -> float:
        """Return the probability that a GPU failure loses a shard, then or during recovery."""
        rate = self.failures_per_node_hour
        unseeded = rate * self.seed_hours / (1 + rate * self.seed_hours)
        node = 1 - (1 - unseeded) * math.exp(-rate * recovery_hours)
        return run_probability(self.nodes, self.replicas, node)


@dataclass(frozen=True)
class Spread:
    """Hours of the cluster's time in each run. Multiply by GPUs for GPU-hours."""

    repeated_hours: Hours
    stalled_hours: Hours
    restarting_hours: Hours
    failures: Counts
    fallbacks: Counts
    """Failures after which only the checkpoint on disk was left."""

    @property
    def wasted_hours(self) -> Hours:
        """All time without progress."""
        return self.repeated_hours + self.stalled_hours + self.restarting_hours


def run_probability(nodes: int, run: int, probability: float) -> float:
    """Return the probability that some `run` neighbours among `nodes` in a circle are all down.

    Each is down with `probability`. The circle is cut: either the run across the cut is long enough, or
    `around` nodes there are down, between two nodes that are up, and the run is in the remaining line. Sums
    only positive terms, in time linear in `nodes`.
    """
    if run > nodes:
        return 0.0
    if run == nodes:
        return probability**run
    up, all_down = 1 - probability, probability**run
    line = [0.0] * run + [all_down]  # probability of such a run, by length of a line
    for length in range(run + 1, nodes - 1):
        line.append(line[-1] + (1 - line[length - run - 1]) * up * all_down)
    probability_sum = all_down * (1 + run * up)
    for around in range(run):
        probability_sum += (around + 1) * up * up * probability**around * line[nodes - 2 - around]
    return min(1.0, probability_sum)


def simulate_conventional(
    training: TrainingRun, stall_s: float, every_iterations: int, restart_s: float, runs: int, seed: int
) -> Spread:
    """Simulate runs with a checkpoint every N iterations that stalls training for `stall_s`.

    Raises `NeverDone` if there are too many failures to simulate.
    """
    _check(training, stall_s, every_iterations, restart_s, runs)
    generator = np.random.default_rng(seed)
    segments, remaining = divmod(round(training.iterations), every_iterations)
    rate = training.failures_per_hour
    whole_hours = _segment_hours(training, stall_s, every_iterations)
    last_hours = _segment_hours(training, 0.0, remaining)
    whole = _failures(generator, np.full(runs, segments), rate * whole_hours)
    last = _failures(generator, np.full(runs, 1), rate * last_hours)
    repeated = _attempts(generator, whole, rate, whole_hours) + _attempts(generator, last, rate, last_hours)
    stalled = np.full(runs, segments * stall_s / HOUR_S)
    restarting, more = _restarts(generator, whole + last, rate, restart_s / HOUR_S)
    return Spread(repeated, stalled, restarting, whole + last + more, np.zeros(runs, np.int64))


def simulate_checkmate(
    training: TrainingRun, shadow: ShadowNodes, restart_s: float, runs: int, seed: int
) -> Spread:
    """Simulate runs with a checkpoint in each iteration, on shadow nodes that fail as well.

    Raises `NeverDone` if there are too many failures to simulate, or runs would repeat work forever.
    """
    _check(training, 0.0, 1, restart_s, runs)
    rate, iteration_hours, restart_hours = (
        training.failures_per_hour, training.iteration_s / HOUR_S, restart_s / HOUR_S
    )  # fmt: skip
    loss_probability = shadow.gone_probability(restart_hours)
    if rate * math.exp(rate * restart_hours) * loss_probability * shadow.disk_every_hours / 2 > 0.9:
        raise NeverDone(
            "shadow nodes fail so often that training would mostly repeat work since the last checkpoint on "
            "disk; use more replicas, faster seeding or more frequent checkpoints on disk"
        )
    generator = np.random.default_rng(seed)
    to_do = np.full(runs, round(training.iterations))
    repeated, restarting = np.zeros(runs), np.zeros(runs)
    failures, fallbacks = np.zeros(runs, np.int64), np.zeros(runs, np.int64)
    while to_do.any():  # all iterations; then those repeated from disk, which may fail, too
        failed = _failures(generator, to_do, rate * iteration_hours)
        repeated += _attempts(generator, failed, rate, iteration_hours)
        waited, more = _restarts(generator, failed, rate, restart_hours)
        fell = generator.binomial(failed + more, loss_probability)
        since = _sums(fell, lambda count: generator.uniform(0, shadow.disk_every_hours, count))
        to_do = np.ceil(since / iteration_hours).astype(np.int64)
        repeated += to_do * iteration_hours
        restarting += waited
        failures += failed + more
        fallbacks += fell
    return Spread(repeated, np.zeros(runs), restarting, failures, fallbacks)


def _segment_hours(training: TrainingRun, stall_s: float, iterations: int) -> float:
    return (iterations * training.iteration_s + stall_s) / HOUR_S


def _check(training: TrainingRun, stall_s: float, every_iterations: int, restart_s: float, runs: int) -> None:
    """Raise `NeverDone` if a simulation would take too long."""
    rate = training.failures_per_hour
    segment = _segment_hours(training, stall_s, every_iterations)
    exponents = rate * segment, rate * restart_s / HOUR_S
    failures = math.inf
    if sum(exponents) < 700:
        failures = training.iterations / every_iterations * math.expm1(exponents[0]) * math.exp(exponents[1])
    if failures * runs <= DRAWS_MAX:
        return
    if failures > DRAWS_MAX / 100:
        raise NeverDone(
            f"a failure every {show_seconds(HOUR_S / rate)}, a checkpoint every "
            f"{show_seconds(segment * HOUR_S)} and restarts of {show_seconds(restart_s)}: "
            "training would make no progress"
        )
    raise NeverDone(
        f"{failures:,.0f} failures per run are too many for {runs:,} runs: "
        f"simulate at most {int(DRAWS_MAX / failures):,} runs"
    )


def _failures(generator: np.random.Generator, successes: Counts, exponent: float) -> Counts:
    """Draw the number of failed attempts before N successes; each succeeds with probability e^-exponent.

    Negative binomial, drawn as a gamma-Poisson mixture (which allows 0 successes).
    """
    return generator.poisson(generator.gamma(successes, math.expm1(exponent)))


def _attempts(generator: np.random.Generator, counts: Counts, rate: float, hours: float) -> Hours:
    """Draw the time of failed attempts in each run: exponential, truncated at `hours`."""
    scale = -math.expm1(-rate * hours)
    return _sums(counts, lambda count: np.log1p(-scale * generator.random(count)) / -rate)


def _restarts(
    generator: np.random.Generator, failures: Counts, rate: float, restart_hours: float
) -> tuple[Hours, Counts]:
    """Draw the time of restarts after failures, and the number of failures during restarts."""
    more = _failures(generator, failures, rate * restart_hours)
    return failures * restart_hours + _attempts(generator, more, rate, restart_hours), more


def _sums(counts: Counts, draw: Callable[[int], Hours]) -> Hours:
    """Return the sum of `counts` draws for each run; in batches, to limit memory."""
    sums = np.zeros(len(counts))
    batches = np.cumsum(counts) // DRAWS_AT_ONCE
    for part in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(batches)) + 1):
        owners = np.repeat(np.arange(len(part)), counts[part])
        sums[part] = np.bincount(owners, weights=draw(len(owners)), minlength=len(part))
    return sums
