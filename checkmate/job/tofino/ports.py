"""A Tofino's ports: names and device ports, and how each is set up. Pure, from a switch's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from checkmate.job.schema import PanelPort, Switch
from checkmate.job.tofino import chips

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
    found = chips.front_panel(front_panel) if front_panel else {}
    return found | {name: port.device_port for name, port in ports.items() if port.device_port is not None}


def port_settings(switch: Switch, device_port: int) -> PortSettings:
    """A port's own settings, and where it has none, its switch's. A port without a name has its number."""
    by_port = {port: name for name, port in names(switch.front_panel, switch.ports).items()}
    name = by_port.get(device_port)
    own = (switch.ports.get(name) if name else None) or PanelPort()
    speed = own.speed or switch.speed
    fec = own.fec or (switch.fec if own.speed is None else None) or FEC[speed][0]
    return PortSettings(name or str(device_port), device_port, speed, fec, own.cable or switch.cable)


_NEEDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cpu_port": frozenset({"target", "front_panel"}),
        "fec": frozenset({"target", "speed"}),
        "ports": frozenset({"target", "front_panel", "speed", "fec", "cable"}),
        "pfc": frozenset({"target"}),
    }
)
"""What the fields of a switch that have no fixed default depend on."""


def effective(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A switch's sound fields, each default in place: equal where two descriptions mean the same.

    A field that depends on one with a fault is left out.
    """
    found = {key: value for key, value in fields.items() if _NEEDED.get(key, set()) <= fields.keys()}
    switch = Switch.model_construct(**found)
    if "cpu_port" in found:
        found["cpu_port"] = switch.packet_port
    if "target" not in found or not switch.is_tofino:
        return found
    if "pfc" in found and switch.pfc.cells is None:
        found["pfc"] = switch.pfc.model_copy(update={"cells": chips.CHIPS[switch.target].free_cells})
    if "fec" in found:
        found["fec"] = switch.fec or FEC[switch.speed][0]
    if "ports" in found:
        found["ports"] = {name: own for name in switch.ports if (own := _own(switch, name))}
    return found


def _own(switch: Switch, name: str) -> dict[str, object]:
    """What differs at a port from its board's map and its switch's own settings."""
    port = switch.ports[name]
    board = chips.front_panel(switch.front_panel) if switch.front_panel else {}
    usual = {
        "device_port": board.get(name),
        "speed": switch.speed,
        "fec": switch.fec or FEC[switch.speed][0],
        "cable": switch.cable,
    }
    derived = {"fec": FEC[port.speed][0]} if port.speed is not None else {}
    said = {key: value for key, value in port if value is not None}
    return {key: value for key, value in (derived | said).items() if value != usual[key]}
