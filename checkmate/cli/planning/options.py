"""Options of planning commands, and the checks that commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from checkmate.base.extras import check
from checkmate.cli.common import UsageFault, err
from checkmate.job.fields import GPUS_MOST
from checkmate.output.consoles import spinner

_ENDINGS = (".png", ".svg")

Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", help="Optimizer, such as adamw or sgd,momentum=0.9.", metavar="NAME[,OPTION=VALUE]"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Type of the parameters.", show_default="the model's own", metavar="TYPE"),
]
IterationTime = Annotated[
    str | None,
    typer.Option(
        "--iteration-time", help="Duration of an iteration, such as 1.5s.", show_default=False, metavar="TIME"
    ),
]
ReceiveBuffer = Annotated[
    int, typer.Option("--receive-buffer", min=1, max=1023, help="Socket buffer of each stream, in MB.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Write figures to FILE.png or FILE.svg.", metavar="FILE")
]
CapacityFlag = Annotated[
    bool, typer.Option("--capacity", help="Check NICs, memory and time for --model as well.")
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Named model, or module:function; once, to be cut into DP groups, or once for each DP group.",
        show_default=False,
    ),
]
LinkRate = Annotated[
    str, typer.Option("--link-rate", help="Line rate of each training rank, or of its host.", metavar="RATE")
]
NicRate = Annotated[
    str | None,
    typer.Option(
        "--nic-rate", help="Line rate of each shadow NIC.", show_default="as --link-rate", metavar="RATE"
    ),
]
NodeMemory = Annotated[
    str | None,
    typer.Option(
        "--node-memory", help="Memory of a shadow node, such as 128GB.", show_default=False, metavar="SIZE"
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Output of `checkmate profile --json` on a shadow node."),
]
Cores = Annotated[
    int | None,
    typer.Option("--cores", min=1, help="Cores of a shadow node.", show_default="as in the profile"),
]
GpusPerHost = Annotated[
    int,
    typer.Option(
        "--gpus-per-host", min=1, max=GPUS_MOST, help="Copies by hosts: ranks on a host, behind one NIC."
    ),
]
PcieRate = Annotated[
    str | None,
    typer.Option(
        "--pcie-rate",
        help="Copies by hosts: rate from a GPU to its host's memory, such as 200Gbit/s.",
        show_default=False,
        metavar="RATE",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Copies by hosts: pinned memory that a host may have, such as 8GB.",
        show_default=False,
        metavar="SIZE",
    ),
]
Details = Annotated[
    bool, typer.Option("--details", help="With --capacity: also list every switch, NIC, node and shard.")
]
CAPACITY_OPTIONS: Final = (
    "models",
    "optimizer",
    "dtype",
    "iteration_time",
    "link_rate",
    "nic_rate",
    "node_memory",
    "profile",
    "cores",
    "receive_buffer",
    "details",
    "gpus_per_host",
    "pcie_rate",
    "host_memory",
)
"""Parameters of `plan` that only apply with `--capacity`."""
OF_HOST_COPIES: Final = ("gpus_per_host", "pcie_rate", "host_memory")
"""Those of them that only apply to jobs with copies by hosts."""
OF_SWITCH_COPIES: Final = ("pfc", "bfrt", "entries", "receive_buffer")
"""Parameters of `plan` that only apply to jobs with copies by switch."""


def quantity(option: str, text: str, parse: Callable[[object], float]) -> float:
    """Parse an option's value, a positive number with a unit. Raise `UsageFault` if it is wrong."""
    try:
        value = parse(text)
    except ValueError as error:
        raise UsageFault(f"{option} {error}") from None
    if not value > 0:
        raise UsageFault(f"{option} must be more than 0, not {text}")
    return value


def check_picture(file: Path) -> None:
    """Raise `UsageFault`, before anything is computed, if the picture cannot be drawn or written."""
    if file.suffix.lower() not in _ENDINGS:
        raise UsageFault(f"--plot: {file} must end in {' or '.join(_ENDINGS)}")
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"would be in {file.parent}, which is not a folder"
        raise UsageFault(f"--plot: {file} {why}")
    check("--plot", "plan")


def draw(file: Path, write: Callable[[], None]) -> None:
    """Write a picture. Raise `UsageFault` if it cannot be written."""
    try:
        with spinner(err, "drawing"):
            write()
    except OSError as error:
        raise UsageFault(f"--plot: {file} cannot be written: {error.strerror}") from None
