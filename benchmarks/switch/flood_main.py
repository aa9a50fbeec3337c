"""`python -m benchmarks.switch.flood_main`: send SYNs to a stub at a rate, by AF_PACKET and sendmmsg.

It prints the number of frames sent and the seconds of processor time used, as JSON, when its time is up.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Sequence
from ipaddress import IPv4Address

from controlplane.entities import mac_number

FRAMES = 1 << 12
"""Frames that are built in advance, and sent again and again."""
TICK = 0.001


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):
    """`struct mmsghdr` of sendmmsg(2)."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vector", ctypes.POINTER(_Vector)),
        ("vector_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("sent", ctypes.c_uint32),
    )


def syn(source: IPv4Address, source_mac: str, stub: tuple[IPv4Address, str, int], number: int) -> bytes:
    """Return a SYN from port 1024 + `number`; checksums are left out, because no stub checks them."""
    ip, mac, port = stub
    ethernet = mac_number(mac).to_bytes(6, "big") + mac_number(source_mac).to_bytes(6, "big") + b"\x08\0"
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0x4000, 64, 6, 0, source.packed, ip.packed)
    return (
        ethernet
        + head
        + struct.pack("!HHIIBBHHH", 1024 + number % 60000, port, number, 0, 0x50, 2, 65535, 0, 0)
    )


class FrameSender:
    """Sends the same frames in turn, many with each system call."""

    def __init__(self, device: str, frames: Sequence[bytes]) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.bind((device, 0))
        self._buffers = [ctypes.create_string_buffer(frame, len(frame)) for frame in frames]
        self._vectors = (_Vector * len(frames))(
            *(_Vector(ctypes.addressof(buffer), len(buffer)) for buffer in self._buffers)
        )
        self._messages = (_Message * len(frames))()
        for message, vector in zip(self._messages, self._vectors, strict=True):
            message.vector, message.vector_length = ctypes.pointer(vector), 1
        self._at = 0
        self._sendmmsg = ctypes.CDLL(None, use_errno=True).sendmmsg

    def send(self, count: int) -> int:
        """Send up to `count` frames; return how many were sent."""
        count = min(count, len(self._messages) - self._at)
        first = ctypes.byref(self._messages, self._at * ctypes.sizeof(_Message))
        sent_count = self._sendmmsg(self._socket.fileno(), first, count, 0)
        if sent_count < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._at = (self._at + sent_count) % len(self._messages)
        return int(sent_count)


def flood(sender: FrameSender, rate: int, seconds: float) -> int:
    """Send at a rate, evenly in ticks of a millisecond. Return the number of frames."""
    start = time.monotonic()
    total = 0
    while (elapsed := time.monotonic() - start) < seconds:
        backlog = int(rate * elapsed) - total
        if backlog > 0:
            total += sender.send(backlog)
        else:
            time.sleep(TICK)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--stub", nargs=3, metavar=("IP", "MAC", "PORT"), required=True)
    parser.add_argument("--mac", required=True, help="source MAC address")
    parser.add_argument("--ip", type=IPv4Address, help="source address; random ones by default")
    parser.add_argument("--rate", type=int, required=True, help="frames a second")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    stub = (IPv4Address(options.stub[0]), options.stub[1], int(options.stub[2]))
    pick = random.Random(1)
    frames = [
        syn(options.ip or IPv4Address(0x0A640000 + pick.getrandbits(16)), options.mac, stub, number)
        for number in range(FRAMES)
    ]
    sender = FrameSender(options.device, frames)
    before = time.process_time()
    total = flood(sender, options.rate, options.seconds)
    json.dump({"sent": total, "processor": time.process_time() - before}, sys.stdout)


if __name__ == "__main__":
    main()
