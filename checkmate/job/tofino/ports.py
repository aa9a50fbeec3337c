"""A Tofino's ports: their settings, translation of front-panel names to device ports, and rules.

Like `checks`, the rules work on the valid parts of a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from checkmate.job.faults import Fault, Path
from checkmate.job.fields import CPU_PORT
from checkmate.job.placing import interfaces
from checkmate.job.schema import Attachment, Nic, PanelPort, Stub, Switch
from checkmate.job.tofino import chips
from checkmate.job.validation import ValidPart, field_adapter, parts

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
    panel = chips.front_panel(front_panel) if front_panel else {}
    return panel | {name: port.device_port for name, port in ports.items() if port.device_port is not None}


def port_settings(switch: Switch, device_port: int) -> PortSettings:
    """Return a port's settings, by default those of its switch. A port without a name has its number."""
    by_port = {port: name for name, port in names(switch.front_panel, switch.ports).items()}
    name = by_port.get(device_port)
    settings = (switch.ports.get(name) if name else None) or PanelPort()
    speed = settings.speed or switch.speed
    fec = settings.fec or (switch.fec if settings.speed is None else None) or FEC[speed][0]
    return PortSettings(name or str(device_port), device_port, speed, fec, settings.cable or switch.cable)


_BASIS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cpu_port": frozenset({"target", "front_panel"}),
        "fec": frozenset({"target", "speed"}),
        "ports": frozenset({"target", "front_panel", "speed", "fec", "cable"}),
        "pfc": frozenset({"target"}),
    }
)
"""Dependencies of a switch's fields that have no fixed default."""


_REQUIRED: Final[Mapping[str, Any]] = {
    "name": "",
    "address": "",
    "stub": Stub(ip=IPv4Address(0), mac="", port=0),
}
"""Of a switch of which only other fields are of interest."""
_ANY_SWITCH: Final = Switch(**_REQUIRED)


def effective(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a switch's valid fields with defaults applied, so that equivalent descriptions are equal.

    Fields that depend on a faulty field are left out.
    """
    settings = {key: value for key, value in fields.items() if _BASIS.get(key, set()) <= fields.keys()}
    switch = Switch(**{**_REQUIRED, **settings})
    if "cpu_port" in settings:
        settings["cpu_port"] = switch.packet_port
    if "target" not in settings or not switch.is_tofino:
        return settings
    if "pfc" in settings and switch.pfc.cells is None:
        settings["pfc"] = replace(switch.pfc, cells=chips.CHIPS[switch.target].free_cells)
    if "fec" in settings:
        settings["fec"] = switch.fec or FEC[switch.speed][0]
    if "ports" in settings:
        settings["ports"] = {name: port for name in switch.ports if (port := _own_settings(switch, name))}
    return settings


def _own_settings(switch: Switch, name: str) -> dict[str, object]:
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
    settings = {key: value for key, value in vars(port).items() if value is not None}
    return {key: value for key, value in (derived | settings).items() if value != usual[key]}


OF_TOFINO = ("p4runtime", "front_panel", "ports", "speed", "fec", "cable", "mtu", "pfc")
"""Keys of a switch that only apply to Tofinos."""


def resolve(raw: Any) -> list[Fault]:
    """Replace front-panel names by device ports, in place. Return faults for unknown names."""
    switches = {switch.fields.get("name"): switch for switch in parts(raw, Switch, "fabric", "switches")}
    faults = []
    for part, place in _attachments(raw):
        path, port = part.path, place.get("port")
        switch = switches.get(part.fields.get("switch"))
        if not isinstance(port, str) or switch is None or switch.fields.get("target") not in chips.TARGETS:
            continue
        panel = switch.get("front_panel", "ports")
        if panel is None:
            message = "cannot be checked while front_panel or ports of its switch is faulty"
            faults.append(Fault((*path, "port"), message))
            continue
        device_ports = names(*panel)
        if port in device_ports:
            place["port"] = device_ports[port]
        else:
            faults.append(Fault((*path, "port"), _unknown(port, str(switch.fields["name"]), device_ports)))
    return faults


def _attachments(raw: Any) -> Iterator[tuple[ValidPart, dict[str, Any]]]:
    """Yield every mapping with `switch` and `port`, as its valid part and as data."""
    attachments = [
        *interfaces(raw),
        *parts(raw, Nic, "shadow_nodes", "nics"),
        *parts(raw, Attachment, "fabric", "links"),
    ]
    for part in attachments:
        if isinstance(at := _at(raw, part.path), dict):
            yield part, at


def _at(raw: Any, path: Path) -> Any:
    for step in path:
        raw = raw[step]
    return raw


def _unknown(port: str, switch: str, device_ports: Mapping[str, int]) -> str:
    if device_ports:
        range_of_names = f"its ports are {next(iter(device_ports))} to {list(device_ports)[-1]}"
        return f"switch {switch!r} has no port {port!r}; {range_of_names}; or use a device port's number"
    boards = ", ".join(chips.FRONT_PANELS)
    return (
        f"the device port of {port!r} on switch {switch!r} is unknown; specify its board in front_panel "
        f'({boards}), or the port in its ports, such as {{"{port}": 128}}'
    )


def tofino_faults(raw: Any) -> Iterator[Fault]:
    """Yield faults that concern Tofinos: of switches, and of the ports that jobs use."""
    attached = [part for part, _ in _attachments(raw)]
    for switch in parts(raw, Switch, "fabric", "switches"):
        target, data = switch.fields.get("target"), _at(raw, switch.path)
        if target not in chips.TARGETS:
            if target is not None and isinstance(data, dict):
                yield from _not_tofino(switch, data, target)
            continue
        yield from _cpu_port(switch, str(target))
        yield from _board(switch, str(target))
        yield from _port_settings(switch, str(target))
        name = switch.fields.get("name")
        yield from _used_ports(switch, str(target), [p for p in attached if p.fields.get("switch") == name])


def _is_default(key: str, value: object) -> bool:
    """Return whether a value is the default, as in a job file that a program has written."""
    try:
        return bool(field_adapter(Switch, key).validate_python(value) == getattr(_ANY_SWITCH, key))
    except ValidationError:
        return False


def _not_tofino(switch: ValidPart, data: Mapping[str, Any], target: str) -> Iterator[Fault]:
    for key in OF_TOFINO:
        if key in data and not _is_default(key, data[key]):
            yield Fault((*switch.path, key), f"is only for Tofinos, but the target is {target}; remove it")
    if switch.fields.get("cpu_port") not in (None, CPU_PORT):
        yield Fault(
            (*switch.path, "cpu_port"), f"must be {CPU_PORT}, for which {target}'s program is compiled"
        )


def _cpu_port(switch: ValidPart, target: str) -> Iterator[Fault]:
    port, chip = switch.fields.get("cpu_port"), chips.CHIPS[target]
    if port is not None and port not in chip.cpu_ports:
        ports = ", ".join(map(str, chip.cpu_ports))
        yield Fault((*switch.path, "cpu_port"), f"must be a CPU port of {target} ({ports}), not {port}")


def _board(switch: ValidPart, target: str) -> Iterator[Fault]:
    if switch.fields.get("front_panel") is not None and target != "tofino":
        yield Fault(
            (*switch.path, "front_panel"),
            f"is a board with a tofino, not a {target}; list the names in ports",
        )
    first: dict[int, str] = {}
    chip = chips.CHIPS[target]
    for name, port in (switch.fields.get("ports") or {}).items():
        number = port.device_port
        if number is None:
            if name not in names(switch.fields.get("front_panel"), switch.fields["ports"]):
                yield Fault(
                    (*switch.path, "ports", name), "has no device_port, nor does front_panel define it"
                )
            continue
        path = (*switch.path, "ports", name)
        if chips.use(chip, number) != "front panel":
            yield Fault(path, _no_front_port(number, target))
        if number in first:
            yield Fault(path, f"device port {number} is already named {first[number]}; each has one name")
        first.setdefault(number, name)


def _no_front_port(number: int, target: str) -> str:
    chip = chips.CHIPS[target]
    kind = chips.use(chip, number)
    fault = "does not exist" if kind == "nothing" else f"is {'the' if kind == 'CPU' else 'a'} {kind} port"
    return (
        f"device port {number} of {target} {fault}; the front panel has {chip.first_front} to "
        f"{chip.last_front} in pipe 0, and 128 more in each next of {chips.PIPES} pipes"
    )


def _port_settings(switch: ValidPart, target: str) -> Iterator[Fault]:
    """Yield faults of speed and FEC, of the switch and of ports with their own settings."""
    default, chip = switch.fields.get("speed"), chips.CHIPS[target]
    fields: list[tuple[Path, PanelPort]] = (
        [((), PanelPort(speed=default, fec=switch.fields.get("fec")))] if default else []
    )
    fields += [(("ports", name), port) for name, port in (switch.fields.get("ports") or {}).items()]
    for path, port in fields:
        speed = port.speed or default
        if speed is None:
            continue
        if speed not in chip.speeds:
            choices = ", ".join(chip.speeds)
            yield Fault((*switch.path, *path, "speed"), f"{target} has no {speed} ports; speeds: {choices}")
        if port.fec is not None and port.fec not in FEC[speed]:
            choices = " or ".join(FEC[speed])
            yield Fault((*switch.path, *path, "fec"), f"a {speed} port's FEC is {choices}, not {port.fec}")


def _used_ports(switch: ValidPart, target: str, attachments: list[ValidPart]) -> Iterator[Fault]:
    """Yield faults of a job's device ports: not on the front panel, or on the lanes of another."""
    chip, ports = chips.CHIPS[target], switch.get("front_panel", "ports", "speed")
    if ports is None:
        return
    board, port_settings, default = ports
    names_by_number = {number: name for name, number in names(board, port_settings).items()}
    lanes: dict[int, dict[int, ValidPart]] = defaultdict(dict)
    for part in attachments:
        number = part.fields.get("port")
        if number is None:
            continue
        path = (*part.path, "port")
        if chips.use(chip, number) != "front panel":
            yield Fault(path, _no_front_port(number, target))
            continue
        if board is not None and number not in names_by_number:
            yield Fault(path, f"device port {number} is not on the front panel of a {board}")
            continue
        name = names_by_number.get(number, str(number))
        speed = (port_settings[name].speed if name in port_settings else None) or default
        width, lane = chip.speeds.get(speed, 0), number % chip.lanes
        if width and lane % width:
            yield Fault(path, f"a {speed} port takes {width} lanes and cannot begin at {name}, lane {lane}")
            continue
        lane_users = lanes[number - lane]
        for lane_number in range(lane, lane + max(width, 1)):
            user = lane_users.setdefault(lane_number, part)
            if user is not part and user.fields["port"] != number:
                yield Fault(path, f"{name} at {speed} shares a lane with device port {user.fields['port']}")
                break
