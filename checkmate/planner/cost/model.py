"""What checkpointing costs: the paper's model in closed form (its Appendix B). Pure.

Both sides pay for work that failures undo, half a checkpoint interval each time on average. Conventional
checkpoints also stall training. Checkmate's don't: they cost the hours of its CPU nodes.

Two notes on what is printed there:

- Checkmate's cost is given as P_G·λN²D/2 + P_C·D·C, which has lost a factor t that the text before it has.
  Without it, the units don't fit; with it, the paper's own 4,367 GPU-hours come out.
- f, called a frequency, counts the iterations from one checkpoint to the next: here `every_iterations`.

A failure's own repair (detecting it, restarting) is in neither, since both pay it alike; `failures` has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from checkmate.planner.units import HOUR_S

STREAMS_PER_DP_GROUP: Final = 2
"""One from each boundary rank, whatever the group's size (the paper's "Network resource planning")."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its GPUs, how often one fails, how long it would take without failures."""

    gpus: int
    failures_per_gpu_hour: float
    duration_hours: float
    iteration_s: float

    @property
    def failures_per_hour(self) -> float:
        """Of the whole cluster (λN): any GPU's failure ends the iteration of all."""
        return self.failures_per_gpu_hour * self.gpus

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run without failures (ND)."""
        return self.gpus * self.duration_hours

    @property
    def iterations(self) -> float:
        """Iterations of the run."""
        return self.duration_hours * HOUR_S / self.iteration_s

    @property
    def failures(self) -> float:
        """Expected number of failures (λND)."""
        return self.failures_per_hour * self.duration_hours


@dataclass(frozen=True)
class Prices:
    """Dollars for an hour of one GPU, and of one CPU node."""

    dollars_per_gpu_hour: float
    dollars_per_node_hour: float


@dataclass(frozen=True)
class Waste:
    """GPU-hours without progress, in expectation: repeated after failures, and stalled by checkpoints."""

    repeated_gpu_hours: float
    stalled_gpu_hours: float

    @property
    def gpu_hours(self) -> float:
        """Both."""
        return self.repeated_gpu_hours + self.stalled_gpu_hours


def conventional_waste(training: TrainingRun, stall_s: float, every_iterations: float) -> Waste:
    """Waste of checkpoints that stall training for `stall_s` each, one every so many iterations.

    ND(λNft/2 + ω/(ft)), the paper's Wasted_SOTA(f).
    """
    interval_hours = every_iterations * training.iteration_s / HOUR_S
    return Waste(
        repeated_gpu_hours=training.gpu_hours * training.failures_per_hour * interval_hours / 2,
        stalled_gpu_hours=training.gpu_hours * stall_s / HOUR_S / interval_hours,
    )


def failures_per_interval(training: TrainingRun, stall_s: float, every_iterations: float) -> float:
    """Failures expected from one checkpoint to the next: Λ(τ+ω).

    The closed form has half an interval repeated for each, which is so where this is far below 1.
    """
    return training.failures_per_hour * (every_iterations * training.iteration_s + stall_s) / HOUR_S


def checkmate_waste(training: TrainingRun) -> Waste:
    """Waste of a checkpoint in each iteration that stalls nothing: λN²Dt/2."""
    return conventional_waste(training, stall_s=0.0, every_iterations=1)


def best_interval_iterations(training: TrainingRun, stall_s: float) -> float:
    """The paper's f*, a real number: from one checkpoint to the next where waste is least; at least 1.

    sqrt(2ω / (λNt²)), which is Young's first-order optimum in iterations.
    """
    per_second = training.failures_per_hour / HOUR_S
    return max(1.0, math.sqrt(2 * stall_s / per_second) / training.iteration_s)


def best_every_iterations(training: TrainingRun, stall_s: float) -> int:
    """The best whole number of iterations between checkpoints: one of f*'s two neighbours, within the run."""
    last = max(1, math.floor(training.iterations))
    below = min(last, math.floor(best_interval_iterations(training, stall_s)))
    return min(
        below, min(last, below + 1), key=lambda every: conventional_waste(training, stall_s, every).gpu_hours
    )


def least_waste(training: TrainingRun, stall_s: float) -> Waste:
    """Waste of conventional checkpoints at the paper's f*: ND·sqrt(2ωλN) where f* > 1."""
    return conventional_waste(training, stall_s, best_interval_iterations(training, stall_s))


def saved_gpu_hours(training: TrainingRun, stall_s: float) -> float:
    """GPU-hours over the run that Checkmate saves against conventional checkpoints at their best."""
    return least_waste(training, stall_s).gpu_hours - checkmate_waste(training).gpu_hours


def node_hours(duration_hours: float, shadow_nodes: int) -> float:
    """CPU-node hours of the shadow nodes (DC)."""
    return duration_hours * shadow_nodes


def conventional_dollars(waste: Waste, prices: Prices) -> float:
    """What wasted GPU-hours cost: Cost_SOTA."""
    return prices.dollars_per_gpu_hour * waste.gpu_hours


def checkmate_dollars(training: TrainingRun, prices: Prices, shadow_nodes: int) -> float:
    """Wasted GPU-hours and shadow nodes: P_G·λN²Dt/2 + P_C·D·C."""
    nodes = prices.dollars_per_node_hour * node_hours(training.duration_hours, shadow_nodes)
    return prices.dollars_per_gpu_hour * checkmate_waste(training).gpu_hours + nodes


def break_even_stall_s(training: TrainingRun, prices: Prices, shadow_nodes: int) -> float:
    """The stall of a conventional checkpoint from which on Checkmate costs less, in seconds.

    Solves Cost_Checkmate = Cost*_SOTA for ω, in both branches of f*, with the nodes' price as a share of
    the GPUs': P_C·C / (P_G·N).
    """
    share = prices.dollars_per_node_hour * shadow_nodes / (prices.dollars_per_gpu_hour * training.gpus)
    per_second = training.failures_per_hour / HOUR_S
    repeated_share = per_second * training.iteration_s / 2
    if share < repeated_share:  # f* = 1
        return share * training.iteration_s
    return (repeated_share + share) ** 2 / (2 * per_second)


def extra_ports(dp_groups: int, replicas: int = 1) -> int:
    """Switch ports for shadow nodes, and as many line-rate NICs with transceivers, at one stream a port."""
    return STREAMS_PER_DP_GROUP * dp_groups * replicas


def extra_ports_share(dp_groups: int, gpus: int, replicas: int = 1) -> float:
    """Extra ports as a share of the training cluster's.

    The paper's "less than 0.8%" comes out with two ports for each GPU: its own, and an uplink of its switch.
    """
    return extra_ports(dp_groups, replicas) / (2 * gpus)
