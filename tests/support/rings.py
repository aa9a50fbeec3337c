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
    send_counts, receive_counts = [0] * ranks, [0] * ranks
    wires: list[list[tuple[int, Data]]] = [[] for _ in range(ranks)]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, rank_steps in enumerate(steps):
            if (
                send_counts[rank] < len(rank_steps.sends)
                and rank_steps.sends[send_counts[rank]].after <= receive_counts[rank]
            ):
                going = rank_steps.sends[send_counts[rank]]
                wires[(rank + 1) % ranks].append((going.stop - going.start, send(rank, going)))
                send_counts[rank] += 1
                has_moved = True
            if wires[rank]:
                coming = rank_steps.receives[receive_counts[rank]]
                length, data = wires[rank].pop(0)
                assert length == coming.stop - coming.start
                receive(rank, coming, data)
                receive_counts[rank] += 1
                has_moved = True
    assert [(len(rank_steps.sends), len(rank_steps.receives)) for rank_steps in steps] == list(
        zip(send_counts, receive_counts, strict=True)
    )


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


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
