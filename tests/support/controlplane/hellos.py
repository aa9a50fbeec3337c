"""Hellos with their MAC, as a shadow node sends them."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address

from checkmate.keys.macs import hello_mac
from checkmate.wire.tag import Ends, Hello


def signed(hello: Hello, ends: Ends, key: bytes) -> bytes:
    """Return the 40 bytes of a hello on this connection."""
    return hello.pack(hello_mac(key, hello.covered(ends)))


def ends_of(sock: socket.socket) -> Ends:
    """Return both ends of a shadow node's connected socket."""
    (ip, port), (stub_ip, stub_port) = sock.getsockname(), sock.getpeername()
    return Ends(IPv4Address(ip), port, IPv4Address(stub_ip), stub_port)
