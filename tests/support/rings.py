"""Loopback addresses, ranks in threads, and simulated steps, for tests of the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from checkmate.ring.steps import Receive, RingSteps, Send
from checkmate.wire.schedule import chunk_slice

Result = TypeVar("Result")
Data = TypeVar("Data")


def loopback(ranks: int) -> list[str]:
    """Return an address for each rank."""
    return [f"127.0.0.{rank + 1}" for rank in range(ranks)]


def on_all_ranks(ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """Run `work` for each rank in a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def play(
    steps: Sequence[RingSteps],
    send: Callable[[int, Send], Data],
    receive: Callable[[int, Receive, Data], None],
) -> None:
    """Simulate one channel's steps of all ranks; a send waits for its dependency, and wires are unbounded."""
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


def averaged(values: Sequence[torch.Tensor], channels: int, divisor: int | None = None) -> torch.Tensor:
    """Return the ring's expected average: chunk k is summed starting with rank k, then divided."""
    ranks = len(values)
    expected = values[0].clone()
    for channel in range(channels):
        for chunk in range(ranks):
            where = chunk_slice(len(expected), channels, channel, ranks, chunk)
            part = slice(where.start, where.stop)
            total = values[chunk][part].clone()
            for step in range(1, ranks):
                total = total + values[(chunk + step) % ranks][part]
            expected[part] = total / (divisor or ranks)
    return expected


def random_values(ranks: int, elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return a tensor for each rank, with magnitudes so different that the order of summation matters."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-6, 6, (ranks, elements), generator=generator).exp2()
    return list((torch.randn(ranks, elements, generator=generator) * scales).to(dtype))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
