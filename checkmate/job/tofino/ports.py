"""A Tofino's ports: names, device ports and settings. Pure, from a switch's description."""

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
"""Valid kinds of forward error correction (IEEE 802.3, clauses 74, 91, 108, 119), default first."""


@dataclass(frozen=True)
class PortSettings:
    """Settings of one port; the cable's length in metres."""

    name: str
    device_port: int
    speed: str
    fec: str
    cable: float


def names(front_panel: str | None, ports: Mapping[str, PanelPort]) -> dict[str, int]:
    """Return device ports by front-panel name: the board's map, overridden by the switch's `ports`."""
    found = chips.front_panel(front_panel) if front_panel else {}
    return found | {name: port.device_port for name, port in ports.items() if port.device_port is not None}


def port_settings(switch: Switch, device_port: int) -> PortSettings:
    """Return a port's settings, by default those of its switch. A port without a name has its number."""
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
"""Dependencies of a switch's fields that have no fixed default."""


def effective(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a switch's valid fields with defaults applied, so that equivalent descriptions are equal.

    Fields that depend on a faulty field are left out.
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
    """Return the settings of a port that differ from its board and switch."""
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
