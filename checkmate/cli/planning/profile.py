"""`checkmate profile`: measure this machine as a shadow node, and size a set of them for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TimeElapsedColumn

from checkmate.base import machine_memory
from checkmate.base.wording import counted
from checkmate.cli.common import AsJson, UsageFault, err, out, print_json, show_errors
from checkmate.cli.planning.options import (
    Dtype,
    IterationTime,
    Optimizer,
    PlotFile,
    ReceiveBuffer,
    check_picture,
    draw,
    quantity,
)
from checkmate.output.consoles import progress, spinner
from checkmate.planner.units import NODES_MAX
from checkmate.wire.tag import CHANNELS_MAX
from topologies.signals import unwinding

if TYPE_CHECKING:
    from checkmate.planner.models.named import Model
    from checkmate.planner.models.optimizers import NamedOptimizer
    from checkmate.planner.profile.sizing import Machine, Sizing
    from checkmate.planner.scaling import Profile, StepTimes


@dataclass(frozen=True)
class _Sized:
    """A model on 1, 2, ... nodes. `enough` is the smallest number that suffices, or `None`."""

    model: Model
    times: StepTimes
    sizings: list[Sizing]
    enough: Sizing | None


@show_errors
def profile(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Named model, or module:function; may be repeated."),
    ] = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = None,
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads", help="Numbers of threads to measure.", show_default="1,2,4,... up to all cores"
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=3600, help="Minimum duration of each measurement.")
    ] = 2.0,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Memory to use, such as 8GB.", show_default="70% of free memory", metavar="SIZE"
        ),
    ] = None,
    iteration_time: IterationTime = None,
    cores: Annotated[
        int | None,
        typer.Option("--cores", min=1, max=1024, help="Cores of a shadow node.", show_default="as here"),
    ] = None,
    node_memory: Annotated[
        str | None,
        typer.Option(
            "--node-memory", help="Memory of a shadow node.", show_default="as here", metavar="SIZE"
        ),
    ] = None,
    channels: Annotated[
        int,
        typer.Option(
            "--channels", min=1, max=CHANNELS_MAX, help="Channels of the ring; each has two streams a shard."
        ),
    ] = 1,
    receive_buffer: ReceiveBuffer = 64,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=NODES_MAX, help="Minimum number of nodes to show.")
    ] = 4,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine as a shadow node, and report how many such nodes a model needs.

    Receiving: bytes per second into buckets, over loopback. Stepping: the optimizer's step of each --model,
    by number of threads, and layer by layer if the model does not fit in memory. Run it on an idle machine
    like the shadow nodes; `plan --capacity --profile` reads the output of --json. Needs root only for
    receive buffers as large as a shadow node's.

    Example: checkmate profile --model GPT3-XL --iteration-time 1.5s --plot scaling.png
    """
    if plot:
        check_picture(plot)
    with spinner(err, "starting"):  # torch takes a second
        from checkmate.planner.models.named import load_model  # noqa: PLC0415
        from checkmate.planner.models.optimizers import NamedOptimizer  # noqa: PLC0415
        from checkmate.planner.profile import machine  # noqa: PLC0415
        from checkmate.planner.profile.sizing import Machine  # noqa: PLC0415
        from checkmate.planner.units import nbytes  # noqa: PLC0415
        from checkmate.planner.units import seconds as time_of  # noqa: PLC0415

    named_optimizer = NamedOptimizer(optimizer)
    if named_optimizer.copied:
        raise UsageFault(
            f"--optimizer {optimizer}: shadow nodes can't repeat its steps, which leaves nothing to measure; "
            "`plan --capacity` has the bytes of copies of its state"
        )
    loaded = [load_model(name, dtype) for name in dict.fromkeys(models or ["ResNet50"])]
    counts = _threads(threads, machine.cores())
    iteration = quantity("--iteration-time", iteration_time, time_of) if iteration_time else None
    room = int(quantity("--memory", memory, nbytes)) if memory else None
    node_room = int(quantity("--node-memory", node_memory, nbytes)) if node_memory else machine_memory.total()
    load = machine.load_average()
    if load > machine.BUSY * machine.cores():
        err.print(
            f"[yellow]busy:[/yellow] the load average is {load:.1f} on {counted(machine.cores(), 'core')}, "
            "which is the number of threads that ran, or waited to run, during the last minute; "
            "measurements will be slower than on an idle machine",
            soft_wrap=True,
        )
    with unwinding():
        measured, forced = _measure(loaded, named_optimizer, counts, seconds, room)
    node_cores = cores or machine.cores()
    rate = max(measured.receive_bytes_per_s.values())
    node = Machine(node_cores, node_room, rate, channels, receive_buffer << 20)
    sized = [_sized(model, named_optimizer, measured, node, iteration, nodes) for model in loaded]
    if plot:
        _draw(plot, sized, node_cores, iteration)
    if as_json:
        print_json(_data(measured, sized, load, forced, iteration))
        return
    _print(measured, sized, forced, iteration)
    if plot:
        out.print(f"figure: {plot}", markup=False, soft_wrap=True)


def _measure(
    models: Sequence[Model],
    optimizer: NamedOptimizer,
    threads: Sequence[int],
    seconds: float,
    room: int | None,
) -> tuple[Profile, bool]:
    """Measure everything; return also whether receive buffers were as large as a shadow node's."""
    from checkmate.planner.profile import machine, receive, step  # noqa: PLC0415
    from checkmate.planner.scaling import Profile  # noqa: PLC0415

    rates: dict[int, float] = {}
    for model in models:  # raises early for models that cannot be stepped
        step.samples_of(model, optimizer, room or machine.memory_available())
    with progress(err, TimeElapsedColumn()) as bar:
        task = bar.add_task("receiving", total=len(receive.NICS) + len(models) * len(threads))
        for nics in receive.NICS:
            bar.update(task, description=f"receiving, {counted(nics, 'NIC')}")
            for rate in receive.measure(nics, seconds):
                rates[nics] = rate
            bar.advance(task)
        steps = [
            step.measure(
                model,
                optimizer,
                threads,
                seconds,
                room or machine.memory_available(),
                lambda text, part: bar.update(task, description=text, advance=part),
            )
            for model in models
        ]
    return Profile(machine.cores(), rates, tuple(steps)), receive.may_force()


def _sized(
    model: Model,
    optimizer: NamedOptimizer,
    measured: Profile,
    node: Machine,
    iteration_s: float | None,
    least: int,
) -> _Sized:
    from checkmate.planner.profile.sizing import sizings  # noqa: PLC0415

    times = measured.steps_of(model, optimizer.name)
    node_sizings, enough = sizings(model, optimizer, times, node, iteration_s, least)
    return _Sized(model, times, node_sizings, enough)


def _data(
    measured: Profile, sized: Sequence[_Sized], load: float, forced: bool, iteration_s: float | None
) -> dict[str, object]:
    """Return what `plan --capacity --profile` reads, and sizes derived from it; in seconds and bytes."""
    from checkmate.planner.profile.tables import figures  # noqa: PLC0415

    return {
        **asdict(measured),
        "load_average": load,
        "receive_buffers_as_asked": forced,
        "outliers": [asdict(figure) for figure in figures(measured) if figure.outlier],
        "iteration_seconds": iteration_s,
        "sizes": [
            {
                "model": size.model.name,
                "nodes_needed": size.enough.nodes if size.enough else None,
                "nodes": [asdict(sizing) for sizing in size.sizings],
            }
            for size in sized
        ],
    }


def _print(measured: Profile, sized: Sequence[_Sized], forced: bool, iteration_s: float | None) -> None:
    from checkmate.planner.profile import tables  # noqa: PLC0415

    figures = tables.figures(measured)
    out.print(tables.measured(figures))
    if any(figure.outlier for figure in figures):
        err.print(
            "[yellow]outliers:[/yellow] some figures contradict others, perhaps because the machine was busy "
            "or has too few cores; measure again, or increase --seconds",
            soft_wrap=True,
        )
    for size in sized:
        name = size.model.name
        if size.times.by_layer:
            text = f"{name} did not fit in memory: measured by layer, and times added up"
            out.print(text, markup=False, soft_wrap=True)
        out.print(tables.predicted(name, size.times, size.sizings, iteration_s))
        if iteration_s is not None:
            out.print(tables.verdict(name, size.sizings, size.enough), markup=False)
    if not forced:
        err.print("[yellow]note:[/yellow] receive buffers were smaller than a node's (no CAP_NET_ADMIN)")


def _threads(text: str | None, cores: int) -> list[int]:
    """Return numbers of threads, ascending. Raise `UsageFault` if they are wrong."""
    if text is None:
        powers = [1 << i for i in range(cores.bit_length()) if 1 << i < cores]
        return [*powers, cores]
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > cores:
        raise UsageFault(
            f"--threads must be numbers from 1 to {cores} (this machine's cores), such as 1,{cores}"
        )
    return counts


def _draw(file: Path, sized: Sequence[_Sized], cores: int, iteration_s: float | None) -> None:
    """Plot all nodes that the tables have, so that the number that suffices is among them."""
    nodes = max(len(size.sizings) for size in sized)
    enough = {size.model.name: size.enough for size in sized if size.enough and iteration_s is not None}

    def write() -> None:
        from checkmate.planner.profile.figure import write_figure  # noqa: PLC0415 - matplotlib takes a second

        lines = [(size.model, size.times) for size in sized]
        write_figure(file, lines, cores, nodes, iteration_s, enough)

    draw(file, write)
