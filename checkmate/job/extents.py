"""What a grant gives, as ranges of numbers: ports, addresses, MACs, and the addresses of shadow nodes. Pure.

So one rule tells whether a claim is within a grant, and whether two grants overlap.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network
from typing import Annotated, Final, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from checkmate.job.addresses import checked_host, checked_host_port, checked_mac, split_address
from checkmate.job.fields import CPU_PORT
from checkmate.job.tofino import chips

_MAC_BITS: Final = 48
_TCP_PORTS: Final = 1 << 16
_PORTS: Final = re.compile(r"([0-9]{1,3})-([0-9]{1,3})")
_PANEL: Final = re.compile(chips.PORT_NAME)


class Extent(NamedTuple):
    """The numbers `low` to `high` of a space, such as that of IPv4 addresses, or of one switch's ports."""

    space: Hashable
    low: int
    high: int

    def has(self, other: Extent) -> bool:
        """Return whether all of another extent is in this one."""
        return self.space == other.space and self.low <= other.low and other.high <= self.high


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
    if isinstance(value, str) and (found := _PORTS.fullmatch(value)):
        low, high = int(found[1]), int(found[2])
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
