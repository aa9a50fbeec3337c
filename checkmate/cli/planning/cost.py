"""`checkmate cost`: compare the cost of conventional checkpoints and of Checkmate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkmate.cli.common import AsJson, UsageFault, err, out, print_json, show_errors
from checkmate.cli.planning.options import PlotFile, check_picture, draw
from checkmate.output.consoles import spinner

if TYPE_CHECKING:
    from checkmate.planner.cost.inputs import CostInputs
    from checkmate.planner.cost.report import CostReport, Scheme

_File = Annotated[Path | None, typer.Argument(help="YAML file of these values; options override it.")]
_Value = str | None


def _option(name: str, text: str, default: str = "") -> typer.models.OptionInfo:
    """Return an option that shows the planner's default, which the planner applies."""
    help_text = f"{text} [default: {default}]" if default else text
    option: typer.models.OptionInfo = typer.Option(name, help=help_text, metavar="VALUE", show_default=False)
    return option


@show_errors
def cost(
    context: typer.Context,
    file: _File = None,
    gpus: Annotated[_Value, _option("--gpus", "Number of GPUs.", "16384")] = None,
    failure_rate: Annotated[
        _Value,
        _option(
            "--failure-rate", "Failures per GPU-hour: 2e-5, 0.17/y, or as observed.", "419 in 54d on 16384"
        ),
    ] = None,
    duration: Annotated[_Value, _option("--duration", "Training time without failures.", "54d")] = None,
    iteration: Annotated[_Value, _option("--iteration", "Duration of an iteration.", "4.58s")] = None,
    stall: Annotated[
        _Value, _option("--stall", "Time that a conventional checkpoint stops training.", "1.2s")
    ] = None,
    parameters: Annotated[
        _Value, _option("--parameters", "Model size, such as 405B; with --storage, instead of --stall.")
    ] = None,
    storage: Annotated[
        _Value, _option("--storage", "Bandwidth at which checkpoints are written: 2TB/s.")
    ] = None,
    slowdown: Annotated[
        _Value, _option("--slowdown", "Share by which Checkmate lengthens an iteration, such as 1%.", "0%")
    ] = None,
    every: Annotated[
        _Value,
        _option(
            "--every", "Checkpoint interval to compare with the optimum: 500 (iterations), 30min.", "best"
        ),
    ] = None,
    price: Annotated[_Value, _option("--price", "Dollars per GPU-hour.", "11.06")] = None,
    node_price: Annotated[_Value, _option("--node-price", "Dollars per shadow-node-hour.", "1.28")] = None,
    shadow_nodes: Annotated[
        _Value, _option("--shadow-nodes", "Number of shadow nodes.", "gpus / 128")
    ] = None,
    dp_groups: Annotated[
        _Value, _option("--dp-groups", "Number of DP groups; each needs two ports.", "gpus / 128")
    ] = None,
    replicas: Annotated[_Value, _option("--replicas", "Number of holders of each shard.", "1")] = None,
    node_failure_rate: Annotated[
        _Value, _option("--node-failure-rate", "Failures per shadow-node-hour.", "2e-5")
    ] = None,
    seeding: Annotated[
        _Value, _option("--seeding", "Time from a shadow node's failure until it is reseeded.", "5min")
    ] = None,
    disk_every: Annotated[
        _Value, _option("--disk-every", "Time between checkpoints that shadow nodes write to disk.", "1h")
    ] = None,
    restart: Annotated[
        _Value, _option("--restart", "Time from a failure until training resumes.", "0s")
    ] = None,
    restart_in_place: Annotated[
        _Value, _option("--restart-in-place", "The same if only the dead rank's process starts.")
    ] = None,
    runs: Annotated[_Value, _option("--runs", "Number of simulated runs; 0 for none.", "10000")] = None,
    seed: Annotated[_Value, _option("--seed", "Seed of the simulation.", "0")] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Compute the cost of conventional checkpoints and of Checkmate's, in GPU-hours and dollars.

    Uses the model of the Checkmate paper. All defaults are its figures for LLaMA3-405B; values that you do
    not specify are marked as assumed. A simulation of failures beside the closed form shows the spread.

    Example: checkmate cost --gpus 1024 --iteration 900ms --stall 2s --every 30min --price 3.50 --plot x.png
    """
    values = {name: value for name, value in context.params.items() if isinstance(value, str)}
    from checkmate.planner.cost.reading import read_inputs  # noqa: PLC0415

    inputs = read_inputs(file, values)
    if plot:
        check_picture(plot)
    report = _report(inputs)
    for scheme in report.schemes:
        if not scheme.holds:
            err.print(f"[yellow]too many failures:[/yellow] {_beyond(scheme)}", soft_wrap=True)
    if plot:
        _draw(plot, inputs)
    if as_json:
        print_json(report.data())
        return
    _print(report)
    if plot:
        out.print(f"\nfigures: {plot}", markup=False, soft_wrap=True)


def _report(inputs: CostInputs) -> CostReport:
    from checkmate.planner.cost.failures import NeverDone  # noqa: PLC0415
    from checkmate.planner.cost.model import best_every_iterations, failures_per_interval  # noqa: PLC0415
    from checkmate.planner.cost.report import report  # noqa: PLC0415

    try:
        with spinner(err, "simulating failures"):
            return report(inputs)
    except NeverDone as error:
        training, stall_s = inputs.training, inputs.stall_s
        interval = max(inputs.every_iterations or 1, best_every_iterations(training, stall_s))
        holds = failures_per_interval(training, stall_s, interval) < 1
        otherwise = "; or skip it with --runs 0" if holds else ""
        raise UsageFault(f"the simulation cannot run: {error}{otherwise}") from None


def _beyond(scheme: Scheme) -> str:
    """Explain why the closed form does not apply to a scheme."""
    return (
        f"{scheme.failures_per_interval:,.3g} are expected from one checkpoint to the next ({scheme.name}). "
        "The closed form assumes far fewer than 1, so its figures, savings included, are wrong here; "
        + ("see the simulated ones" if scheme.simulated else "training makes hardly any progress")
    )


def _draw(file: Path, inputs: CostInputs) -> None:
    def write() -> None:
        from checkmate.planner.cost.figures import write_figures  # noqa: PLC0415 - matplotlib takes a second

        write_figures(file, inputs.training, inputs.stall_s, inputs.every_iterations, inputs.slowdown)

    draw(file, write)


def _print(report: CostReport) -> None:
    from checkmate.planner.cost.report import inputs_table, schemes_table, sentences  # noqa: PLC0415

    expected, *rest = sentences(report)
    out.print(inputs_table(report))
    out.print(expected, markup=False, soft_wrap=True)
    out.print(schemes_table(report))
    for text in rest:
        out.print(text, markup=False, soft_wrap=True)
