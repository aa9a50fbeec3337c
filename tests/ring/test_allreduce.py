"""The ring AllReduce: its steps as pure data, its bits over loopback, and ranks that leave."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.engine import RingEngine
from checkmate.ring.place import RingError, RingPlace
from checkmate.ring.steps import Arrival, Position, Receive, Send, allreduce_steps
from checkmate.wire.schedule import Bucket, channel_slice
from testbed.ports import free_port
from tests.support.rings import (
    Result,
    averaged,
    loopback,
    on_all_ranks,
    play,
    random_values,
    same_bits,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@given(
    elements=st.integers(0, 120),
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(2, 8),
    channels=st.integers(1, 4),
    size=st.sampled_from([8, 24, 64, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_steps_sum_in_the_defined_order(
    elements: int, dtype: torch.dtype, ranks: int, channels: int, size: int, seed: int
) -> None:
    values = random_values(ranks, elements, dtype, seed)
    bucket = Bucket(elements, values[0].element_size(), 0)
    holds = [value.clone() for value in values]

    def part(rank: int, step: Send | Receive) -> torch.Tensor:
        return holds[rank][step.start // bucket.itemsize : step.stop // bucket.itemsize]

    def receive(rank: int, step: Receive, data: torch.Tensor) -> None:
        target = part(rank, step)
        target.copy_(data if step.arrival is Arrival.KEEP else target + data)
        if step.arrival is Arrival.AVERAGE:
            target.div_(ranks)

    for channel in range(channels):
        places = [Position(rank, ranks, channel, channels) for rank in range(ranks)]
        steps = [allreduce_steps(bucket, place, size) for place in places]
        play(steps, lambda rank, step: part(rank, step).clone(), receive)
    expected = averaged(values, channels)
    assert all(same_bits(tensor_held, expected) for tensor_held in holds)


@given(
    bucket=st.builds(Bucket, elements=st.integers(0, 90), itemsize=st.just(4), shadow_id=st.just(0)),
    ranks=st.integers(2, 9),
    size=st.sampled_from([8, 64]),
)
def test_each_rank_sends_what_is_left_of_a_bucket_twice(bucket: Bucket, ranks: int, size: int) -> None:
    """Each rank sends 2 (n - 1) / n of the bucket: the minimum of a ring AllReduce."""
    steps = [allreduce_steps(bucket, Position(rank, ranks, 0, 1), size) for rank in range(ranks)]
    nbytes_sent = sum(send.stop - send.start for rank_steps in steps for send in rank_steps.sends)
    assert nbytes_sent == 2 * (ranks - 1) * bucket.nbytes
    owned = [
        {(r.start, r.stop) for r in rank_steps.receives if r.arrival is Arrival.AVERAGE}
        for rank_steps in steps
    ]
    averaged_bytes = sum(stop - start for rank_steps in owned for start, stop in rank_steps)
    whole = channel_slice(bucket.elements, 1, 0)
    assert averaged_bytes == len(whole) * bucket.itemsize


def engine_of(
    ring: Ring,
    buckets: Sequence[Bucket],
    tensors: Sequence[torch.Tensor],
    on_done: Callable[[int], None],
    on_error: Callable[[RingError], None],
    slice_bytes: int = 1 << 16,
) -> RingEngine:
    """Return an engine that averages buckets."""
    ranks = ring.place.ranks
    engine = RingEngine(ring, buckets, allreduce_steps, slice_bytes, on_done, on_error, divisor=ranks)
    engine.bind(tensors)
    return engine


class Reducing:
    """One rank's AllReduce, with a blocking call."""

    def __init__(self, ring: Ring, tensors: Sequence[torch.Tensor], slice_bytes: int = 1 << 16) -> None:
        self.outcomes: queue.SimpleQueue[int | RingError] = queue.SimpleQueue()
        self.tensors = tensors
        buckets = [Bucket(tensor.numel(), tensor.element_size(), 0) for tensor in tensors]
        self.engine = engine_of(ring, buckets, tensors, self.outcomes.put, self.outcomes.put, slice_bytes)

    def run(self) -> None:
        for index in range(len(self.tensors)):
            self.engine.submit(index)
        for index in range(len(self.tensors)):
            outcome = self.outcomes.get(timeout=20)
            if isinstance(outcome, RingError):
                raise outcome
            assert outcome == index


def with_rings(ranks: int, channels: int, work: Callable[[Ring], Result]) -> list[Result]:
    port = free_port()

    def connect_and_work(rank: int) -> Result:
        with connect_ring(RingPlace(rank, loopback(ranks), channels, port=port), timeout=20) as ring:
            return work(ring)

    return on_all_ranks(ranks, connect_and_work)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [1, 2, 4])
def test_all_ranks_get_the_defined_bits(ranks: int, channels: int) -> None:
    sizes = [(200_003, torch.float32), (5, torch.bfloat16), (99_999, torch.bfloat16), (50_001, torch.float16)]
    sizes += [(30_000, torch.float64), (1, torch.float32)]
    values = [random_values(ranks, n, dtype, seed) for seed, (n, dtype) in enumerate(sizes)]
    expected = [averaged(value, channels) for value in values]

    def work(ring: Ring) -> bool:
        good = True
        for slice_bytes in (4096, 1 << 20):
            buckets = [torch.empty_like(value[0]) for value in values]
            reducing = Reducing(ring, buckets, slice_bytes)
            with closing(reducing.engine):
                for _ in range(2):
                    for tensor, value in zip(buckets, values, strict=True):
                        tensor.copy_(value[ring.place.rank])
                    reducing.run()
                    good = good and all(map(same_bits, buckets, expected))
        return good

    assert with_rings(ranks, channels, work) == [True] * ranks


class LateReader(socket.socket):
    """A socket that is read late for the second half of every `length` bytes."""

    def __init__(self, sock: socket.socket, length: int) -> None:
        super().__init__(fileno=sock.detach())
        self._length, self._read = length, 0

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        if self._read % self._length == self._length // 2:
            threading.Event().wait(0.2)
        count = super().recv_into(buffer, nbytes, flags)
        self._read += count
        return count


def test_tensors_may_be_overwritten_right_after_completion() -> None:
    """Receiving everything is not sending everything: bytes still to be sent could change.

    Rank 0 of two has received everything while rank 1 has not read the last chunk, and the kernel has
    no room for it.
    """
    tensors = [torch.zeros(1_000_000) for _ in range(2)]
    port = free_port()

    def work(rank: int) -> list[bool]:
        good: list[bool] = []
        errors: list[RingError] = []
        finished = threading.Event()

        def overwrite(_: int) -> None:
            good.append(bool((tensors[rank] == step + 1.5).all()))
            tensors[rank].fill_(-1000)
            finished.set()

        with connect_ring(RingPlace(rank, loopback(2), 1, port=port), timeout=20) as ring:
            ring.senders[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            ring.receivers[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            if rank == 1:
                ring.receivers = [LateReader(ring.receivers[0], tensors[1].nbytes)]
            bucket = Bucket(len(tensors[rank]), 4, 0)
            with closing(engine_of(ring, [bucket], [tensors[rank]], overwrite, errors.append)) as engine:
                for step in range(3):
                    finished.clear()
                    tensors[rank].fill_(step + 1 + rank)
                    engine.submit(0)
                    assert finished.wait(20), errors
        return good

    assert on_all_ranks(2, work) == [[True] * 3] * 2


def test_a_rank_that_leaves_breaks_the_others_with_its_name() -> None:
    def work(ring: Ring) -> str:
        if ring.place.rank == 1:
            return "left"
        reducing = Reducing(ring, [torch.zeros(1_000_000)])
        with closing(reducing.engine), pytest.raises(RingError) as broken:
            for _ in range(100):
                reducing.run()
        return str(broken.value)

    words = with_rings(3, 2, work)
    assert "to rank 1" in words[0] or "from rank 2" in words[0]
    assert "from rank 1" in words[2] or "to rank 0" in words[2]


def test_a_peer_that_goes_while_all_wait_for_it_wakes_them() -> None:
    """Every thread of rank 0 is blocked: the receiving ones in the kernel, the sending ones behind them."""

    def work(ring: Ring) -> str:
        reducing = Reducing(ring, [torch.zeros(100_000)])
        with closing(reducing.engine):
            if ring.place.rank == 1:
                threading.Event().wait(0.3)
                ring.abort()
                return ""
            with pytest.raises(RingError) as broken:
                reducing.run()
            with pytest.raises(RingError):
                reducing.run()
            assert reducing.outcomes.empty(), "the error was told twice"
        return str(broken.value)

    assert "rank 1" in with_rings(2, 2, work)[0]


def test_closing_under_way_is_reported_and_does_not_hang() -> None:
    closed = threading.Event()

    def work(ring: Ring) -> str:
        if ring.place.rank == 1:
            closed.wait(20)
            return ""
        reducing = Reducing(ring, [torch.zeros(1000), torch.zeros(1000)])
        reducing.engine.submit(0)
        threading.Event().wait(0.2)
        reducing.engine.close()
        closed.set()
        with pytest.raises(RingError, match="closed"):
            reducing.engine.submit(1)
        return str(reducing.outcomes.get(timeout=5))

    assert with_rings(2, 1, work)[0] == "rank 0: closed with 1 bucket in progress"


def test_an_idle_one_closes_and_leaves_the_ring_alone() -> None:
    def work(ring: Ring) -> bool:
        for _ in range(2):
            reducing = Reducing(ring, [torch.ones(10)])
            reducing.run()
            reducing.engine.close()
        ring.barrier()
        return reducing.outcomes.empty()

    assert with_rings(3, 2, work) == [True] * 3


def test_wrong_use_is_refused() -> None:
    def work(ring: Ring) -> None:
        with pytest.raises(ValueError, match="flat"):
            Reducing(ring, [torch.zeros(4, 4)])
        reducing = Reducing(ring, [torch.zeros(4), torch.zeros(4)])
        with pytest.raises(ValueError, match="bucket 1 submitted, but bucket 0 is next"):
            reducing.engine.submit(1)
        reducing.engine.close()
        with pytest.raises(RingError, match=rf"rank {ring.place.rank}: closed"):
            reducing.engine.submit(0)

    with_rings(2, 1, work)


def test_a_bucket_that_is_under_way_is_not_taken_again() -> None:
    release = threading.Event()

    def work(ring: Ring) -> None:
        reducing = Reducing(ring, [torch.zeros(4)])
        with closing(reducing.engine):
            if ring.place.rank == 0:
                reducing.engine.submit(0)
                with pytest.raises(ValueError, match="bucket 0 submitted again before it was done"):
                    reducing.engine.submit(0)
                release.set()
            else:
                assert release.wait(20)
                reducing.engine.submit(0)
            assert reducing.outcomes.get(timeout=20) == 0

    with_rings(2, 1, work)
