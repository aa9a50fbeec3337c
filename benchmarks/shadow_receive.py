"""A shadow node's receiving: bytes/s into buckets beside a bare `recv_into` loop, in turns.

Both read the same connections, on which `python -m benchmarks.shadow_receive --send IP PORT...` sends from
another namespace.
"""

from __future__ import annotations

import argparse
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
from checkmate.layout import Layout, Parameter, make_layout
from checkmate.schedule import stream_layout
from checkmate.shadow.buckets import BucketSets
from checkmate.shadow.connect import RECEIVE_BUFFER
from checkmate.shadow.inlet import Inlet
from checkmate.shadow.receive import Reader
from checkmate.shadow.streams import StreamPlan
from checkmate.tcp import SO_RCVBUFFORCE
from topologies import links, namespaces

TITLE = "Shadow node, receiving: bytes/s into buckets / a bare recv loop, same connections, pair by pair"
NICS = (1, 2)
PAIRS, SECONDS = 15, 0.5
PARAMETERS, ELEMENTS = 8, 3_300_000
"""105 MB of gradients in four buckets, two sets of them."""
BARE_BYTES = 4 << 20
"""What the bare loop reads into, again and again."""

_SENDER, _RECEIVER = (namespaces.name_of("benchreceive", name) for name in ("sender", "receiver"))
_SUBNET = IPv4Network("10.99.0.0/24")
_OUT, _IN = IPv4Address("10.99.0.1"), IPv4Address("10.99.0.2")


def measure() -> list[Result]:
    """With one NIC and with two."""
    if os.geteuid() != 0:
        return [Skipped("shadow_receive", "needs root, for network namespaces")]
    found: list[Result] = []
    for nics in NICS:
        with link(), connections(nics) as socks:
            bare, ours = [], []
            buckets = Buckets(socks)
            buckets.run(SECONDS)  # touches all memory once
            for _ in track(range(PAIRS), f"{nics} NIC", transient=True):
                bare.append(bare_loop(socks, SECONDS))
                ours.append(buckets.run(SECONDS))
        words = "1 stream, 1 thread" if nics == 1 else f"{nics} streams, {nics} threads"
        middle = [sorted(rates)[PAIRS // 2] * 8e-9 for rates in (ours, bare)]
        note = f"{middle[0]:.3g} / {middle[1]:.3g} Gbit/s"
        found.append(Figure(f"buckets / bare loop, {words}", ratios(ours, bare), "", 0.9, 0.7, note=note))
    return found


@contextmanager
def link() -> Iterator[None]:
    """Two namespaces with a cable between them."""
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
    """Connections on which a process in the other namespace sends without end."""
    with namespaces.entered(_RECEIVER):
        servers = [socket.create_server((str(_IN), 0)) for _ in range(count)]
    ports = [str(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    command = [sys.executable, "-m", "benchmarks.shadow_receive", "--send", str(_IN), *ports]
    with namespaces.entered(_SENDER):
        sender = subprocess.Popen(command)
    socks = [server.accept()[0] for server in servers]
    try:
        yield socks
    finally:
        sender.kill()
        sender.wait()
        for sock in (*socks, *servers):
            sock.close()


def bare_loop(socks: Sequence[socket.socket], seconds: float) -> float:
    """Bytes a second of a thread a connection that does nothing but `recv_into` the same buffer."""
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


class Buckets:
    """The shadow node's readers on the same connections: an iteration is released as soon as it is whole."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        parameters = [Parameter(f"p{i}", (ELEMENTS,), "float32") for i in range(PARAMETERS)]
        self._socks = socks
        self._layout: Layout = make_layout(parameters, 1)
        self._sets = BucketSets(self._layout, 0, -1)
        self._inlets: list[Inlet] = []
        self._readers: list[Reader] = []

    def run(self, seconds: float) -> float:
        """Bytes a second."""
        self._sets.released = -1
        self._inlets = [self._inlet(number) for number in range(len(self._socks))]
        self._readers = [Reader("nic", self._release, lambda _: None) for _ in self._socks]
        start = time.monotonic()
        for inlet, sock, reader in zip(self._inlets, self._socks, self._readers, strict=True):
            inlet.attach(socket.socket(fileno=os.dup(sock.fileno())))
            reader.add(inlet)
        time.sleep(seconds)
        took = sum(inlet.received for inlet in self._inlets) / (time.monotonic() - start)
        for reader in self._readers:
            reader.stop()
        return took

    def _inlet(self, number: int) -> Inlet:
        """Channel `number` of a ring of two, from its last rank, which tags half of everything."""
        channels = len(self._socks)
        layout = stream_layout(self._layout.schedule, channels, number, 2, side=1, shadow_id=0)
        plan = StreamPlan(0, 0, 1, number, number, str(_IN), ("", 0))
        return Inlet(plan, layout, self._sets, first=0, joined=0)

    def _release(self) -> None:
        self._sets.released = min(inlet.whole or 0 for inlet in self._inlets)
        for reader in self._readers:
            reader.wake()


def send(ip: str, ports: Sequence[int]) -> None:
    """Send on a connection to each port, until killed."""
    data = bytes(1 << 20)

    def run(port: int) -> None:
        with socket.create_connection((ip, port)) as sock:
            while True:
                sock.sendall(data)

    for port in ports:
        threading.Thread(target=run, args=(port,)).start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--send", nargs="+", required=True, metavar=("IP", "PORT"))
    address, *numbers = parser.parse_args().send
    send(address, [int(number) for number in numbers])
