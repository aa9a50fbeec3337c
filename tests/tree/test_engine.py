"""The tree's AllReduce over loopback: its bits, and ranks that leave."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch

from checkmate.ring.place import RingError, RingPlace
from checkmate.tagger import Tagger
from checkmate.tagger.program import SocketState
from checkmate.tree.connections import Tree, connect_tree
from checkmate.tree.engine import TreeEngine
from checkmate.wire.schedule import Bucket
from testbed.ports import free_port
from tests.support.rings import Result, loopback, on_all_ranks, random_values, same_bits
from tests.support.trees import tree_average


class Averaging:
    """One rank's AllReduce, with a blocking call."""

    def __init__(self, tree: Tree, tensors: Sequence[torch.Tensor], slice_bytes: int) -> None:
        self.outcomes: queue.SimpleQueue[int | RingError] = queue.SimpleQueue()
        self.count = len(tensors)
        buckets = [Bucket(tensor.numel(), tensor.element_size(), 0) for tensor in tensors]
        put, ranks = self.outcomes.put, tree.place.ranks
        self.engine = TreeEngine(tree, buckets, put, put, divisor=ranks, slice_bytes=slice_bytes)
        self.engine.bind(tensors)

    def run(self) -> None:
        for index in range(self.count):
            self.engine.submit(index)
        for index in range(self.count):
            outcome = self.outcomes.get(timeout=20)
            if isinstance(outcome, RingError):
                raise outcome
            assert outcome == index


def with_trees(ranks: int, channels: int, work: Callable[[Tree], Result]) -> list[Result]:
    first = free_port(12)

    def connect_and_work(rank: int) -> Result:
        with connect_tree(RingPlace(rank, loopback(ranks), channels, port=first), timeout=20) as tree:
            return work(tree)

    return on_all_ranks(ranks, connect_and_work)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13])
def test_averages_have_the_defined_bits(ranks: int) -> None:
    sizes = (1, 0, 1000, 70_001)
    iterations, channels = 3, 2
    values = [
        [random_values(ranks, size, torch.float32, 10 * i + n) for n, size in enumerate(sizes)]
        for i in range(iterations)
    ]

    def work(tree: Tree) -> bool:
        rank = tree.place.rank
        tensors = [torch.empty(size) for size in sizes]
        averaging = Averaging(tree, tensors, 4096)
        for iteration in values:
            for tensor, bucket in zip(tensors, iteration, strict=True):
                tensor.copy_(bucket[rank])
            averaging.run()
            for tensor, bucket in zip(tensors, iteration, strict=True):
                assert same_bits(tensor, tree_average(bucket, channels))
        averaging.engine.close()
        return True

    assert all(with_trees(ranks, channels, work))


def test_buckets_that_are_larger_than_all_buffers() -> None:
    """A rank that waited for a send would not receive what the other end waits to send."""
    ranks, elements = 3, 12 << 20

    def work(tree: Tree) -> float:
        tensor = torch.full((elements,), float(tree.place.rank))
        averaging = Averaging(tree, [tensor], 1 << 20)
        averaging.run()
        averaging.engine.close()
        return float((tensor - 1.0).abs().max())

    assert with_trees(ranks, 1, work) == [0.0] * ranks


@pytest.mark.parametrize("leaver", [0, 2, 4])
def test_all_ranks_learn_that_one_has_left(leaver: int) -> None:
    def work(tree: Tree) -> str:
        averaging = Averaging(tree, [torch.ones(100)], 4096)
        averaging.run()
        if tree.place.rank == leaver:
            averaging.engine.close()
            return "left"
        with pytest.raises(RingError) as raised:
            averaging.run()
        averaging.engine.close()
        return str(raised.value)

    texts = with_trees(5, 1, work)
    assert texts[leaver] == "left"
    assert any(f"rank {leaver}" in text for rank, text in enumerate(texts) if rank != leaver), texts


def test_close_with_buckets_in_progress_breaks_the_tree() -> None:
    started = threading.Barrier(3)

    def work(tree: Tree) -> str:
        averaging = Averaging(tree, [torch.ones(100)], 4096)
        started.wait(20)
        if tree.place.rank == 1:  # never takes part
            averaging.engine.close()
            return ""
        averaging.engine.submit(0)
        outcome = averaging.outcomes.get(timeout=20)
        averaging.engine.close()
        return str(outcome)

    _, _, last = with_trees(3, 1, work)
    assert "rank 2, channel 0" in last


def test_a_missing_rank_is_named() -> None:
    first = free_port(12)
    with pytest.raises(RingError, match="rank 0 can't reach rank 2 "):
        connect_tree(RingPlace(0, loopback(3), 1, port=first), timeout=0.2)


class _SilentTagger:
    """A tagger that takes ranges, and writes no tags."""

    def store(self, sock: socket.socket, state: SocketState) -> None:
        state.established = 1

    fetch = store


def test_a_root_whose_buffer_is_full_as_a_chunk_begins_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes nothing of the chunk then, which must not begin a second time."""
    monkeypatch.setattr("checkmate.ring.connections.BUFFER_BYTES", 1 << 16)
    ranks, count, elements = 3, 60, 1 << 14
    first = free_port(12)

    def work(rank: int) -> bool:
        tagger = cast(Tagger, _SilentTagger()) if rank != 1 else None
        place = RingPlace(rank, loopback(ranks), 1, port=first)
        with connect_tree(place, tagger, timeout=20) as tree:
            tensors = [torch.full((elements,), float(rank)) for _ in range(count)]
            averaging = Averaging(tree, tensors, 1 << 14)
            averaging.run()
            averaging.engine.close()
            return all(bool((tensor == 1.0).all()) for tensor in tensors)

    assert on_all_ranks(ranks, work) == [True] * ranks


def test_nothing_is_written_to_files_that_have_the_numbers_of_closed_ones(tmp_path: Path) -> None:
    """A thread may submit a bucket while another one closes the engine."""

    def work(tree: Tree) -> bytes:
        averaging = Averaging(tree, [torch.ones(100)], 4096)
        averaging.engine.close()
        with ExitStack() as stack:
            files = [stack.enter_context((tmp_path / f"{tree.place.rank}.{n}").open("wb")) for n in range(9)]
            averaging.engine._wake()
            return b"".join(Path(file.name).read_bytes() for file in files)

    assert with_trees(3, 1, work) == [b""] * 3
