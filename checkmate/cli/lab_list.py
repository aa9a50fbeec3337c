"""`checkmate lab list`: list the topologies that come with Checkmate and the labs of this machine."""

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

    `up` is true if processes run in it, false if it is left over from a killed command, and `None` if only
    root can determine that.
    """

    name: str
    topology: str | None
    target: str | None
    up: bool | None
    job_file: str


def topologies() -> dict[str, str]:
    """Return the title of each topology that comes with Checkmate, by name."""
    return {name: describe.load(name).title for name in describe.names()}


def standing() -> list[LabStanding]:
    """Return every lab that exists on this machine, even in part."""
    found = []
    for name in state.existing():
        record = state.read_record(name)
        up = bool(namespaces.processes(namespaces.of_lab(name))) if os.geteuid() == 0 else None
        topology, target = (record.topology, record.target) if record else (None, None)
        found.append(LabStanding(name, topology, target, up, str(state.job_file(name))))
    return found


def data() -> dict[str, object]:
    """Return topologies and labs, for `--json`."""
    return {"topologies": topologies(), "labs": [asdict(lab) for lab in standing()]}


def show(out: Console) -> None:
    """Print topologies and labs as text."""
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
    for lab in labs:  # outside the table, which would wrap lines that users copy
        out.print(f"job of {lab.name}: {lab.job_file}", soft_wrap=True)
    for lab in labs:
        if lab.up is False:
            out.print(f"to clear up: checkmate lab down {lab.name}", soft_wrap=True)


def _state(lab: LabStanding) -> str:
    if lab.up is None:
        return "unknown without root"
    return "up" if lab.up else "left over"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
