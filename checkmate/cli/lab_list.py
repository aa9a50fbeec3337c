"""`checkmate lab list`: the topologies that come with Checkmate, and the labs of this machine."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from topologies import state
from topologies.describe import topology as describe
from topologies.kernel import namespaces


@dataclass(frozen=True)
class LabStanding:
    """A lab of this machine.

    `up`: something runs in it, else it is what a killed command has left; `None` where only root can tell.
    """

    name: str
    topology: str | None
    target: str | None
    up: bool | None
    job_file: str


def topologies() -> dict[str, str]:
    """The titles of the topologies that come with Checkmate, by name."""
    return {name: describe.load(name).title for name in describe.names()}


def standing() -> list[LabStanding]:
    """Every lab that this machine has something of."""
    found = []
    for name in state.existing():
        record = state.read_record(name)
        up = bool(namespaces.processes(namespaces.of_lab(name))) if os.geteuid() == 0 else None
        topology, target = (record.topology, record.target) if record else (None, None)
        found.append(LabStanding(name, topology, target, up, str(state.job_file(name))))
    return found


def data() -> dict[str, object]:
    """Both, for `--json`."""
    return {"topologies": topologies(), "labs": [asdict(lab) for lab in standing()]}


def show(out: Console) -> None:
    """Both, as text."""
    shipped = _table("topology", "title")
    for name, title in topologies().items():
        shipped.add_row(name, title)
    out.print(shipped)
    labs = standing()
    if not labs:
        out.print("no lab is up")
        return
    table = _table("lab", "topology", "target", "state")
    for lab in labs:
        table.add_row(lab.name, lab.topology or "?", lab.target or "?", _state(lab))
    out.print(table)
    for lab in labs:  # on lines of their own, which no table breaks: they are there to be copied
        out.print(f"job of {lab.name}: {lab.job_file}", soft_wrap=True)
    for lab in labs:
        if lab.up is False:
            out.print(f"to clear up: checkmate lab down {lab.name}", soft_wrap=True)


def _state(lab: LabStanding) -> str:
    if lab.up is None:
        return "only root can tell"
    return "up" if lab.up else "left over"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
