"""The result of `checkmate cost` as data and tables: each scheme, in closed form and simulated. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
from rich.text import Text

from checkmate.base.wording import counted
from checkmate.output.tables import FittedTable
from checkmate.planner.cost import failures, model
from checkmate.planner.cost.failures import Spread
from checkmate.planner.cost.inputs import CostInputs
from checkmate.planner.cost.model import TrainingRun, Waste
from checkmate.planner.units import show_dollars, show_seconds

PERCENTILES: Final = (5, 50, 95)
_MAIN: Final = ("GPU-hours wasted", "dollars")


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
    slowed_gpu_hours: float
    """By which iterations take longer than without checkpoints."""
    restarting_gpu_hours: float
    wasted_gpu_hours: float
    gpu_dollars: float
    node_hours: float
    node_dollars: float
    dollars: float
    simulated: Simulated | None
    """`None` if no runs were requested."""

    @property
    def holds(self) -> bool:
        """True if the closed form is valid: at 1 failure, it misses nearly a third of repeated GPU-hours."""
        return self.failures_per_interval < 1


@dataclass(frozen=True)
class CostReport:
    """The complete result. `yours` has the user's checkpoint interval, if one is given."""

    inputs: CostInputs
    best: Scheme
    yours: Scheme | None
    checkmate: Scheme
    in_place: Scheme | None = None
    """Checkmate with recovery in place, if its time is given."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes, in the order of the table."""
        schemes = (self.best, self.yours, self.checkmate, self.in_place)
        return tuple(scheme for scheme in schemes if scheme)

    def savings(self, scheme: Scheme) -> tuple[float, float]:
        """Return the GPU-hours and dollars that Checkmate saves against another scheme."""
        checkmate = self.checkmate
        return scheme.wasted_gpu_hours - checkmate.wasted_gpu_hours, scheme.dollars - checkmate.dollars

    def data(self) -> dict[str, object]:
        """Return the report as data, for `--json`. `assumed` has keys as in the YAML."""
        inputs, training = self.inputs, self.inputs.training
        saved_gpu_hours, saved_dollars = self.savings(self.best)
        yours_saved = self.savings(self.yours) if self.yours else (None, None)
        return {
            "gpus": inputs.gpus,
            "failures_per_gpu_hour": inputs.failure_rate,
            "duration_s": inputs.duration,
            "iteration_s": inputs.iteration_s,
            "stall_s": inputs.stall_s,
            "slowdown": inputs.slowdown,
            "dollars_per_gpu_hour": inputs.price,
            "dollars_per_node_hour": inputs.node_price,
            "shadow_nodes": inputs.node_count,
            "dp_groups": inputs.group_count,
            "replicas": inputs.replicas,
            "restart_s": inputs.restart,
            "restart_in_place_s": inputs.restart_in_place,
            "failures_per_node_hour": inputs.node_failure_rate,
            "seeding_s": inputs.seeding,
            "disk_every_s": inputs.disk_every,
            "assumed": inputs.assumed,
            "failures": training.failures,
            "best_interval_iterations": model.best_interval_iterations(training, inputs.stall_s),
            "schemes": [asdict(scheme) for scheme in self.schemes],
            "saved_gpu_hours": saved_gpu_hours,
            "saved_dollars": saved_dollars,
            "yours_saved_gpu_hours": yours_saved[0],
            "yours_saved_dollars": yours_saved[1],
            "break_even_stall_s": _break_even_stall_s(inputs),
            "extra_ports": model.extra_ports(inputs.group_count, inputs.replicas),
            "extra_ports_share": model.extra_ports_share(inputs.group_count, inputs.gpus, inputs.replicas),
        }


def report(inputs: CostInputs) -> CostReport:
    """Compute the report. Raise `failures.NeverDone` if the simulation cannot run."""
    best_every = model.best_every_iterations(inputs.training, inputs.stall_s)
    best = _conventional(inputs, "conventional, best", best_every)
    every = inputs.every_iterations
    yours = None if every is None else _conventional(inputs, "conventional, yours", every)
    checkmate = _checkmate(inputs, "Checkmate", inputs.restart)
    if inputs.restart_in_place is None:
        return CostReport(inputs, best, yours, checkmate)
    in_place = _checkmate(inputs, "Checkmate, in place", inputs.restart_in_place)
    return CostReport(inputs, best, yours, checkmate, in_place)


def _conventional(inputs: CostInputs, name: str, every: int) -> Scheme:
    spread = None
    if inputs.runs:
        spread = failures.simulate_conventional(
            inputs.training, inputs.stall_s, every, inputs.restart, inputs.runs, inputs.seed
        )
    waste = model.conventional_waste(inputs.training, inputs.stall_s, every)
    waste = replace(waste, restarting_gpu_hours=model.restarting_gpu_hours(inputs.training, inputs.restart))
    return _scheme(inputs, inputs.training, name, every, inputs.stall_s, waste, 0.0, spread)


def _checkmate(inputs: CostInputs, name: str, restart_s: float) -> Scheme:
    spread, training = None, inputs.training.slowed(inputs.slowdown)
    if inputs.runs:
        spread = failures.simulate_checkmate(training, inputs.shadow, restart_s, inputs.runs, inputs.seed)
    waste = model.checkmate_waste(inputs.training, inputs.slowdown)
    waste = replace(waste, restarting_gpu_hours=model.restarting_gpu_hours(training, restart_s))
    node_hours = model.node_hours(training.duration_hours, inputs.node_count)
    return _scheme(inputs, training, name, 1, 0.0, waste, node_hours, spread)


def _break_even_stall_s(inputs: CostInputs) -> float:
    return model.break_even_stall_s(inputs.training, inputs.prices, inputs.node_count, inputs.slowdown)


def _scheme(
    inputs: CostInputs,
    training: TrainingRun,
    name: str,
    every: int,
    stall_s: float,
    waste: Waste,
    node_hours: float,
    spread: Spread | None,
) -> Scheme:
    gpu_dollars, node_dollars = model.dollars(waste, inputs.prices, node_hours)
    return Scheme(
        name=name,
        every_iterations=every,
        interval_s=every * training.iteration_s,
        failures_per_interval=model.failures_per_interval(training, stall_s, every),
        repeated_gpu_hours=waste.repeated_gpu_hours,
        stalled_gpu_hours=waste.stalled_gpu_hours,
        slowed_gpu_hours=waste.slowed_gpu_hours,
        restarting_gpu_hours=waste.restarting_gpu_hours,
        wasted_gpu_hours=waste.gpu_hours,
        gpu_dollars=gpu_dollars,
        node_hours=node_hours,
        node_dollars=node_dollars,
        dollars=gpu_dollars + node_dollars,
        simulated=_simulated(inputs, spread, waste, node_dollars) if spread else None,
    )


def _simulated(inputs: CostInputs, spread: Spread, waste: Waste, node_dollars: float) -> Simulated:
    gpus = inputs.gpus
    wasted = spread.wasted_hours * gpus + waste.slowed_gpu_hours
    percentiles = np.percentile(wasted, PERCENTILES)
    return Simulated(
        runs=len(wasted),
        wasted_gpu_hours_mean=float(wasted.mean()),
        wasted_gpu_hours={f"p{at}": float(value) for at, value in zip(PERCENTILES, percentiles, strict=True)},
        repeated_gpu_hours_mean=float(spread.repeated_hours.mean()) * gpus,
        stalled_gpu_hours_mean=float(spread.stalled_hours.mean()) * gpus,
        restarting_gpu_hours_mean=float(spread.restarting_hours.mean()) * gpus,
        dollars_mean=float(wasted.mean()) * inputs.price + node_dollars,
        failures_mean=float(spread.failures.mean()),
        disk_fallbacks_mean=float(spread.fallbacks.mean()),
    )


def inputs_table(report: CostReport) -> FittedTable:
    """Return a table of the inputs, by option; assumed ones are marked."""
    table = FittedTable("", "input", "value", "", numbers=("value",))
    for key, text in _values(report.inputs):
        mark = Text("assumed", "yellow") if key in report.inputs.assumed else Text("given")
        table.add_row(key.replace("_", "-"), text, mark)
    return table


def _values(inputs: CostInputs) -> list[tuple[str, str]]:
    rows = [
        ("gpus", f"{inputs.gpus:,}"),
        ("failure_rate", f"{inputs.failure_rate:.3g} per GPU-hour"),
        ("duration", show_seconds(inputs.duration)),
        ("iteration", show_seconds(inputs.iteration_s)),
        ("stall", show_seconds(inputs.stall_s)),
        ("slowdown", f"{100 * inputs.slowdown:.3g}%"),
        ("price", f"${inputs.price:,.2f} per GPU-hour"),
        ("node_price", f"${inputs.node_price:,.2f} per node-hour"),
        ("shadow_nodes", f"{inputs.node_count:,}"),
        ("dp_groups", f"{inputs.group_count:,}"),
        ("replicas", f"{inputs.replicas:,}"),
        ("restart", show_seconds(inputs.restart)),
    ]
    if inputs.restart_in_place is not None:
        rows.append(("restart_in_place", show_seconds(inputs.restart_in_place)))
    simulated = [
        ("node_failure_rate", f"{inputs.node_failure_rate:.3g} per node-hour"),
        ("seeding", show_seconds(inputs.seeding)),
        ("disk_every", show_seconds(inputs.disk_every)),
    ]
    return [*rows, *(simulated if inputs.runs else [])]


def schemes_table(report: CostReport) -> FittedTable:
    """Return a table of all schemes: the closed form, and the simulation if there is one."""
    names = [scheme.name.replace(", ", ",\n") for scheme in report.schemes]
    table = FittedTable("", "over the run", *names, numbers=names)
    _add(table, [_rows(scheme) for scheme in report.schemes])
    if runs := [_simulated_rows(scheme.simulated, scheme) for scheme in report.schemes if scheme.simulated]:
        table.add_section()
        _add(table, runs)
    return table


def _add(table: FittedTable, columns: list[list[tuple[str, str]]]) -> None:
    """Add rows of which each column has the label and its own cell."""
    for row in zip(*columns, strict=True):
        label = row[0][0]
        table.add_row(label, *(cell for _, cell in row), style="bold" if label in _MAIN else "")


def _rows(scheme: Scheme) -> list[tuple[str, str]]:
    return [
        ("iterations (interval)", f"{scheme.every_iterations:,} ({show_seconds(scheme.interval_s)})"),
        ("GPU-hours repeated", f"{scheme.repeated_gpu_hours:,.0f}"),
        ("GPU-hours stalled", f"{scheme.stalled_gpu_hours:,.0f}"),
        ("GPU-hours slowed", f"{scheme.slowed_gpu_hours:,.0f}"),
        ("GPU-hours in restarts", f"{scheme.restarting_gpu_hours:,.0f}"),
        ("GPU-hours wasted", f"{scheme.wasted_gpu_hours:,.0f}"),
        ("CPU-node hours", f"{scheme.node_hours:,.0f}"),
        ("dollars", show_dollars(scheme.dollars)),
    ]


def _simulated_rows(simulated: Simulated, scheme: Scheme) -> list[tuple[str, str]]:
    spread = simulated.wasted_gpu_hours
    return [
        (f"in {simulated.runs:,} simulated runs", ""),
        ("GPU-hours wasted, mean", f"{simulated.wasted_gpu_hours_mean:,.0f}"),
        ("  in restarts", f"{simulated.restarting_gpu_hours_mean:,.0f}"),
        ("  5% of runs below", f"{spread['p5']:,.0f}"),
        ("  95% of runs below", f"{spread['p95']:,.0f}"),
        ("dollars, mean", show_dollars(simulated.dollars_mean)),
        ("failures, mean", f"{simulated.failures_mean:,.1f}"),
        ("  restored from disk", f"{simulated.disk_fallbacks_mean:,.2f}" if scheme.node_hours else "all"),
    ]


def sentences(report: CostReport) -> Iterator[str]:
    """Yield conclusions from the closed form."""
    inputs, training = report.inputs, report.inputs.training
    yield f"{training.failures:,.1f} failures are expected in {show_seconds(inputs.duration)}."
    stall_s = _break_even_stall_s(inputs)
    yield (
        "Compared with conventional checkpoints at the best interval, Checkmate "
        f"{_saving_words(*report.savings(report.best))}. "
        f"It costs less if a checkpoint stalls for more than {show_seconds(stall_s)}."
    )
    if report.yours:
        interval = counted(report.yours.every_iterations, "iteration")
        saved_words = _saving_words(*report.savings(report.yours))
        yield f"Compared with yours, a checkpoint every {interval}, Checkmate {saved_words}."
    if report.in_place:
        gpu_hours, dollars = report.savings(report.in_place)
        saved_words = _saving_words(-gpu_hours, -dollars)
        yield f"Compared with Checkmate and a restart of all ranks, recovery in place {saved_words}."
    share = model.extra_ports_share(inputs.group_count, inputs.gpus, inputs.replicas)
    yield (
        f"It needs {counted(inputs.node_count, 'shadow node')}, "
        f"{model.extra_ports(inputs.group_count, inputs.replicas):,} switch ports "
        f"and as many NICs, with transceivers: {share:.2%} of the cluster's."
    )


def _saving_words(gpu_hours: float, dollars: float) -> str:
    more_hours, more_dollars = ("less" if value >= 0 else "more" for value in (gpu_hours, dollars))
    return (
        f"wastes {abs(gpu_hours):,.0f} GPU-hours {more_hours}, "
        f"and costs {show_dollars(abs(dollars))} {more_dollars}"
    )
