"""A Tofino's ports: names and device ports, and how each is set up. Pure, from a switch's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from checkmate import tofino
from checkmate.schema import PanelPort, Switch

FEC: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "10G": ("none", "firecode"),
        "25G": ("rs", "firecode", "none"),
        "40G": ("none", "firecode"),
        "50G": ("rs", "firecode", "none"),
        "100G": ("rs", "none"),
        "200G": ("rs",),
        "400G": ("rs",),
    }
)
"""Forward error correction that a speed may have (IEEE 802.3, clauses 74, 91, 108, 119); the usual first."""


@dataclass(frozen=True)
class PortSettings:
    """How one port is set up: cable in metres."""

    name: str
    device_port: int
    speed: str
    fec: str
    cable: float

    @property
    def bits_per_second(self) -> int:
        return int(self.speed.removesuffix("G")) * 10**9


def names(front_panel: str | None, ports: Mapping[str, PanelPort]) -> dict[str, int]:
    """Front-panel names and their device ports: the board's map, with what the switch's `ports` change."""
    found = tofino.front_panel(front_panel) if front_panel else {}
    return found | {name: port.device_port for name, port in ports.items() if port.device_port is not None}


def port_settings(switch: Switch, device_port: int) -> PortSettings:
    """A port's own settings, and where it has none, its switch's. A port without a name has its number."""
    by_port = {port: name for name, port in names(switch.front_panel, switch.ports).items()}
    name = by_port.get(device_port)
    own = (switch.ports.get(name) if name else None) or PanelPort()
    speed = own.speed or switch.speed
    fec = own.fec or (switch.fec if own.speed is None else None) or FEC[speed][0]
    return PortSettings(name or str(device_port), device_port, speed, fec, own.cable or switch.cable)
