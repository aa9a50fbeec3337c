"""The operator's fabric file: switches, links, and what each job may have of them (`grants`).

It is the authority if several owners write job files: `grants` has the rules for those. What is granted is
an `Extent` each, a range of numbers, so that one rule tells whether a claim is within a grant, and whether
two grants overlap.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from checkmate.job import checks
from checkmate.job.addresses import checked_host, checked_host_port, checked_mac, split_address
from checkmate.job.faults import Fault
from checkmate.job.faults import Path as YamlPath
from checkmate.job.fields import CPU_PORT, Described, Name, whole
from checkmate.job.schema import Fabric, Frozen, TagSettings
from checkmate.job.tofino import chips, ports
from checkmate.job.tofino.chips import TARGETS
from checkmate.job.validation import validated
from checkmate.job.yaml_lines import Document, JobError, resolve_tls

_MAC_BITS: Final = 48
_TCP_PORTS: Final = 1 << 16
_PORTS: Final = re.compile(r"([0-9]{1,3})-([0-9]{1,3})")
_PANEL: Final = re.compile(chips.PORT_NAME)


class Extent(NamedTuple):
    """The numbers `low` to `high` of a space, such as that of IPv4 addresses, or of one switch's ports."""

    space: Hashable
    low: int
    high: int

    def has(self, inner: Extent) -> bool:
        """Return whether all of another extent is in this one."""
        return self.space == inner.space and self.low <= inner.low and inner.high <= self.high


def address_extent(value: object) -> Extent:
    """Return the extent of an IPv4 address or network. Raise `ValueError` for others."""
    if isinstance(value, str | IPv4Address):
        try:
            network = IPv4Network(str(value))
            return Extent("ip", int(network.network_address), int(network.broadcast_address))
        except ValueError:
            if (wider := _wider(str(value))) is not None:
                raise ValueError(f"must be a network, such as {wider}, or one address") from None
    raise ValueError("must be an IPv4 address or network, such as 10.0.0.1 or 10.0.0.0/28")


def _wider(text: str) -> IPv4Network | None:
    """Return the network of an address with a prefix length, such as 10.0.0.5/28."""
    try:
        return IPv4Network(text, strict=False)
    except ValueError:
        return None


def mac_extent(value: object) -> Extent:
    """Return the extent of a MAC address, or of all that begin with its first bits. Raise `ValueError`."""
    text, slash, prefix = str(value).partition("/")
    try:
        low = int(checked_mac(text).replace(":", ""), 16)
        bits = int(prefix) if slash else _MAC_BITS
        high = low | ((1 << (_MAC_BITS - bits)) - 1)
        if bits < 1 or high - low != (1 << (_MAC_BITS - bits)) - 1:
            raise ValueError
    except ValueError:
        such = '"02:00:00:00:00:01" or "02:00:00:00:01:00/40", in quotes'
        raise ValueError(f"must be a MAC address, or the first one of a block: {such}") from None
    return Extent("mac", low, high)


def service_extent(value: object) -> Extent:
    """Return the extent of a management address: a host, HOST:PORT, or a network. Raise `ValueError`.

    A host or network has all of its TCP ports. A name is only ever equal to itself.
    """
    text = str(value)
    host, ports = text, (0, _TCP_PORTS - 1)
    try:
        if (network := _network(text)) is None:
            host, ports = _served(text)
            network = _network(host)
    except ValueError:
        such = "192.168.0.10, shadow0:7000 or 192.168.0.0/28"
        raise ValueError(f"must be a host, HOST:PORT or a network, such as {such}") from None
    if network is None:
        return Extent(("host", host.lower().rstrip(".")), *ports)
    first, last = int(network[0]) * _TCP_PORTS, int(network[-1]) * _TCP_PORTS
    return Extent(("service", network.version), first + ports[0], last + ports[1])


def _served(text: str) -> tuple[str, tuple[int, int]]:
    """Return the host and the ports of `HOST:PORT` or HOST. Raise `ValueError` for others."""
    if ":" not in text:
        return checked_host(text), (0, _TCP_PORTS - 1)
    host, port = split_address(checked_host_port(text))
    return host, (port, port)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    """Return an IP network or address, an IPv4 one also if it is within IPv6; `None` for a name."""
    try:
        network = ip_network(text)
    except ValueError:
        if "/" in text:
            raise
        return None
    mapped = getattr(network[0], "ipv4_mapped", None)
    return IPv4Network(mapped) if mapped is not None and network.num_addresses == 1 else network


def port_range(value: object) -> tuple[int, int] | str:
    """Return the first and last of a switch's ports, or a front-panel name. Raise `ValueError` for others."""
    if isinstance(value, str) and (match := _PORTS.fullmatch(value)):
        low, high = int(match[1]), int(match[2])
        if low <= high < CPU_PORT:
            return low, high
    elif isinstance(value, str) and _PANEL.fullmatch(value):
        return value
    elif type(value) is int and 0 <= value < CPU_PORT:
        return value, value
    most = CPU_PORT - 1
    raise ValueError(f'must be a port from 0 to {most}, a range such as "1-16", or a name such as "1/0"')


Ports = Annotated[
    tuple[int, int] | str,
    PlainValidator(port_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": CPU_PORT - 1},
                {"type": "string", "pattern": rf"{chips.PORT_NAME}|^[0-9]{{1,3}}-[0-9]{{1,3}}$"},
            ]
        }
    ),
]
_TEXT: Final = WithJsonSchema({"type": "string", "minLength": 1})
Addresses = Annotated[Extent, PlainValidator(address_extent), _TEXT]
Macs = Annotated[Extent, PlainValidator(mac_extent), _TEXT]
Services = Annotated[Extent, PlainValidator(service_extent), _TEXT]


STREAMS: Final = 8192
"""Streams of a job whose grant names no number: as many as a switch's table holds."""


@dataclass(frozen=True, kw_only=True)
class Grant(Frozen):
    """What one job may have of the fabric: nothing but this."""

    folder: Path | None = None
    """Where its file must be, as the command line names it. Anywhere by default."""
    ports: Annotated[Mapping[Name, tuple[Ports, ...]], Described(default={})] = field(default_factory=dict)
    """By switch."""
    addresses: tuple[Addresses, ...] = ()
    """Of its hosts and shadow NICs on the training network."""
    macs: tuple[Macs, ...] = ()
    shadow_nodes: tuple[Services, ...] = ()
    """Where its shadow nodes serve, on the management network."""
    streams: Annotated[int, whole(1, 1 << 20)] = STREAMS
    """How many it may have at most."""
    tag: TagSettings = TagSettings()  # noqa: RUF009 - it is frozen
    """The DSCP bit and the priority that it must use."""


@dataclass(frozen=True, kw_only=True)
class FabricFile(Fabric):
    """A fabric, and the grants of jobs by their names."""

    grants: Annotated[Mapping[Name, Grant], Described(default={})] = field(default_factory=dict)


@dataclass(frozen=True)
class GrantItem:
    """One item of a grant: to which job, and where it is in the file."""

    job: str
    extent: Extent
    path: YamlPath


@dataclass(frozen=True)
class Granted:
    """A fabric file without faults. `raw`: its fabric's data, with device ports instead of names."""

    document: Document
    raw: Mapping[str, Any]
    fabric: Fabric
    grants: Mapping[str, Grant]
    items: Mapping[object, tuple[GrantItem, ...]]
    """What is granted of each space, in order, without overlaps."""

    def owner(self, extent: Extent) -> GrantItem | None:
        """Return the grant's item that has all of an extent, if there is one."""
        items = self.items.get(extent.space, ())
        number = bisect_right(items, extent.low, key=lambda item_of_space: item_of_space.extent.low)
        item = items[number - 1] if number else None
        return item if item is not None and item.extent.has(extent) else None

    def at(self, path: YamlPath) -> str:
        """Return the place of a path in the file, as messages name it: `fabric.yaml:12`."""
        return f"{self.document.file}:{self.document.locate(Fault(path, '')).line}"


def read_fabric(file: Path, read: Callable[[Path], Document]) -> Granted:
    """Read an operator's fabric file. Raise `JobError` with every fault in it."""
    document = read(file)
    raw = copy.deepcopy(document.data)
    grants = raw.pop("grants", {}) if isinstance(raw, dict) else {}
    whole = {"fabric": raw}
    unnamed = ports.resolve(whole)
    resolve_tls(raw, file.parent)
    model, structural = validated(FabricFile, {**raw, "grants": grants})
    faults = [Fault(f.path[1:], f.message) for f in (*unnamed, *checks.within_job(whole))]
    reported = {fault.path for fault in faults}
    faults += [fault for fault in structural if fault.path not in reported]
    if model is None:
        raise JobError([document.locate(fault) for fault in dict.fromkeys(faults)])
    items = sorted(_items(model, faults), key=lambda item: (str(item.extent.space), item.extent.low))
    faults += [*_unknown_switches(model), *_of_links(model, items), *_overlaps(document, items)]
    if faults:
        raise JobError([document.locate(fault) for fault in dict.fromkeys(faults)])
    fabric = Fabric(switches=model.switches, links=model.links)
    return Granted(document, raw, fabric, model.grants, _by_space(items))


def _items(model: FabricFile, faults: list[Fault]) -> Iterator[GrantItem]:
    """Yield every item of every grant. Add faults of ports whose names are unknown."""
    switches = {switch.name: switch for switch in model.switches}
    for job, grant in model.grants.items():
        at: YamlPath = ("grants", job)
        for name, granted_ports in grant.ports.items():
            described = switches.get(name)
            front_panel = ports.names(described.front_panel, described.ports) if described is not None else {}
            for index, port in enumerate(granted_ports):
                path = (*at, "ports", name, index)
                if not isinstance(port, str):
                    yield GrantItem(job, Extent(("port", name), *port), path)
                elif port in front_panel:
                    yield GrantItem(job, Extent(("port", name), front_panel[port], front_panel[port]), path)
                elif described is not None:
                    faults.append(Fault(path, _no_port(port, name, described.target)))
        for key in ("addresses", "macs", "shadow_nodes"):
            for index, extent in enumerate(getattr(grant, key)):
                yield GrantItem(job, extent, (*at, key, index))


def _no_port(port: str, switch: str, target: str) -> str:
    if target not in TARGETS:
        return f"{port!r} is a name, and the ports of switch {switch!r} have numbers: its target is {target}"
    return f"the device port of {port!r} on switch {switch!r} is unknown; use its number, or name it in ports"


def _unknown_switches(model: FabricFile) -> Iterator[Fault]:
    names = [switch.name for switch in model.switches]
    for job, grant in model.grants.items():
        for name in grant.ports:
            if name not in names:
                known_names = ", ".join(sorted(names))
                yield Fault(
                    ("grants", job, "ports", name), f"no switch {name!r} in switches, which has {known_names}"
                )


def _of_links(model: FabricFile, items: list[GrantItem]) -> Iterator[Fault]:
    """Yield ports of links that are granted: whoever is attached there would be in the link's place."""
    for number, link in enumerate(model.links):
        for end, place in enumerate(link):
            extent = Extent(("port", place.switch), place.port, place.port)
            for item in items:
                if item.extent.has(extent):
                    fault = f"port {place.port} of {place.switch} has a link already (links[{number}][{end}])"
                    yield Fault(item.path, f"{fault}; a port has one host or one link")


def _overlaps(document: Document, items: list[GrantItem]) -> Iterator[Fault]:
    """Yield items that overlap an item of another job, at least one of those that overlap each other."""

    def line(item: GrantItem) -> int:
        return document.locate(Fault(item.path, "")).line

    widest: dict[object, GrantItem] = {}
    for item in items:
        before = widest.setdefault(item.extent.space, item)
        if before.job != item.job and item.extent.low <= before.extent.high:
            first, second = sorted((before, item), key=line)
            has = f"overlaps what job {first.job!r} has in line {line(first)}"
            yield Fault(second.path, f"{has}; grant it to one job only")
        if item.extent.high > before.extent.high:
            widest[item.extent.space] = item


def _by_space(all_items: list[GrantItem]) -> dict[object, tuple[GrantItem, ...]]:
    """Return the items of each space, those of a job that overlap as one. `all_items` is sorted."""
    by_space: dict[object, list[GrantItem]] = {}
    for item in all_items:
        items = by_space.setdefault(item.extent.space, [])
        if items and item.extent.low <= items[-1].extent.high:
            last = items.pop()
            high = max(last.extent.high, item.extent.high)
            items.append(replace(last, extent=last.extent._replace(high=high)))
        else:
            items.append(item)
    return {space: tuple(items) for space, items in by_space.items()}
