"""An interface's offloads, by the ethtool ioctl (linux/ethtool.h).

The embedded target moves 64 KB segments whole; BMv2 reads a frame as it is on the wire, so there the
hosts cut and sum themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from typing import Final

from topologies.kernel.namespaces import entered

_SIOCETHTOOL: Final = 0x8946
_SET_COMMANDS: Final = {
    "gro": 0x2C,
    "gso": 0x24,
    "tso": 0x1F,
    "rx checksums": 0x15,
    "tx checksums": 0x17,  # last: without it the others go too
}
_GET_COMMANDS: Final = {
    "gro": 0x2B,
    "gso": 0x23,
    "tso": 0x1E,
    "rx checksums": 0x14,
    "tx checksums": 0x16,
}
_IFNAMSIZ: Final = 16


def switch_off(namespace: str, interface: str) -> None:
    """Switch all offloads of an interface off."""
    with entered(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _SET_COMMANDS.values():
            _call(sock, interface, command, 0)


def states(namespace: str, interface: str) -> dict[str, bool]:
    """Which offloads an interface has on."""
    with entered(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return {name: bool(_call(sock, interface, command, 0)) for name, command in _GET_COMMANDS.items()}


def _call(sock: socket.socket, interface: str, command: int, value: int) -> int:
    """One `struct ethtool_value` there and back."""
    argument = (ctypes.c_uint32 * 2)(command, value)
    name = interface.encode().ljust(_IFNAMSIZ, b"\0")
    request = struct.pack("16sP16x", name, ctypes.addressof(argument))
    fcntl.ioctl(sock, _SIOCETHTOOL, request)
    return int(argument[1])
