"""Failures by simulation: the spread around the closed form, and what that leaves out. Pure and seeded.

GPUs fail independently at a constant rate (a Poisson process). Between two checkpoints lies a *segment*: its
iterations and then the stall. A failure anywhere in it, the stall included, loses what the segment had done;
restarting takes its time, and a failure while restarting starts that again. So a segment takes a geometric
number of attempts, and each failed one lasts an exponential time cut off at the segment's length: both are
drawn directly, which is exact, and needs no clock.

Checkmate's segment is one iteration without a stall. Its shadow nodes fail too, and are seeded again by
other holders or by trainers. A GPU failure that finds none of the `replicas` holders of a shard seeded falls
back to the newest checkpoint on disk.
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
"""Failures in all runs: about half a minute."""


class NeverDone(ValueError):
    """Failures come faster than training gets ahead, or too many to simulate; the message says which."""


@dataclass(frozen=True)
class ShadowNodes:
    """Shadow nodes: how many, holders of each shard, how often one fails, how long seeding it takes.

    Shard s is held by nodes s .. s + replicas - 1, in a circle. `disk_every_hours` is the time between the
    checkpoints on disk.
    """

    nodes: int
    replicas: int
    failures_per_node_hour: float
    seed_hours: float
    disk_every_hours: float

    def gone_probability(self, recovery_hours: float) -> float:
        """That a GPU failure finds some shard without a holder, or that its last one fails in recovery."""
        rate = self.failures_per_node_hour
        unseeded = rate * self.seed_hours / (1 + rate * self.seed_hours)
        node = 1 - (1 - unseeded) * math.exp(-rate * recovery_hours)
        return run_probability(self.nodes, self.replicas, node)


@dataclass(frozen=True)
class Spread:
    """Hours of the cluster's time in each run; multiply by GPUs for GPU-hours."""

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
    """That among `nodes` in a circle, some `run` in a row are all down; each is with `probability`.

    Cuts the circle: either the run across the cut is long enough, or `around` of it are down, an up node
    stands at each of its ends, and the run is in the line between those. Sums only what is positive; takes
    time linear in `nodes`.
    """
    if run > nodes:
        return 0.0
    if run == nodes:
        return probability**run
    up, all_down = 1 - probability, probability**run
    line = [0.0] * run + [all_down]  # by length: that such a run is in a line
    for length in range(run + 1, nodes - 1):
        line.append(line[-1] + (1 - line[length - run - 1]) * up * all_down)
    found = all_down * (1 + run * up)
    for around in range(run):
        found += (around + 1) * up * up * probability**around * line[nodes - 2 - around]
    return min(1.0, found)


def expected_hours(training: TrainingRun, stall_s: float, every_iterations: int, restart_s: float) -> float:
    """Expected time of a run of whole segments: e^(ΛR) · (e^(Λ(τ+ω)) - 1) / Λ for each.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006; `inf`
    where that is beyond numbers.
    """
    rate, segment = training.failures_per_hour, _segment_hours(training, stall_s, every_iterations)
    exponent = rate * segment
    if exponent + rate * restart_s / HOUR_S > 700:
        return math.inf
    each = math.exp(rate * restart_s / HOUR_S) * math.expm1(exponent) / rate
    return training.iterations / every_iterations * each


def simulate_conventional(
    training: TrainingRun, stall_s: float, every_iterations: int, restart_s: float, runs: int, seed: int
) -> Spread:
    """Runs with a checkpoint every so many iterations that stalls training for `stall_s`.

    Raises `NeverDone` where that means more failures than can be simulated.
    """
    _check(training, stall_s, every_iterations, restart_s, runs)
    generator = np.random.default_rng(seed)
    segments, left = divmod(round(training.iterations), every_iterations)
    rate = training.failures_per_hour
    whole_hours = _segment_hours(training, stall_s, every_iterations)
    last_hours = _segment_hours(training, 0.0, left)
    whole = _failures(generator, np.full(runs, segments), rate * whole_hours)
    last = _failures(generator, np.full(runs, 1), rate * last_hours)
    repeated = _attempts(generator, whole, rate, whole_hours) + _attempts(generator, last, rate, last_hours)
    stalled = np.full(runs, segments * stall_s / HOUR_S)
    restarting, more = _restarts(generator, whole + last, rate, restart_s / HOUR_S)
    return Spread(repeated, stalled, restarting, whole + last + more, np.zeros(runs, np.int64))


def simulate_checkmate(
    training: TrainingRun, shadow: ShadowNodes, restart_s: float, runs: int, seed: int
) -> Spread:
    """Runs with a checkpoint in each iteration, held by shadow nodes that fail as well.

    Raises `NeverDone` where that means more failures than can be simulated, or falling back for ever.
    """
    _check(training, 0.0, 1, restart_s, runs)
    rate, iteration_hours, restart_hours = (
        training.failures_per_hour, training.iteration_s / HOUR_S, restart_s / HOUR_S
    )  # fmt: skip
    gone = shadow.gone_probability(restart_hours)
    if rate * math.exp(rate * restart_hours) * gone * shadow.disk_every_hours / 2 > 0.9:
        raise NeverDone(
            "shadow nodes fail so often that training would mostly repeat what the disk's checkpoint lacks: "
            "more replicas, faster seeding or more frequent checkpoints on disk would help"
        )
    generator = np.random.default_rng(seed)
    to_do = np.full(runs, round(training.iterations))
    repeated, restarting = np.zeros(runs), np.zeros(runs)
    failures, fallbacks = np.zeros(runs, np.int64), np.zeros(runs, np.int64)
    while to_do.any():  # the iterations; then those that a fallback to disk repeats, which may fail too
        failed = _failures(generator, to_do, rate * iteration_hours)
        repeated += _attempts(generator, failed, rate, iteration_hours)
        waited, more = _restarts(generator, failed, rate, restart_hours)
        fell = generator.binomial(failed + more, gone)
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
    """Refuse what would take for ever, before anything is drawn."""
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
            f"a failure comes every {show_seconds(HOUR_S / rate)}, from one checkpoint to the next takes "
            f"{show_seconds(segment * HOUR_S)}, and a restart {show_seconds(restart_s)}: "
            "training would not get ahead"
        )
    raise NeverDone(
        f"{failures:,.0f} failures a run are too many for {runs:,} runs: "
        f"simulate {int(DRAWS_MAX / failures):,} at most"
    )


def _failures(generator: np.random.Generator, successes: Counts, exponent: float) -> Counts:
    """Failed attempts before so many succeed; one does with probability e^-exponent.

    Negative binomial, drawn as the mixture that it is (which takes 0 successes, too).
    """
    return generator.poisson(generator.gamma(successes, math.expm1(exponent)))


def _attempts(generator: np.random.Generator, counts: Counts, rate: float, hours: float) -> Hours:
    """Time of so many failed attempts in each run: exponential, cut off at `hours`."""
    scale = -math.expm1(-rate * hours)
    return _sums(counts, lambda count: np.log1p(-scale * generator.random(count)) / -rate)


def _restarts(
    generator: np.random.Generator, failures: Counts, rate: float, restart_hours: float
) -> tuple[Hours, Counts]:
    """Time of restarting after so many failures, and how many more come while restarting."""
    more = _failures(generator, failures, rate * restart_hours)
    return failures * restart_hours + _attempts(generator, more, rate, restart_hours), more


def _sums(counts: Counts, draw: Callable[[int], Hours]) -> Hours:
    """For each run, the sum of `counts` draws; some runs at a time, to bound the memory."""
    sums = np.zeros(len(counts))
    batches = np.cumsum(counts) // DRAWS_AT_ONCE
    for part in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(batches)) + 1):
        owners = np.repeat(np.arange(len(part)), counts[part])
        sums[part] = np.bincount(owners, weights=draw(len(owners)), minlength=len(part))
    return sums
