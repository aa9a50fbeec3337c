"""`checkmate lab`: run a topology and its switches in network namespaces of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from checkmate.base.wording import counted
from checkmate.cli import lab_inside
from checkmate.cli.common import AsJson, UsageFault, confirm, err, out, print_json, show_errors
from checkmate.cli.completing import lab_names, target_names, topology_names
from checkmate.cli.helping import App
from checkmate.output.consoles import spinner
from checkmate.output.tables import FittedTable
from topologies import lab as labs
from topologies import picture, state
from topologies.describe import topology as describe
from topologies.describe.job_files import TARGETS, target_of
from topologies.kernel import jitter, loss, namespaces
from topologies.progress import StepProgress
from topologies.signals import unwinding
from topologies.traffic.demo import perform
from topologies.traffic.orders import Load

app = App(
    help="Labs: hosts, links and switches in network namespaces of this machine. Needs root.",
    no_args_is_help=True,
)

Topology = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(describe.names())}, or the path to a .yaml file.",
        show_default=False,
        autocompletion=topology_names,
    ),
]
Switches = Annotated[
    str,
    typer.Option("--target", help=f"Kind of switch: {', '.join(TARGETS)}.", autocompletion=target_names),
]
Name = Annotated[
    str | None, typer.Option("--name", help="The lab's name.", show_default="the topology's name")
]
Mtu = Annotated[int, typer.Option("--mtu", help="MTU of the training links: 1500 or 9000.")]
Loss = Annotated[str, typer.Option("--loss", help="Loss rate of the training links, such as 1%.")]
CopyLoss = Annotated[
    str, typer.Option("--copy-loss", help="Loss rate from switches to shadow nodes, such as 0.1%.")
]
Jitter = Annotated[
    str, typer.Option("--jitter", help="Maximum random delay of the training links, such as 5ms.")
]


@dataclass(frozen=True)
class LabState:
    """A lab of this machine. Its `target` is `None` if it has no switches, or is not known.

    `up` is true if it can be used, false if it is left over from a killed command, and `None` if only
    root can determine that.
    """

    name: str
    topology: str | None
    target: str | None
    up: bool | None
    job_file: str


def _lab(
    topology: str, target: str, name: str | None, mtu: int, share: str, delay: str, copy_share: str
) -> labs.Lab:
    """Return the lab. Raise `BadDescription` with the faults of all options."""
    parsed: dict[str, Callable[[], Any]] = {
        "topology": lambda: describe.load(topology),
        "target": lambda: target_of(target),
        "loss": lambda: loss.fraction(share),
        "copy_loss": lambda: loss.fraction(copy_share),
        "jitter": lambda: jitter.seconds(delay),
    }
    values, faults = {}, []
    for option, parse in parsed.items():
        try:
            values[option] = parse()
        except describe.BadDescription as error:
            faults.append(error)
    if len(faults) > 1:
        raise describe.BadDescription("; ".join(map(str, faults)))
    if faults:
        raise faults[0]
    return labs.Lab(**values, name=name, mtu=mtu)


@app.command()
@show_errors
def up(
    topology: Topology,
    target: Switches = "softswitch",
    name: Name = None,
    mtu: Mtu = 1500,
    share: Loss = "0",
    delay: Jitter = "0",
    copy_share: CopyLoss = "0",
) -> None:
    """Create a lab, start its switches, and keep it. `checkmate lab down` removes it.

    Example: checkmate lab up single_tor --target bmv2
    """
    lab = _lab(topology, target, name, mtu, share, delay, copy_share)
    with unwinding(), StepProgress(err) as steps:
        lab.report_to(steps)
        lab.up()
    lab.release()
    picture.show(lab.topology, out)
    out.print(picture.host_table(lab.topology, lab.name))
    if lab.loss_by:
        out.print(f"training links lose {share} of their frames ({lab.loss_by})")
    if lab.jitter:
        out.print(f"training links delay frames at random, by up to {lab.jitter * 1000:g} ms each way")
    out.print(picture.next_steps(lab.topology, lab.name, lab.job_file), soft_wrap=True, markup=False)


@app.command()
@show_errors
def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of labs; or use --all.", metavar="LAB", show_default=False, autocompletion=lab_names
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Remove every lab of this machine; on a terminal, asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    if_up: Annotated[bool, typer.Option("--if-up", help="Do not fail if a lab does not exist.")] = False,
) -> None:
    """Stop all processes in labs and remove the labs, including remains of a killed `up` or `run`.

    Removes nothing and fails if a lab does not exist; --if-up ignores such labs.

    Example: checkmate lab down single_tor
    """
    state.require_root()
    failures = []
    labs_to_remove = _choose_labs(names or [], all_labs=every, if_up=if_up)
    if every and labs_to_remove and not yes and sys.stdin.isatty() and err.is_terminal:
        _show(_lab_states())
        confirm(
            f"Remove {counted(len(labs_to_remove), 'lab')} with all that runs there?", "nothing was removed"
        )
    for name in labs_to_remove:
        try:
            with spinner(err, f"removing {name}"):
                is_removed = labs.down(name)
        except describe.LabInUse as error:
            failures.append(error)
            continue
        out.print(f"lab {name} removed" if is_removed else f"lab {name} does not exist; nothing to remove")
    if failures:
        raise failures[0]


def _choose_labs(names: list[str], *, all_labs: bool, if_up: bool) -> list[str]:
    """Return the labs that `down` removes. Raise `UsageFault` if none are given or one does not exist."""
    if bool(names) == all_labs:
        choice = "either lab names or --all, not both" if all_labs else "lab names or --all"
        raise UsageFault(f"specify {choice}; labs that are up: {', '.join(state.existing()) or 'none'}")
    up = state.existing()
    missing = [name for name in names if state.check_name(name) not in up and not namespaces.of_lab(name)]
    if missing and not if_up:
        raise UsageFault(state.missing(missing))
    return names or state.existing()


@app.command("list")
@show_errors
def list_labs(as_json: AsJson = False) -> None:
    """List the topologies that come with Checkmate, and the labs that are up on this machine.

    Example: checkmate lab list
    """
    if as_json:
        print_json({"topologies": _titles(), "labs": [asdict(lab) for lab in _lab_states()]})
    else:
        _show_labs()


def _titles() -> dict[str, str]:
    """Return the title of each topology that comes with Checkmate, by name."""
    return {name: describe.load(name).title for name in describe.names()}


def _lab_states() -> list[LabState]:
    """Return every lab that exists on this machine, even in part."""
    lab_states = []
    for name in state.existing():
        record = state.read_record(name)
        up = state.is_up(name) if os.geteuid() == 0 else None
        topology, target = (record.topology, record.target) if record else (None, None)
        lab_states.append(LabState(name, topology, target, up, str(state.job_file(name))))
    return lab_states


def _show_labs() -> None:
    shipped = FittedTable("", "topology", "title", folds=("title",))
    for name, title in _titles().items():
        shipped.add_row(name, title)
    out.print(shipped)
    labs = _lab_states()
    if not labs:
        out.print("no lab is up")
        return
    _show(labs)
    for lab in labs:  # outside the table, which would wrap lines that users copy
        out.print(f"job of {lab.name}: {lab.job_file}", soft_wrap=True)
    for lab in labs:
        if lab.up is False:
            out.print(f"to clear up: checkmate lab down {lab.name}", soft_wrap=True)


def _show(labs: Collection[LabState]) -> None:
    table = FittedTable("", "lab", "topology", "target", "state", folds=("topology",))
    for lab in labs:
        target = lab.target or ("no switch" if lab.topology else "?")
        table.add_row(lab.name, lab.topology or "?", target, _state(lab))
    out.print(table)


def _state(lab: LabState) -> str:
    if lab.up is None:
        return "unknown without root"
    return "up" if lab.up else "left over"


@app.command()
@show_errors
def run(
    topology: Topology,
    target: Switches = "softswitch",
    name: Name = None,
    mtu: Mtu = 1500,
    share: Loss = "0",
    delay: Jitter = "0",
    copy_share: CopyLoss = "0",
    megabytes: Annotated[int, typer.Option(help="Size of the tensors that the rings gather.")] = 200,
    iterations: Annotated[int, typer.Option(help="Number of iterations.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Create a lab, gather tensors over its rings, compare both ends of each shadow stream, remove the lab.

    Ranks tag with the eBPF tagger; shadow nodes read their streams on ordinary sockets. Exit status 1 if a
    stream differs or the lab fails.

    Example: checkmate lab run two_tor --loss 1% --jitter 5ms
    """
    lab = _lab(topology, target, name, mtu, share, delay, copy_share)
    if not lab.switches:
        raise describe.BadDescription(
            f"{topology} has no switch, whose copies `lab run` would compare: use checkmate lab up "
            f"{topology}, and then checkmate lab train {lab.name}"
        )
    state.require_root()
    if not perform(lab, Load(nbytes=megabytes * 1_000_000, iterations=iterations), as_json=as_json):
        raise typer.Exit(1)


app.command("exec", context_settings=lab_inside.RAW)(lab_inside.execute)
app.command()(lab_inside.logs)
app.command(context_settings=lab_inside.RAW)(lab_inside.train)
