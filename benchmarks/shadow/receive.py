"""A shadow node's receiving: bytes/s into buckets beside a bare `recv_into` loop, in turns.

Both read the same connections, to which a process in another namespace sends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network

from rich.progress import track

from benchmarks.figures import Figure, Result, Skipped, ratios
from checkmate.planner.profile import sender
from checkmate.planner.profile.receive import Receiver
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.inlet import BucketSets
from checkmate.wire.tcp import SO_RCVBUFFORCE
from topologies.kernel import links, namespaces

TITLE = "Shadow node, receiving: bytes/s into buckets / a bare recv loop, same connections, pair by pair"
NICS = (1, 2)
PAIRS, SECONDS = 15, 0.5
BARE_BYTES = 4 << 20
"""Size of the bare loop's buffer, which is reused."""

_SENDER, _RECEIVER = (namespaces.name_of("benchreceive", name) for name in ("sender", "receiver"))
_SUBNET = IPv4Network("10.99.0.0/24")
_OUT, _IN = IPv4Address("10.99.0.1"), IPv4Address("10.99.0.2")


def measure() -> list[Result]:
    """Measure with one NIC and with two."""
    if os.geteuid() != 0:
        return [Skipped("shadow_receive", "needs root, for network namespaces")]
    results: list[Result] = []
    for nics in NICS:
        with link(), connections(nics) as socks:
            bare, buckets = [], []
            sets = touched(socks)
            for _ in track(range(PAIRS), f"{nics} NIC", transient=True):
                bare.append(bare_loop(socks, SECONDS))
                buckets.append(into_buckets(socks, SECONDS, sets))
        words = "1 stream, 1 thread" if nics == 1 else f"{nics} streams, {nics} threads"
        middle = [sorted(rates)[PAIRS // 2] * 8e-9 for rates in (buckets, bare)]
        note = f"{middle[0]:.3g} / {middle[1]:.3g} Gbit/s"
        results.append(
            Figure(f"buckets / bare loop, {words}", ratios(buckets, bare), "", 0.9, 0.7, note=note)
        )
    return results


@contextmanager
def link() -> Iterator[None]:
    """Create two namespaces with a cable between them."""
    try:
        for name in (_SENDER, _RECEIVER):
            namespaces.remove(name)
            namespaces.create(name)
            links.prepare(name)
        links.add_cable(_SENDER, "out", _RECEIVER, "in", mtu=1500)
        links.set_address(_SENDER, "out", _OUT, _SUBNET)
        links.set_address(_RECEIVER, "in", _IN, _SUBNET)
        yield
    finally:
        namespaces.end_processes((_SENDER, _RECEIVER))
        for name in (_SENDER, _RECEIVER):
            namespaces.remove(name)


@contextmanager
def connections(count: int) -> Iterator[list[socket.socket]]:
    """Yield connections to which a process in the other namespace sends endlessly."""
    with namespaces.entered(_RECEIVER):
        servers = [socket.create_server((str(_IN), 0)) for _ in range(count)]
    ports = [str(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    command = [sys.executable, "-I", sender.__file__, str(_IN), *ports]
    with namespaces.entered(_SENDER):
        process = subprocess.Popen(command)
    socks = [server.accept()[0] for server in servers]
    try:
        yield socks
    finally:
        process.kill()
        process.wait()
        for sock in (*socks, *servers):
            sock.close()


def bare_loop(socks: Sequence[socket.socket], seconds: float) -> float:
    """Return bytes per second of one thread per connection with `recv_into` of the same buffer."""
    counts = [0] * len(socks)
    end = time.monotonic() + seconds

    def read(number: int) -> None:
        sock, buffer = socks[number], bytearray(BARE_BYTES)
        sock.setblocking(True)
        while time.monotonic() < end:
            counts[number] += sock.recv_into(buffer)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(socks))]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - start)


def into_buckets(socks: Sequence[socket.socket], seconds: float, sets: BucketSets) -> float:
    """Return bytes per second of a shadow node's readers on the same connections."""
    receiver = Receiver(socks, sets)
    try:
        start, before = time.monotonic(), receiver.received
        time.sleep(seconds)
        return (receiver.received - before) / (time.monotonic() - start)
    finally:
        receiver.close()


def touched(socks: Sequence[socket.socket]) -> BucketSets:
    """Return buckets whose memory was written once."""
    receiver = Receiver(socks)
    try:
        receiver.settle()
    finally:
        receiver.close()
    return receiver.sets
