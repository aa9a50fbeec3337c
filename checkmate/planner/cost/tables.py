"""The result of `checkmate cost` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from checkmate.planner.cost.report import Report, Scheme, Simulated
from checkmate.planner.units import show_dollars, show_seconds
from checkmate.wording import counted


def values(report: Report) -> Table:
    """Return a table of the inputs, by option; assumed ones are marked."""
    table = Table("inputs", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("")
    for key, shown in _values(report):
        mark = "[yellow]assumed[/yellow]" if key in report.assumed else "given"
        table.add_row(key.replace("_", "-"), shown, mark)
    return table


def _values(report: Report) -> Iterator[tuple[str, str]]:
    yield "gpus", f"{report.gpus:,}"
    yield "failure_rate", f"{report.failures_per_gpu_hour:.3g} per GPU-hour"
    yield "duration", show_seconds(report.duration_s)
    yield "iteration", show_seconds(report.iteration_s)
    yield "stall", show_seconds(report.stall_s)
    yield "price", f"${report.dollars_per_gpu_hour:,.2f} per GPU-hour"
    yield "node_price", f"${report.dollars_per_node_hour:,.2f} per node-hour"
    yield "shadow_nodes", f"{report.shadow_nodes:,}"
    yield "dp_groups", f"{report.dp_groups:,}"
    yield "replicas", f"{report.replicas:,}"
    if all(scheme.simulated for scheme in report.schemes):
        yield "node_failure_rate", f"{report.failures_per_node_hour:.3g} per node-hour"
        yield "seeding", show_seconds(report.seeding_s)
        yield "disk_every", show_seconds(report.disk_every_s)
        yield "restart", show_seconds(report.restart_s)


def schemes(report: Report) -> Table:
    """Return a table of all schemes: the closed form, and the simulation if there is one."""
    table = Table("over the run")
    for scheme in report.schemes:
        table.add_column(scheme.name.replace(", ", ",\n"), justify="right")
    for what, *cells in zip(*map(_rows, report.schemes), strict=True):
        table.add_row(what[0], what[1], *(cell[1] for cell in cells))
    simulated = [(scheme.simulated, scheme) for scheme in report.schemes]
    runs = [_simulated_rows(found, scheme) for found, scheme in simulated if found]
    if runs:
        table.add_section()
        for what, *cells in zip(*runs, strict=True):
            table.add_row(what[0], what[1], *(cell[1] for cell in cells))
    return table


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
    yield f"{report.failures:,.1f} failures are expected in {show_seconds(report.duration_s)}."
    saved = _saved(report.saved_gpu_hours, report.saved_dollars)
    yield (
        f"Compared with conventional checkpoints at the best interval, Checkmate {saved}. "
        f"It costs less if a checkpoint stalls for more than {show_seconds(report.break_even_stall_s)}."
    )
    if report.yours_saved_gpu_hours is not None and report.yours_saved_dollars is not None:
        every = counted(report.schemes[1].every_iterations, "iteration")
        saved = _saved(report.yours_saved_gpu_hours, report.yours_saved_dollars)
        yield f"Compared with yours, a checkpoint every {every}, Checkmate {saved}."
    yield (
        f"It needs {counted(report.shadow_nodes, 'shadow node')}, {report.extra_ports:,} switch ports "
        f"and as many NICs, with transceivers: {report.extra_ports_share:.2%} of the cluster's."
    )


def _saved(gpu_hours: float, dollars: float) -> str:
    more_hours, more_dollars = ("less" if value >= 0 else "more" for value in (gpu_hours, dollars))
    return (
        f"wastes {abs(gpu_hours):,.0f} GPU-hours {more_hours}, "
        f"and costs {show_dollars(abs(dollars))} {more_dollars}"
    )
