"""Addresses in job files: of hosts, interfaces, services and files. Pure."""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_HOST_PORT = re.compile(r"(?P<host>[^:\s]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?![0-9]+(\.[0-9]+)*\.?$){_LABEL}(\.{_LABEL})*\.?")


_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}")


NAME_BYTES: Final = 255
"""Of a file, on Linux's file systems."""


def checked_path(value: object) -> object:
    """Return the path of a file that may exist. Raise `ValueError` for a name that no file can have."""
    if isinstance(value, str) and (
        "\0" in value or max(map(len, os.fsencode(value).split(b"/"))) > NAME_BYTES
    ):
        raise ValueError(f"must be the path of a file, whose names have up to {NAME_BYTES} bytes and no NUL")
    return value


def checked_host(value: str) -> str:
    """Return a host name or IP address, the latter in its usual form. Raise `ValueError` for others."""
    try:
        return str(ip_address(value))
    except ValueError:
        if len(value) > 253 or not _HOST.fullmatch(value):
            raise ValueError("must be a host name or an IP address, such as 192.168.0.1") from None
    return value


def checked_mac(value: object) -> str:
    """Return a unicast MAC address in lower case. Raise `ValueError` for others."""
    if not isinstance(value, str) or not _MAC.fullmatch(value.lower()):
        raise ValueError("must be a MAC address such as 02:00:00:00:00:01 (in quotes)")
    mac = value.lower()
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError("must be a unicast MAC address such as 02:00:00:00:00:01")
    return mac


def checked_ip(value: object) -> IPv4Address:
    """Return the IPv4 address of a host. Raise `ValueError` for others."""
    try:
        address = IPv4Address(value) if isinstance(value, (str, IPv4Address)) else None
    except ValueError:
        address = None
    if address is None or address.is_multicast or address.is_unspecified or int(address) == 0xFFFFFFFF:
        raise ValueError("must be a host's IPv4 address such as 10.0.0.1")
    return address


def checked_host_port(value: str) -> str:
    """Return `host:port`. Raise `ValueError` if it is something else."""
    match = _HOST_PORT.fullmatch(value)
    if not match or not 0 < int(match["port"]) < 65536:
        raise ValueError("must be host:port such as 192.168.0.5:7000")
    checked_host(match["host"].strip("[]"))
    return value


def checked_source(value: str) -> str:
    """Return an interface's name, or a network in its usual form. Raise `ValueError` for others."""
    try:
        return str(ip_network(value, strict=False))
    except ValueError:
        if not _INTERFACE.fullmatch(value) or ip_like(value):
            raise ValueError(
                "must be the name of an interface, such as eth1, or a network, such as 10.1.0.0/16, in which "
                "each host has an address"
            ) from None
    return value


def ip_like(text: str) -> bool:
    """Return whether a text looks like an IPv4 address, whether or not it is one."""
    return re.fullmatch(r"[0-9.]+", text) is not None


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[host]:port`, as sockets expect them."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def records_beside(mgmt: str) -> tuple[str, int]:
    """Return the default address for step records of a node: the port after that of `mgmt`."""
    host, port = split_address(mgmt)
    return host, port + 1
