"""The result of `checkmate cost` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from checkmate.planner.cost import model
from checkmate.planner.cost.inputs import CostInputs
from checkmate.planner.cost.report import Report, Scheme, Simulated
from checkmate.planner.units import show_dollars, show_seconds
from checkmate.wording import counted


def values(report: Report) -> Table:
    """Return a table of the inputs, by option; assumed ones are marked."""
    table = Table("inputs", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("")
    for key, shown in _values(report.inputs):
        mark = "[yellow]assumed[/yellow]" if key in report.inputs.assumed else "given"
        table.add_row(key.replace("_", "-"), shown, mark)
    return table


def _values(inputs: CostInputs) -> list[tuple[str, str]]:
    shown = [
        ("gpus", f"{inputs.gpus:,}"),
        ("failure_rate", f"{inputs.failure_rate:.3g} per GPU-hour"),
        ("duration", show_seconds(inputs.duration)),
        ("iteration", show_seconds(inputs.iteration_s)),
        ("stall", show_seconds(inputs.stall_s)),
        ("price", f"${inputs.price:,.2f} per GPU-hour"),
        ("node_price", f"${inputs.node_price:,.2f} per node-hour"),
        ("shadow_nodes", f"{inputs.node_count:,}"),
        ("dp_groups", f"{inputs.group_count:,}"),
        ("replicas", f"{inputs.replicas:,}"),
    ]
    simulated = [
        ("node_failure_rate", f"{inputs.node_failure_rate:.3g} per node-hour"),
        ("seeding", show_seconds(inputs.seeding)),
        ("disk_every", show_seconds(inputs.disk_every)),
        ("restart", show_seconds(inputs.restart)),
    ]
    return [*shown, *(simulated if inputs.runs else [])]


def schemes(report: Report) -> Table:
    """Return a table of all schemes: the closed form, and the simulation if there is one."""
    table = Table("over the run")
    for scheme in report.schemes:
        table.add_column(scheme.name.replace(", ", ",\n"), justify="right")
    _add(table, [_rows(scheme) for scheme in report.schemes])
    if runs := [_simulated_rows(scheme.simulated, scheme) for scheme in report.schemes if scheme.simulated]:
        table.add_section()
        _add(table, runs)
    return table


def _add(table: Table, columns: list[list[tuple[str, str]]]) -> None:
    """Add rows of which each column has the label and its own cell."""
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(cell for _, cell in row))


def _rows(scheme: Scheme) -> list[tuple[str, str]]:
    return [
        ("iterations (interval)", f"{scheme.every_iterations:,} ({show_seconds(scheme.interval_s)})"),
        ("GPU-hours repeated", f"{scheme.repeated_gpu_hours:,.0f}"),
        ("GPU-hours stalled", f"{scheme.stalled_gpu_hours:,.0f}"),
        ("[bold]GPU-hours wasted[/bold]", f"[bold]{scheme.wasted_gpu_hours:,.0f}[/bold]"),
        ("CPU-node hours", f"{scheme.node_hours:,.0f}"),
        ("[bold]dollars[/bold]", f"[bold]{show_dollars(scheme.dollars)}[/bold]"),
    ]


def _simulated_rows(found: Simulated, scheme: Scheme) -> list[tuple[str, str]]:
    spread = found.wasted_gpu_hours
    return [
        (f"in {found.runs:,} simulated runs", ""),
        ("GPU-hours wasted, mean", f"{found.wasted_gpu_hours_mean:,.0f}"),
        ("  in restarts", f"{found.restarting_gpu_hours_mean:,.0f}"),
        ("  5% of runs below", f"{spread['p5']:,.0f}"),
        ("  95% of runs below", f"{spread['p95']:,.0f}"),
        ("dollars, mean", show_dollars(found.dollars_mean)),
        ("failures, mean", f"{found.failures_mean:,.1f}"),
        ("  restored from disk", f"{found.disk_fallbacks_mean:,.2f}" if scheme.node_hours else "all"),
    ]


def sentences(report: Report) -> Iterator[str]:
    """Yield conclusions from the closed form."""
    inputs, training = report.inputs, report.inputs.training
    yield f"{training.failures:,.1f} failures are expected in {show_seconds(inputs.duration)}."
    stall_s = model.break_even_stall_s(training, inputs.prices, inputs.node_count)
    yield (
        "Compared with conventional checkpoints at the best interval, Checkmate "
        f"{_saved(*report.saved(report.best))}. "
        f"It costs less if a checkpoint stalls for more than {show_seconds(stall_s)}."
    )
    if report.yours:
        every = counted(report.yours.every_iterations, "iteration")
        saved = _saved(*report.saved(report.yours))
        yield f"Compared with yours, a checkpoint every {every}, Checkmate {saved}."
    share = model.extra_ports_share(inputs.group_count, inputs.gpus, inputs.replicas)
    yield (
        f"It needs {counted(inputs.node_count, 'shadow node')}, "
        f"{model.extra_ports(inputs.group_count, inputs.replicas):,} switch ports "
        f"and as many NICs, with transceivers: {share:.2%} of the cluster's."
    )


def _saved(gpu_hours: float, dollars: float) -> str:
    more_hours, more_dollars = ("less" if value >= 0 else "more" for value in (gpu_hours, dollars))
    return (
        f"wastes {abs(gpu_hours):,.0f} GPU-hours {more_hours}, "
        f"and costs {show_dollars(abs(dollars))} {more_dollars}"
    )
