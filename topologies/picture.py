"""Views of a lab: a picture, a table of its hosts, and commands to try next. Pure."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from checkmate.output.tables import FittedTable
from topologies import torchrun
from topologies.describe.topology import CONTROLLER, MGMT_NET, LabHost, SwitchNode, Topology
from topologies.kernel.links import MGMT_BRIDGE, MGMT_INTERFACE
from topologies.kernel.namespaces import name_of

OWN_SCRIPT: Final = " -- train.py   # your own: none of Checkmate's examples trains such groups"
SHADOWS_SHOWN: Final = 5
"""Number of shadow nodes whose commands `lab up` prints; the others are alike."""


@dataclass(frozen=True)
class _Cell:
    """A host beside a switch: its name, and the ports of its NICs there. A bridge's ports have no numbers."""

    name: str
    ports: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(len(self.name) + 1, 4 * len(self.ports))

    def columns(self) -> list[int]:
        """Return the columns of its cables within the cell."""
        step = self.width // len(self.ports)
        return [step * i + step // 2 - (len(self.ports) > 1) for i in range(len(self.ports))]


def picture(topology: Topology) -> str:
    """Return the topology in box-drawing characters: ranks above each switch, shadow nodes below.

    Without switches, all hosts are at the bridge of the management network.
    """
    if topology.switches:
        return "\n\n".join(_block(topology, switch) for switch in topology.switches)
    above, below = (
        [_Cell(host.name, ("",)) for host in hosts] for hosts in (topology.trainers, topology.shadow_nodes)
    )
    return _box(f" {MGMT_BRIDGE}, {MGMT_NET} ", above, below)


def show(topology: Topology, console: Console) -> None:
    """Print the picture, unless the terminal is too narrow for it."""
    text = picture(topology)
    width = max(map(len, text.splitlines()))
    if width > console.width:
        text = f"(a picture of this lab needs {width} columns)"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _block(topology: Topology, switch: SwitchNode) -> str:
    above = _cells(topology.trainers, switch.name)
    below = _cells(topology.shadow_nodes, switch.name)
    links = [
        f"port {port} ── {far} port {far_port}" for port, far, far_port in topology.links_at(switch.name)
    ]
    return _box(" " + " · ".join([f"{switch.name}, {switch.address}", *links]) + " ", above, below)


def _box(label: str, above: Sequence[_Cell], below: Sequence[_Cell]) -> str:
    """Return a box with a label, and the cables of hosts above and below it."""
    width = max(len(label), *(sum(cell.width for cell in cells) for cells in (above, below)))
    lines = []
    if above:
        lines += [_names(above), _cables(above)]
    lines += [
        "┌" + _edge(above, width, "┴") + "┐",
        "│" + label.ljust(width) + "│",
        "└" + _edge(below, width, "┬") + "┘",
    ]
    if below:
        lines += [_cables(below), _names(below)]
    return "\n".join(line.rstrip() for line in lines)


def _cells(hosts: Sequence[LabHost], switch: str) -> list[_Cell]:
    cells = [_Cell(h.name, tuple(str(n.port) for n in h.interfaces if n.switch == switch)) for h in hosts]
    return [cell for cell in cells if cell.ports]


def _names(cells: Sequence[_Cell]) -> str:
    return " " + "".join(cell.name.center(cell.width) for cell in cells)


def _cables(cells: Sequence[_Cell]) -> str:
    """Return a row of cables, each with its port number."""
    row = ""
    for cell in cells:
        text = ""
        for column, port in zip(cell.columns(), cell.ports, strict=True):
            text = text.ljust(column) + f"│{port}"
        row += text.ljust(cell.width)
    return " " + row


def _edge(cells: Sequence[_Cell], width: int, joint: str) -> str:
    edge = ["─"] * width
    start = 0
    for cell in cells:
        for column in cell.columns():
            edge[start + column] = joint
        start += cell.width
    return "".join(edge)


def host_table(topology: Topology, lab: str) -> FittedTable:
    """Return a row for each NIC, or host without: namespace, address, switch port, management address."""
    columns = ("namespace", "interface", "address", "switch port", "mgmt")
    table = FittedTable(f"lab {lab}: {topology.title}", *columns)
    for host in topology.hosts:
        if not host.interfaces:
            table.add_row(name_of(lab, host.name), MGMT_INTERFACE, "", "", str(host.mgmt))
        for i, nic in enumerate(host.interfaces):
            namespace = name_of(lab, host.name) if i == 0 else ""
            mgmt = str(host.mgmt) if i == 0 else ""
            table.add_row(namespace, nic.name, str(nic.ip), f"{nic.switch} {nic.port}", mgmt)
    for switch in topology.switches:
        stub = f"{switch.stub_ip} (stub)"
        table.add_row(name_of(lab, switch.name), f"port1-{switch.ports}", stub, "", str(switch.mgmt))
    table.add_row(name_of(lab, CONTROLLER), MGMT_BRIDGE, "", "", str(MGMT_NET[1]))
    return table


def next_steps(topology: Topology, lab: str, job_file: object) -> str:
    """Return commands to try in a lab that is up, in this order; they work in any directory.

    `lab exec` has this installation's commands on PATH, and the lab's job in CHECKMATE_JOB.
    """
    installed = Path(sys.executable).with_name("checkmate")
    if not installed.exists():
        checkmate = outside = shlex.join([sys.executable, "-m", "checkmate.cli.entry"])
    else:
        checkmate, on_path = "checkmate", shutil.which("checkmate")
        outside = checkmate if on_path and Path(on_path).samefile(installed) else shlex.quote(str(installed))
    inside = f"{outside} lab exec {lab}"
    control = f"{inside} {CONTROLLER} -- {checkmate}"
    shadows = [
        f"  {inside} {host.name} -- {checkmate} shadow --id {number}"
        for number, host in enumerate(topology.shadow_nodes)
    ]
    if len(shadows) > SHADOWS_SHOWN:
        shadows[SHADOWS_SHOWN - 1 : -1] = ["  ... and so on, each in its own terminal, up to"]
    script = topology.script or ("train.py",)
    has_switches = bool(topology.switches)
    module = script[-1]
    # Kills the newest process of the script in the namespace: the script itself, not its torchrun.
    kill = f"sh -c 'pkill -9 -n --ns $$ --nslist net -f [{module[0]}]{module[1:]}'"
    return "\n".join(
        [
            f"job: {job_file}",
            "next steps: train in the lab, with all that this needs, until Ctrl-C; then look at the logs",
            f"  {outside} lab train {lab}{'' if topology.script else OWN_SCRIPT}",
            f"  {outside} lab logs {lab} {topology.shadow_nodes[0].name}",
            f"or by hand ({'run and ' * has_switches}each shadow occupies a terminal until Ctrl-C):",
            *[f"  {control} run"] * has_switches,
            *shadows,
            f"  {torchrun.loop(topology, inside, script)}",
            f"  {inside} {topology.trainers[-1].name} -- {kill}   # training resumes",
            f"  {control} status",
            f"  {control} consolidate --out checkpoint/",
            *[f"  {control} remove   # after run has stopped"] * has_switches,
            f"  {inside} {topology.trainers[0].name}   # a shell on a host",
            f"  {outside} lab down {lab}",
        ]
    )
