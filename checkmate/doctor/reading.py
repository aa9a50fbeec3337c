"""Reads a host: /proc, sysctls, and ioctls of interfaces (netdevice(7)). Nothing here needs privileges.

All of it is of the calling thread's network namespace, so /sys, which keeps that of its mount, is not read.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path
from typing import Any, Final

from checkmate.base import machine_memory
from checkmate.base.privileges import effective
from checkmate.doctor.deadlines import within
from checkmate.doctor.facts import Address, Clock, Facts, NicFacts
from checkmate.nccl.interfaces import interface_of

_SYSCTLS: Final = Path("/proc/sys")
_TCP: Final = (Path("/proc/thread-self/net/tcp"), Path("/proc/thread-self/net/tcp6"))
_LISTEN: Final = "0A"
_NAME_SECONDS: Final = 3.0
"""For looking up a name; one that takes longer is not this machine's."""

_RULES_SECONDS: Final = 3.0

# linux/sockios.h and linux/if.h
_GET_FLAGS, _GET_MTU, _GET_MAC, _GET_ADDRESS, _GET_NETMASK = 0x8913, 0x8921, 0x8927, 0x8915, 0x891B
_ETHTOOL: Final = 0x8946
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
# linux/ethtool.h
_DRIVER: Final = 0x03
_DRIVER_BYTES: Final = 196
_OFFLOADS: Final = {"tso": 0x1E, "gso": 0x23, "gro": 0x2B, "tx": 0x16, "rx": 0x14}
"""By ethtool's short names: its ioctls that report whether one is on."""

_BIND_ADDRESS_NO_PORT: Final = 24  # IP_BIND_ADDRESS_NO_PORT, missing in Python's socket module before 3.14

COMMON: Final = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_window_scaling",
    "net.ipv4.tcp_wmem",
)
NEIGHBOURS: Final = ("arp_ignore", "arp_announce", "rp_filter")
"""Settings of each interface, and of all."""


def read(addresses: Iterable[str], *, quick: bool = False) -> Facts:
    """Read a host.

    Args:
        addresses: those of its interfaces on the training network.
        quick: leave out listeners, of which there may be many, the firewall, which another program reads,
            and the clock's state, because systemd's filters may end a service that asks for it.
    """
    nics = {address: nic(address) for address in addresses}
    names = ["all", *(nic_facts.name for nic_facts in nics.values() if nic_facts is not None)]
    settings = [*COMMON, *(f"net.ipv4.conf.{name}.{key}" for name in names for key in NEIGHBOURS)]
    return Facts(
        release=os.uname().release,
        capabilities=effective(),
        root=os.geteuid() == 0,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=machine_memory.available(),
        sysctls=sysctls(settings),
        nics=nics,
        listening=frozenset() if quick else frozenset(listening()),
        firewall=None if quick else firewall(),
        clock=None if quick else kernel_clock(),
    )


def sysctls(names: Iterable[str]) -> dict[str, str]:
    """Return the values of these sysctls that this network namespace shows."""
    values = {}
    for name in names:
        with suppress(OSError):
            values[name] = Path(_SYSCTLS, *_parts(name)).read_text().strip()
    return values


def _parts(name: str) -> list[str]:
    """Return the path of a sysctl; the name of an interface may have dots."""
    if name.startswith("net.ipv4.conf."):
        device, _, key = name.removeprefix("net.ipv4.conf.").rpartition(".")
        return ["net", "ipv4", "conf", device, key]
    return name.split(".")


def nic(address: str) -> NicFacts | None:
    """Return the interface that has an IPv4 address, or `None`."""
    try:
        name = interface_of(IPv4Address(address))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return _nic(sock, name)
    except (OSError, ValueError):  # removed meanwhile, or never there
        return None


def _nic(sock: socket.socket, name: str) -> NicFacts:
    (flags,) = struct.unpack_from("H", _ask(sock, _GET_FLAGS, name), 16)
    (mtu,) = struct.unpack_from("i", _ask(sock, _GET_MTU, name), 16)
    mac = _ask(sock, _GET_MAC, name)[18:24]
    return NicFacts(
        name,
        up=bool(flags & _UP),
        carrier=bool(flags & _RUNNING),
        mac=mac.hex(":"),
        mtu=mtu,
        network=_network(sock, name),
        driver=_driver(sock, name),
        offloads=dict(_offloads(sock, name)),
        loopback=bool(flags & _LOOPBACK),
    )


def _ask(sock: socket.socket, request: int, name: str) -> bytes:
    """Return `struct ifreq` with the kernel's answer."""
    return fcntl.ioctl(sock, request, struct.pack("16s24x", name.encode()))


def _network(sock: socket.socket, name: str) -> IPv4Network | None:
    with suppress(OSError):  # an interface without an address of its own
        address, mask = (
            IPv4Address(_ask(sock, request, name)[20:24]) for request in (_GET_ADDRESS, _GET_NETMASK)
        )
        return IPv4Network(f"{address}/{mask}", strict=False)
    return None


def _ethtool(sock: socket.socket, name: str, buffer: array.array[int]) -> bool:
    """Have ethtool's ioctl fill `buffer`. Return whether the driver knows it."""
    with suppress(OSError):
        fcntl.ioctl(sock, _ETHTOOL, struct.pack("16sP16x", name.encode(), buffer.buffer_info()[0]))
        return True
    return False


def _driver(sock: socket.socket, name: str) -> str:
    buffer = array.array("I", struct.pack("I", _DRIVER) + bytes(_DRIVER_BYTES - 4))
    if not _ethtool(sock, name, buffer):
        return ""
    return buffer.tobytes()[4:36].partition(b"\0")[0].decode("ascii", "replace")


def _offloads(sock: socket.socket, name: str) -> Iterator[tuple[str, bool]]:
    for offload, command in _OFFLOADS.items():
        buffer = array.array("I", (command, 0))
        if _ethtool(sock, name, buffer):
            yield offload, bool(buffer[1])


def listening() -> Iterator[tuple[Address, int]]:
    """Yield address and port of each TCP socket that takes connections (proc(5))."""
    for table in _TCP:
        with suppress(OSError):  # a kernel without IPv6 has no tcp6
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTEN:
                    yield _place(local)


def firewall() -> str | None:
    """Return the rules of nftables, or `None` if they can't be read: mostly, because this is not root."""
    command = ["nft", "--numeric", "list", "ruleset"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=_RULES_SECONDS)
    return None


def _place(text: str) -> tuple[Address, int]:
    """Return the address of `0100007F:1B58`: words in the machine's own order, then the port."""
    words, _, port = text.partition(":")
    parts = (bytes.fromhex(words[start : start + 8]) for start in range(0, len(words), 8))
    packed = b"".join(part if sys.byteorder == "big" else part[::-1] for part in parts)
    address = ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address, int(port, 16)


class _Timex(ctypes.Structure):
    """The beginning of struct timex (adjtimex(2))."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_UNSYNCHRONISED: Final = 0x40


def kernel_clock() -> Clock | None:
    """Return what the kernel knows about its clock, or `None` if this process may not ask."""
    timex = _Timex()  # `modes` 0: only read
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        return None
    return Clock(not timex.status & _UNSYNCHRONISED, timex.maxerror / 1e6)


def is_here(host: str) -> bool:
    """Return whether a host name or IP address is this machine's. Claims no port."""

    def look_up() -> list[Any]:
        with suppress(OSError):
            return list(socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM))
        return []

    nothing: list[Any] = []
    for family, kind, _, _, place in within(_NAME_SECONDS, [look_up], nothing)[0]:
        with suppress(OSError), socket.socket(family, kind) as sock:
            sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind(place)
            return True
    return False


def route_error(source: str, destination: str) -> str | None:
    """Return why nothing can be sent from one of this host's addresses to another host, or `None`.

    Asks the kernel for the route, and sends nothing.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((source, 0))
            sock.connect((destination, 9))
    except OSError as error:
        return error.strerror or str(error)
    return None


def source_to(host: str) -> str | None:
    """Return the address from which this host would call an IP address; `None` without a route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])
    return None
