"""`checkmate lab exec`, `logs` and `train`: work in a lab that is up."""

from __future__ import annotations

import os
import time
from typing import Annotated, Final

import typer
from rich.text import Text

from checkmate.cli.common import err, out, show_errors
from checkmate.cli.completing import lab_names
from topologies import inside, torchrun
from topologies.lab import Lab
from topologies.logs import LabLogs, LogLine
from topologies.signals import unwinding
from topologies.state import require_root
from topologies.training.attached import training_in

LabName = Annotated[
    str,
    typer.Argument(help="The name of a lab that is up.", show_default=False, autocompletion=lab_names),
]
RAW: Final = {"ignore_unknown_options": True}
"""So that options of a command are its own, even without `--` before it."""
_LOOK_SECONDS: Final = 0.2


@show_errors
def execute(
    lab: LabName,
    node: Annotated[str, typer.Argument(help="rank0, host0, shadow0, a switch, or ctl.", show_default=False)],
    command: Annotated[
        list[str] | None, typer.Argument(help="A command with its arguments.", show_default="a shell")
    ] = None,
) -> None:
    """Run a command on a node of a lab: in its namespace, with what the job and torchrun need set.

    PATH begins with this installation's commands, CHECKMATE_JOB is the lab's job file, and GLOO_SOCKET_IFNAME
    the management interface. Exit status: the command's own; 2 no such lab or node, 127 no such command.

    Example: checkmate lab exec single_tor ctl -- checkmate status /run/checkmate/labs/single_tor/job.yaml
    """
    require_root()
    inside.become(Lab.attached(lab), node, command or [os.environ.get("SHELL", "/bin/sh")])


@show_errors
def logs(
    lab: LabName,
    node: Annotated[str | None, typer.Argument(help="A node.", show_default="all nodes")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until Ctrl-C.")] = False,
) -> None:
    """Show what processes in a lab have written: switches, and what `lab train` and `lab run` start.

    Node by node: standard error, then standard output. What comes after that, with --follow, is in its order.

    Example: checkmate lab logs single_tor shadow0 --follow
    """
    attached = Lab.attached(lab)
    reader = LabLogs(attached.directory, None if node is None else [inside.check_node(attached, node)])
    wide = 0 if node else max(map(len, attached.topology.nodes))

    def show(*, whole: bool) -> None:
        for line in reader.new(whole=whole):
            prefix = (f"{line.node:<{wide}} | ", "cyan") if wide else ""
            out.print(Text.assemble(prefix, line.text), soft_wrap=True)

    show(whole=follow)
    if not reader.has_logs:
        err.print("nothing yet; what is started by hand writes to its own terminal", soft_wrap=True)
    while follow and attached.directory.exists():
        time.sleep(_LOOK_SECONDS)
        show(whole=True)


@show_errors
def train(
    lab: LabName,
    script: Annotated[
        list[str] | None,
        typer.Argument(help="A script and its arguments, as for torchrun.", show_default="the lab's example"),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often training restarts after deaths of ranks.")
    ] = torchrun.RESTARTS,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place", help="Start a dead rank alone (`checkmate launch`); others keep their processes."
        ),
    ] = False,
) -> None:
    """Train in a lab: start shadow nodes, a controller if none serves, and a script on all ranks.

    Shows what rank 0 writes, and errors and deaths of all ranks; `lab logs` has the rest. At the end, or at
    Ctrl-C, everything that it has started is stopped, and the lab stays. It ends, too, if the script fails
    twice in the same way.

    Example: checkmate lab train single_tor -- train.py --epochs 2
    """
    with unwinding(), training_in(lab, script, restarts=restarts, console=err, in_place=in_place) as training:
        training.follow(
            _show_line,
            lambda text: err.print(text, soft_wrap=True),
            lambda text: err.print(Text(text, "bold red"), soft_wrap=True),
        )


def _show_line(line: LogLine) -> None:
    (err if line.error else out).print(Text(line.text), soft_wrap=True)
