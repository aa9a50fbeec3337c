"""The network interfaces that have this host's addresses, and their speed."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

_SIOCGIFCONF: Final = 0x8912
_ENTRY: Final = 40
"""Bytes of `struct ifreq` on 64-bit Linux: a name of 16, then a socket address."""
_ROOM: Final = 1024 * _ENTRY
_SYS: Final = Path("/sys/class/net")


def interface_of(address: IPv4Address) -> str:
    """Return the name of the interface that has an address. Raise `ValueError` if none has."""
    if address.is_loopback:  # the whole network is its
        return "lo"
    names = interface_names()
    if address not in names:
        raise ValueError(f"no interface of this host has the address {address}: correct ip in the job file")
    return names[address]


def interface_names() -> dict[IPv4Address, str]:
    """Return the name of the interface that has each of this host's IPv4 addresses, in the kernel's order."""
    room = array.array("B", bytes(_ROOM))
    place, _ = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", _ROOM, place))
    data = room.tobytes()[: struct.unpack_from("i", answer)[0]]
    entries = [data[start : start + _ENTRY] for start in range(0, len(data), _ENTRY)]
    return {
        IPv4Address(entry[20:24]): entry[:16].split(b"\0")[0].decode().partition(":")[0] for entry in entries
    }


def speed_of(interface: str) -> int:
    """Return an interface's speed in Mbit/s; 0 if it is unknown, as for virtual ones."""
    try:
        return max(int((_SYS / interface / "speed").read_text()), 0)
    except (OSError, ValueError):
        return 0
