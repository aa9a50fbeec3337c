"""Tofino as a job sees it: the chips' device ports, and those behind front-panel names. Pure data.

Sources: Intel's Open P4 Studio (github.com/p4lang/open-p4studio), `bf-drivers`: `src/lld/lld_sku.c` (which
MAC block is which device port, the CPU's ports), `src/traffic_mgr/init/tm_tofino.h` and `tm_tof2.h` (buffer),
and `src/mc_mgr/mc_mgr_rdm.h` (memory of the replication engine). Boards: the port maps that come with it and
with Stratum (`stratum/hal/config/x86-64-accton-wedge100bf-*/port_map.json`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

TARGETS = ("tofino", "tofino2")
PORT_NAME = r"^[1-9][0-9]?/[0-7]$"
"""A front-panel name: connector, then lane."""
PIPES = 4
_PORTS_PER_PIPE = 128  # a device port is pipe << 7 | the port within the pipe


@dataclass(frozen=True)
class Chip:
    """What differs between the chips. Ports are those within a pipe; the buffer is in cells."""

    first_front: int
    last_front: int
    recirculation: range
    lanes: int
    """Of one front-panel connector, each a device port."""
    cpu_ports: tuple[int, ...]
    """PCIe's first: Tofino's is 192 with two pipes, 320 with four; then the CPU's Ethernet ports. Those of
    Tofino 2 are of its chips with four pipes; where there are three, they are others, not known here."""
    speeds: Mapping[str, int]
    """Each speed with the lanes that it takes; 0 where that depends on the lanes' own."""
    cell_bytes: int
    cells: int
    free_cells: int
    """What the driver's own carving of the buffer (100 Ki cells) leaves."""
    multicast_nodes: int
    """At least: each takes a node for its replication id and one of 72 ports for each pipe, doubled where
    a line has 80 bits, in every pipe's tree: 40 of the 204 (256) x 4096 words of 40 bits."""


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "tofino": Chip(
            first_front=0,
            last_front=63,
            recirculation=range(68, 72),
            lanes=4,
            cpu_ports=(192, 320, 64, 65, 66, 67),
            speeds={"10G": 1, "25G": 1, "40G": 4, "50G": 2, "100G": 4},
            cell_bytes=80,
            cells=280 * 1024,
            free_cells=180 * 1024,
            multicast_nodes=204 * 4096 // 40,
        ),
        "tofino2": Chip(
            first_front=8,
            last_front=71,
            recirculation=range(8),
            lanes=8,
            cpu_ports=(0, 2, 3, 4, 5),
            speeds={"10G": 1, "25G": 1, "40G": 4, "50G": 0, "100G": 0, "200G": 0, "400G": 8},
            cell_bytes=176,
            cells=384 * 1024,
            free_cells=284 * 1024,
            multicast_nodes=256 * 4096 // 40,
        ),
    }
)
GROUPS_MAX = 65535
"""Multicast group ids are 16 bits wide, and 0 is none (`$pre.mgid` in the SDE's schema)."""


def use(chip: Chip, device_port: int) -> str:
    """What a device port is: `front panel`, `CPU`, `recirculation` or `nothing`."""
    pipe, port = divmod(device_port, _PORTS_PER_PIPE)
    if device_port in chip.cpu_ports:
        return "CPU"
    if not 0 <= pipe < PIPES:
        return "nothing"
    if chip.first_front <= port <= chip.last_front:
        return "front panel"
    return "recirculation" if port in chip.recirculation else "nothing"


def recirculation_ports(chip: Chip) -> Iterator[int]:
    """The chip's recirculation ports; Checkmate's program uses none."""
    for pipe in range(PIPES):
        for port in chip.recirculation:
            number = pipe * _PORTS_PER_PIPE + port
            if number not in chip.cpu_ports:
                yield number


def pipe_of(device_port: int) -> int:
    """The pipe that a device port belongs to."""
    return device_port // _PORTS_PER_PIPE


def _half(odd: bool) -> dict[int, int]:
    """MAC block to device port of the two-pipe chips, whose even or odd blocks are fused off."""
    first, second = (56, 4) if odd else (60, 0)
    found = {}
    for mac in range(32):
        pipe, place = divmod(mac, 16)
        within = first - 8 * place if place < 8 else second + 8 * (place - 8)
        found[mac] = pipe * _PORTS_PER_PIPE + within
    return found


def _full() -> dict[int, int]:
    """MAC block to device port of the four-pipe chip: pipes 0 and 2 count downward."""
    found = {}
    for mac in range(64):
        pipe, place = divmod(mac, 16)
        found[mac] = pipe * _PORTS_PER_PIPE + 4 * (place if pipe % 2 else 15 - place)
    return found


_WEDGE_32X = (*range(23, -1, -1), 31, 30, 29, 28, 26, 27, 24, 25)
_WEDGE_65X = (
    *range(31, -1, -1),
    *range(40, 48),
    *range(32, 40),
    *range(56, 64),
    *range(48, 56),
)
"""The MAC block behind each connector, from number 1 on."""

FRONT_PANELS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "wedge100bf-32x-odd": tuple(_half(odd=True)[mac] for mac in _WEDGE_32X),
        "wedge100bf-32x-even": tuple(_half(odd=False)[mac] for mac in _WEDGE_32X),
        "wedge100bf-65x": tuple(_full()[mac] for mac in _WEDGE_65X),
    }
)
"""Boards, each with the device port of every connector's lane 0. Which of the two 32-port ones a switch is,
`pm show` on it says: port 1/0 is device port 128 (odd) or 132 (even)."""


def cpu_port(target: str, board: str | None) -> int:
    """PCIe's port, by which a chip speaks with its controller: on a four-pipe board the list's second."""
    four_pipes = board is not None and len(FRONT_PANELS[board]) > 32
    return CHIPS[target].cpu_ports[1 if four_pipes else 0]


def front_panel(board: str) -> dict[str, int]:
    """Every name of a board's front panel, `1/0` for connector 1, lane 0, with its device port."""
    return {
        f"{connector}/{lane}": port + lane
        for connector, port in enumerate(FRONT_PANELS[board], 1)
        for lane in range(CHIPS["tofino"].lanes)
    }
