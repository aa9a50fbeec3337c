"""For tests of the ring: loopback addresses, ranks in threads, and steps played as pure data."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from checkmate.ring.steps import Receive, RingSteps, Send

Result = TypeVar("Result")
Data = TypeVar("Data")


def loopback(ranks: int) -> list[str]:
    """An address for each rank."""
    return [f"127.0.0.{rank + 1}" for rank in range(ranks)]


def free_port() -> int:
    """A port with room for some channels above it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return int(port) if port < 65000 else free_port()


def on_all_ranks(ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """Run `work` for each rank in a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def play(
    steps: Sequence[RingSteps],
    send: Callable[[int, Send], Data],
    receive: Callable[[int, Receive, Data], None],
) -> None:
    """Play one channel's steps of all ranks to the end: a send waits for what it names, and a wire has
    room for everything.
    """
    ranks = len(steps)
    sent, received = [0] * ranks, [0] * ranks
    wires: list[list[tuple[int, Data]]] = [[] for _ in range(ranks)]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            if sent[rank] < len(own.sends) and own.sends[sent[rank]].after <= received[rank]:
                going = own.sends[sent[rank]]
                wires[(rank + 1) % ranks].append((going.stop - going.start, send(rank, going)))
                sent[rank] += 1
                moved = True
            if wires[rank]:
                coming = own.receives[received[rank]]
                length, data = wires[rank].pop(0)
                assert length == coming.stop - coming.start
                receive(rank, coming, data)
                received[rank] += 1
                moved = True
    assert [(len(own.sends), len(own.receives)) for own in steps] == list(zip(sent, received, strict=True))
