"""The result of `checkmate cost` as data: each scheme, in closed form and simulated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from checkmate.planner.cost import failures, model
from checkmate.planner.cost.failures import Spread
from checkmate.planner.cost.inputs import CostInputs
from checkmate.planner.cost.model import Waste

PERCENTILES: Final = (5, 50, 95)


@dataclass(frozen=True)
class Simulated:
    """Statistics of simulated runs, including restarts, and failures during stalls and restarts."""

    runs: int
    wasted_gpu_hours_mean: float
    wasted_gpu_hours: Mapping[str, float]
    """By percentile: `p5`, `p50`, `p95`."""
    repeated_gpu_hours_mean: float
    stalled_gpu_hours_mean: float
    restarting_gpu_hours_mean: float
    dollars_mean: float
    failures_mean: float
    disk_fallbacks_mean: float
    """Number of failures after which only the checkpoint on disk was left."""


@dataclass(frozen=True)
class Scheme:
    """A checkpointing scheme: its waste and cost over the run."""

    name: str
    every_iterations: int
    interval_s: float
    failures_per_interval: float
    """Expected number; the closed form is valid if it is far below 1."""
    repeated_gpu_hours: float
    stalled_gpu_hours: float
    wasted_gpu_hours: float
    gpu_dollars: float
    node_hours: float
    node_dollars: float
    dollars: float
    simulated: Simulated | None
    """`None` if no runs were requested."""

    @property
    def holds(self) -> bool:
        """Whether the closed form is valid: at 1 failure, it misses nearly a third of repeated GPU-hours."""
        return self.failures_per_interval < 1


@dataclass(frozen=True)
class Report:
    """The complete result. `saved_*` compare Checkmate with optimal conventional checkpoints."""

    gpus: int
    failures_per_gpu_hour: float
    duration_s: float
    iteration_s: float
    stall_s: float
    dollars_per_gpu_hour: float
    dollars_per_node_hour: float
    shadow_nodes: int
    dp_groups: int
    replicas: int
    restart_s: float
    failures_per_node_hour: float
    seeding_s: float
    disk_every_s: float
    assumed: tuple[str, ...]
    """Keys of assumed values, as in the YAML."""
    failures: float
    best_interval_iterations: float
    schemes: tuple[Scheme, ...]
    saved_gpu_hours: float
    saved_dollars: float
    yours_saved_gpu_hours: float | None
    yours_saved_dollars: float | None
    """The same for the user's interval, or `None`."""
    break_even_stall_s: float
    extra_ports: int
    extra_ports_share: float

    def data(self) -> dict[str, object]:
        """Return the report as data, for `--json`."""
        return asdict(self)


def report(inputs: CostInputs) -> Report:
    """Compute the report. Raise `failures.NeverDone` if the simulation cannot run."""
    training, stall_s = inputs.training, inputs.stall_s
    best_every = model.best_every_iterations(training, stall_s)
    schemes = [_conventional(inputs, "conventional, best", best_every)]
    if inputs.every_iterations is not None:
        schemes.append(_conventional(inputs, "conventional, yours", inputs.every_iterations))
    yours = schemes[1] if len(schemes) > 1 else None
    checkmate = _checkmate(inputs)
    return Report(
        gpus=training.gpus,
        failures_per_gpu_hour=training.failures_per_gpu_hour,
        duration_s=inputs.duration,
        iteration_s=training.iteration_s,
        stall_s=stall_s,
        dollars_per_gpu_hour=inputs.price,
        dollars_per_node_hour=inputs.node_price,
        shadow_nodes=inputs.node_count,
        dp_groups=inputs.group_count,
        replicas=inputs.replicas,
        restart_s=inputs.restart,
        failures_per_node_hour=inputs.node_failure_rate,
        seeding_s=inputs.seeding,
        disk_every_s=inputs.disk_every,
        assumed=inputs.assumed,
        failures=training.failures,
        best_interval_iterations=model.best_interval_iterations(training, stall_s),
        schemes=(*schemes, checkmate),
        saved_gpu_hours=schemes[0].wasted_gpu_hours - checkmate.wasted_gpu_hours,
        saved_dollars=schemes[0].dollars - checkmate.dollars,
        yours_saved_gpu_hours=yours.wasted_gpu_hours - checkmate.wasted_gpu_hours if yours else None,
        yours_saved_dollars=yours.dollars - checkmate.dollars if yours else None,
        break_even_stall_s=model.break_even_stall_s(training, inputs.prices, inputs.node_count),
        extra_ports=model.extra_ports(inputs.group_count, inputs.replicas),
        extra_ports_share=model.extra_ports_share(inputs.group_count, training.gpus, inputs.replicas),
    )


def _conventional(inputs: CostInputs, name: str, every_iterations: int) -> Scheme:
    waste = model.conventional_waste(inputs.training, inputs.stall_s, every_iterations)
    simulated = None
    if inputs.runs:
        spread = failures.simulate_conventional(
            inputs.training, inputs.stall_s, every_iterations, inputs.restart, inputs.runs, inputs.seed
        )
        simulated = _simulated(inputs, spread, node_dollars=0.0)
    return _scheme(inputs, name, every_iterations, inputs.stall_s, waste, 0.0, simulated)


def _checkmate(inputs: CostInputs) -> Scheme:
    training = inputs.training
    node_hours = model.node_hours(training.duration_hours, inputs.node_count)
    simulated = None
    if inputs.runs:
        spread = failures.simulate_checkmate(
            training, inputs.shadow, inputs.restart, inputs.runs, inputs.seed
        )
        simulated = _simulated(inputs, spread, node_hours * inputs.node_price)
    return _scheme(inputs, "Checkmate", 1, 0.0, model.checkmate_waste(training), node_hours, simulated)


def _scheme(
    inputs: CostInputs,
    name: str,
    every: int,
    stall_s: float,
    waste: Waste,
    node_hours: float,
    simulated: Simulated | None,
) -> Scheme:
    gpu_dollars, node_dollars = model.dollars(waste, inputs.prices, node_hours)
    return Scheme(
        name=name,
        every_iterations=every,
        interval_s=every * inputs.iteration_s,
        failures_per_interval=model.failures_per_interval(inputs.training, stall_s, every),
        repeated_gpu_hours=waste.repeated_gpu_hours,
        stalled_gpu_hours=waste.stalled_gpu_hours,
        wasted_gpu_hours=waste.gpu_hours,
        gpu_dollars=gpu_dollars,
        node_hours=node_hours,
        node_dollars=node_dollars,
        dollars=gpu_dollars + node_dollars,
        simulated=simulated,
    )


def _simulated(inputs: CostInputs, spread: Spread, node_dollars: float) -> Simulated:
    gpus = inputs.gpus
    wasted = spread.wasted_hours * gpus
    found = np.percentile(wasted, PERCENTILES)
    return Simulated(
        runs=len(wasted),
        wasted_gpu_hours_mean=float(wasted.mean()),
        wasted_gpu_hours={f"p{at}": float(value) for at, value in zip(PERCENTILES, found, strict=True)},
        repeated_gpu_hours_mean=float(spread.repeated_hours.mean()) * gpus,
        stalled_gpu_hours_mean=float(spread.stalled_hours.mean()) * gpus,
        restarting_gpu_hours_mean=float(spread.restarting_hours.mean()) * gpus,
        dollars_mean=float(wasted.mean()) * inputs.price + node_dollars,
        failures_mean=float(spread.failures.mean()),
        disk_fallbacks_mean=float(spread.fallbacks.mean()),
    )
