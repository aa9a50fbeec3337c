"""The cost of checkpointing: the paper's model in closed form (its Appendix B). Pure.

Both schemes pay for work that failures undo, half a checkpoint interval each time on average. Conventional
checkpoints also stall training. Checkmate's checkpoints do not, but require CPU nodes.

Two notes on the paper's formulas:

- Checkmate's cost is printed as P_G·λN²D/2 + P_C·D·C, which lacks a factor t of the preceding text. Without
  it, the units do not match; with it, the result is the paper's own 4,367 GPU-hours.
- f, called a frequency, is the number of iterations between checkpoints: here `every_iterations`.

The paper leaves out the repair of a failure (detection, restart), because it is equal in both schemes. With
recovery in place it is not, so `restarting_gpu_hours` has it, without failures during repairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from checkmate.planner.units import HOUR_S

STREAMS_PER_DP_GROUP: Final = 2
"""One from each boundary rank, for any size of the group (paper, "Network Resource Planning")."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its GPUs, their failure rate, and its duration without failures."""

    gpus: int
    failures_per_gpu_hour: float
    duration_hours: float
    iteration_s: float

    @property
    def failures_per_hour(self) -> float:
        """Failure rate of the whole cluster (λN), because a GPU's failure ends the iteration of all."""
        return self.failures_per_gpu_hour * self.gpus

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run without failures (ND)."""
        return self.gpus * self.duration_hours

    @property
    def iterations(self) -> float:
        """Number of iterations of the run."""
        return self.duration_hours * HOUR_S / self.iteration_s

    @property
    def failures(self) -> float:
        """Expected number of failures (λND)."""
        return self.failures_per_hour * self.duration_hours

    def slowed(self, slowdown: float) -> TrainingRun:
        """Return the same training with iterations that take longer, by this share of their time."""
        longer = 1 + slowdown
        return replace(
            self, duration_hours=self.duration_hours * longer, iteration_s=self.iteration_s * longer
        )


@dataclass(frozen=True)
class Prices:
    """Dollars per hour of one GPU, and of one CPU node."""

    dollars_per_gpu_hour: float
    dollars_per_node_hour: float


@dataclass(frozen=True)
class Waste:
    """Expected GPU-hours without progress.

    They are repeated after failures, stalled by checkpoints, slowed, and spent in restarts.
    """

    repeated_gpu_hours: float
    stalled_gpu_hours: float
    slowed_gpu_hours: float = 0.0
    restarting_gpu_hours: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """Sum of all."""
        lost = self.repeated_gpu_hours + self.restarting_gpu_hours
        return lost + self.stalled_gpu_hours + self.slowed_gpu_hours


def conventional_waste(training: TrainingRun, stall_s: float, every_iterations: float) -> Waste:
    """Return the waste of checkpoints every N iterations that stall training for `stall_s` each.

    ND(λNft/2 + ω/(ft)), the paper's Wasted_SOTA(f).
    """
    interval_hours = every_iterations * training.iteration_s / HOUR_S
    return Waste(
        repeated_gpu_hours=training.gpu_hours * training.failures_per_hour * interval_hours / 2,
        stalled_gpu_hours=training.gpu_hours * stall_s / HOUR_S / interval_hours,
    )


def failures_per_interval(training: TrainingRun, stall_s: float, every_iterations: float) -> float:
    """Return the expected number of failures between two checkpoints: Λ(τ+ω).

    The closed form assumes that each repeats half an interval, which is valid if this number is far below 1.
    """
    return training.failures_per_hour * (every_iterations * training.iteration_s + stall_s) / HOUR_S


def checkmate_waste(training: TrainingRun, slowdown: float = 0.0) -> Waste:
    """Return the waste of a checkpoint in each iteration without stalls: λN²Dt/2.

    `slowdown`: by which share of their time iterations take longer than without Checkmate.
    """
    slowed = training.slowed(slowdown)
    repeated = conventional_waste(slowed, stall_s=0.0, every_iterations=1).repeated_gpu_hours
    return Waste(repeated, 0.0, slowed.gpu_hours - training.gpu_hours)


def restarting_gpu_hours(training: TrainingRun, restart_s: float) -> float:
    """Return the GPU-hours from failures until training goes on: all GPUs wait."""
    return training.failures * training.gpus * restart_s / HOUR_S


def best_interval_iterations(training: TrainingRun, stall_s: float) -> float:
    """Return the paper's f*, the optimal number of iterations between checkpoints: real, and at least 1.

    sqrt(2ω / (λNt²)), which is Young's first-order optimum in iterations.
    """
    per_second = training.failures_per_hour / HOUR_S
    return max(1.0, math.sqrt(2 * stall_s / per_second) / training.iteration_s)


def best_every_iterations(training: TrainingRun, stall_s: float) -> int:
    """Return the best whole number of iterations between checkpoints, next to f* and within the run."""
    last = max(1, math.floor(training.iterations))
    below = min(last, math.floor(best_interval_iterations(training, stall_s)))
    return min(
        below, min(last, below + 1), key=lambda every: conventional_waste(training, stall_s, every).gpu_hours
    )


def least_waste(training: TrainingRun, stall_s: float) -> Waste:
    """Return the waste of conventional checkpoints at the paper's f*: ND·sqrt(2ωλN) if f* > 1."""
    return conventional_waste(training, stall_s, best_interval_iterations(training, stall_s))


def saved_gpu_hours(training: TrainingRun, stall_s: float, slowdown: float = 0.0) -> float:
    """Return the GPU-hours that Checkmate saves over the run against optimal conventional checkpoints."""
    return least_waste(training, stall_s).gpu_hours - checkmate_waste(training, slowdown).gpu_hours


def node_hours(duration_hours: float, shadow_nodes: int) -> float:
    """Return the CPU-node hours of the shadow nodes (DC)."""
    return duration_hours * shadow_nodes


def dollars(waste: Waste, prices: Prices, nodes_hours: float = 0.0) -> tuple[float, float]:
    """Return the cost of wasted GPU-hours and of shadow nodes; together Cost_SOTA or Cost_Checkmate."""
    return prices.dollars_per_gpu_hour * waste.gpu_hours, prices.dollars_per_node_hour * nodes_hours


def break_even_stall_s(
    training: TrainingRun, prices: Prices, shadow_nodes: int, slowdown: float = 0.0
) -> float:
    """Return the stall of a conventional checkpoint, in seconds, beyond which Checkmate costs less.

    Solves Cost_Checkmate = Cost*_SOTA for ω, in both branches of f*, with Cost_Checkmate as a share of what
    the GPUs cost: P_G·ND.
    """
    nodes = node_hours(training.slowed(slowdown).duration_hours, shadow_nodes)
    cost = sum(dollars(checkmate_waste(training, slowdown), prices, nodes))
    share = cost / (prices.dollars_per_gpu_hour * training.gpu_hours)
    per_second = training.failures_per_hour / HOUR_S
    repeated_share = per_second * training.iteration_s / 2
    if share < 2 * repeated_share:  # f* = 1
        return max(0.0, share - repeated_share) * training.iteration_s  # rounding may leave less than 0
    return share**2 / (2 * per_second)


def extra_ports(dp_groups: int, replicas: int = 1) -> int:
    """Return the switch ports for shadow nodes, each with a line-rate NIC, at one stream per port."""
    return STREAMS_PER_DP_GROUP * dp_groups * replicas


def extra_ports_share(dp_groups: int, gpus: int, replicas: int = 1) -> float:
    """Return the extra ports as a share of the training cluster's.

    The paper's "less than 0.8%" results from two ports per GPU: its own, and an uplink of its switch.
    """
    return extra_ports(dp_groups, replicas) / (2 * gpus)
