"""`checkmate nccl`: build the plugin for NCCL, and check on a cluster that gradients can be tagged."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkmate.base.wording import size
from checkmate.cli.common import JobArgument, UsageFault, err, out, require_switches, show_errors
from checkmate.cli.helping import App
from checkmate.errors import CheckmateError
from checkmate.job.files import read_job
from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import variables
from checkmate.output.consoles import spinner
from checkmate.output.tables import FittedTable

if TYPE_CHECKING:
    from checkmate.training.gradients.nccl_check import RankVerdict

app = App(help="NCCL: the plugin with which stock NCCL's gradients are tagged.", no_args_is_help=True)


@app.command()
@show_errors
def build(
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Folder of the plugin.", show_default="$XDG_CACHE_HOME/checkmate"),
    ] = None,
) -> None:
    """Compile the plugin unless that is done, and print the variables with which NCCL loads it.

    The processes that torchrun starts need them if they make a communicator of NCCL before protect.

    Example: eval "$(checkmate nccl build)"
    """
    with spinner(err, "compiling the plugin"):
        plugin = shared_object(cache)
    for name, value in variables(plugin).items():
        out.print(f"export {name}={shlex.quote(value)}", soft_wrap=True, markup=False)
    err.print(f"the plugin is {plugin}", soft_wrap=True, markup=False)


@app.command()
@show_errors
def check(job: JobArgument) -> None:
    """Calibrate NCCL on all ranks of a job, and print each one's verdict.

    Start it with torchrun like the training script, on the same hosts. It needs a GPU for each rank, and
    neither a switch nor shadow nodes. Ends with status 1 if gradients can't be tagged.

    Example: torchrun --nnodes 4 ... --no-python checkmate nccl check jobs/gpt.yaml
    """
    from checkmate.training.gradients import nccl_check  # noqa: PLC0415

    read = read_job(job)
    require_switches([read], "nccl check")
    try:
        with nccl_check.meeting() as rank:
            verdicts = nccl_check.examine(read, int(os.environ.get("LOCAL_RANK", "0")))
    except CheckmateError as error:
        raise UsageFault(str(error)) from None
    if rank == 0:
        show(verdicts)
    if any(verdict.trouble for verdict in verdicts):
        raise typer.Exit(1)


def show(verdicts: Sequence[RankVerdict]) -> None:
    """Print what each rank has compared on each channel, and then the verdicts."""
    columns = ("rank", "NCCL", "channel", "sends", "compared", "wrong")
    table = FittedTable("fully reduced sends", *columns, numbers=columns[2:], folds=("rank",))
    for verdict in verdicts:
        for channel in verdict.channels:
            counts = map(str, (channel.channel, channel.sends, size(channel.nbytes), channel.mismatches))
            table.add_row(verdict.rank, verdict.version, *counts)
    out.print(table)
    for verdict in verdicts:
        text = f"not tagged: {verdict.trouble}" if verdict.trouble else "gradients can be tagged"
        out.print(f"{verdict.rank}: {text}", soft_wrap=True, markup=False)
