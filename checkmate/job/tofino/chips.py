"""Tofino chips: device ports, and their front-panel names on boards. Pure data.

Sources: Intel's Open P4 Studio (github.com/p4lang/open-p4studio), `bf-drivers`: `src/lld/lld_sku.c` (which
MAC block is which device port, the CPU's ports), `src/traffic_mgr/init/tm_tofino.h` and `tm_tof2.h` (buffer),
and `src/mc_mgr/mc_mgr_rdm.h` (memory of the replication engine). Boards: the port maps that come with it and
with Stratum (`stratum/hal/config/x86-64-accton-wedge100bf-*/port_map.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TARGETS = ("tofino", "tofino2")
PORT_NAME = r"^[1-9][0-9]?/[0-7]$"
"""A front-panel name: connector and lane."""
PIPES = 4
_PORTS_PER_PIPE = 128  # a device port is pipe << 7 | the port within the pipe


@dataclass(frozen=True)
class Chip:
    """Properties of a chip. Ports are numbers within a pipe; buffer sizes are in cells."""

    first_front: int
    last_front: int
    recirculation: range
    lanes: int
    """Number of lanes of a front-panel connector; each is a device port."""
    cpu_ports: tuple[int, ...]
    """PCIe ports first (Tofino: 192 with two pipes, 320 with four), then the CPU's Ethernet ports. Those of
    Tofino 2 are for chips with four pipes; chips with three pipes have others, which are not known here."""
    speeds: Mapping[str, int]
    """Number of lanes of each speed; 0 if it depends on the speed of the lanes."""
    cell_bytes: int
    cells: int
    free_cells: int
    """Cells that remain after the driver's own division of the buffer (100 Ki cells)."""
    multicast_nodes: int
    """Lower bound. Each takes a node for its replication id and one of 72 ports for each pipe, twice if a
    line has 80 bits, in every pipe's tree: 40 of the 204 (256) x 4096 words of 40 bits."""


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
"""Multicast group ids have 16 bits, and 0 means none (`$pre.mgid` in the SDE's schema)."""


def use(chip: Chip, device_port: int) -> str:
    """Return the use of a device port: `front panel`, `CPU`, `recirculation` or `nothing`."""
    pipe, port = divmod(device_port, _PORTS_PER_PIPE)
    if device_port in chip.cpu_ports:
        return "CPU"
    if not 0 <= pipe < PIPES:
        return "nothing"
    if chip.first_front <= port <= chip.last_front:
        return "front panel"
    return "recirculation" if port in chip.recirculation else "nothing"


def pipe_of(device_port: int) -> int:
    """Return the pipe of a device port."""
    return device_port // _PORTS_PER_PIPE


def _half(odd: bool) -> dict[int, int]:
    """Map MAC blocks to device ports of the two-pipe chips, whose even or odd blocks are fused off."""
    first, second = (56, 4) if odd else (60, 0)
    device_ports = {}
    for mac in range(32):
        pipe, place = divmod(mac, 16)
        within = first - 8 * place if place < 8 else second + 8 * (place - 8)
        device_ports[mac] = pipe * _PORTS_PER_PIPE + within
    return device_ports


def _full() -> dict[int, int]:
    """Map MAC blocks to device ports of the four-pipe chip, whose pipes 0 and 2 count downwards."""
    device_ports = {}
    for mac in range(64):
        pipe, place = divmod(mac, 16)
        device_ports[mac] = pipe * _PORTS_PER_PIPE + 4 * (place if pipe % 2 else 15 - place)
    return device_ports


_WEDGE_32X = (*range(23, -1, -1), 31, 30, 29, 28, 26, 27, 24, 25)
_WEDGE_65X = (
    *range(31, -1, -1),
    *range(40, 48),
    *range(32, 40),
    *range(56, 64),
    *range(48, 56),
)
"""MAC blocks of the connectors, from number 1 on."""

FRONT_PANELS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "wedge100bf-32x-odd": tuple(_half(odd=True)[mac] for mac in _WEDGE_32X),
        "wedge100bf-32x-even": tuple(_half(odd=False)[mac] for mac in _WEDGE_32X),
        "wedge100bf-65x": tuple(_full()[mac] for mac in _WEDGE_65X),
    }
)
"""Boards, each with the device port of every connector's lane 0. To distinguish the two 32-port boards, run
`pm show` on the switch: port 1/0 is device port 128 (odd) or 132 (even)."""


def cpu_port(target: str, board: str | None) -> int:
    """Return the chip's PCIe port to its controller: the list's second on a four-pipe board."""
    four_pipes = board is not None and len(FRONT_PANELS[board]) > 32
    return CHIPS[target].cpu_ports[1 if four_pipes else 0]


def front_panel(board: str) -> dict[str, int]:
    """Return the device port of every front-panel name, such as `1/0` for connector 1, lane 0."""
    return {
        f"{connector}/{lane}": port + lane
        for connector, port in enumerate(FRONT_PANELS[board], 1)
        for lane in range(CHIPS["tofino"].lanes)
    }
