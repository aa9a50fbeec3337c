"""The ring AllGather: its steps as pure data, its bytes over loopback, and missing ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.ring.collectives import AllGather, Collective
from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.ring.steps import Arrival, Position, Receive, RingSteps, Send, allgather_steps, allreduce_steps
from checkmate.wire.schedule import FIRST, LAST, Bucket, channel_slice, chunk_slice, stream_layout
from testbed.ports import free_port
from tests.support.rings import loopback, on_all_ranks, play
from tests.support.streams import spans
from topologies.traffic.rank import BucketSpec, Contents, RingJob, main, run_rank

Result = TypeVar("Result")

BUCKET = st.builds(
    Bucket, elements=st.integers(0, 90), itemsize=st.sampled_from([1, 2, 4]), shadow_id=st.integers(0, 2)
)


@given(
    bucket=BUCKET,
    ranks=st.integers(2, 9),
    channels=st.integers(1, 3),
    size=st.sampled_from([8, 24, 1 << 20]),
)
def test_steps_gather_everything_and_never_wait_for_one_another(
    bucket: Bucket, ranks: int, channels: int, size: int
) -> None:
    channel = channels - 1
    whole = channel_slice(bucket.elements, channels, channel)
    expected = bytearray(bucket.nbytes)
    for byte in range(whole.start * bucket.itemsize, whole.stop * bucket.itemsize):
        expected[byte] = 1 + byte % 251
    holds = [bytearray(bucket.nbytes) for _ in range(ranks)]
    for rank, buffer_held in enumerate(holds):
        own_chunk = chunk_slice(bucket.elements, channels, channel, ranks, (rank + 1) % ranks)
        where = slice(own_chunk.start * bucket.itemsize, own_chunk.stop * bucket.itemsize)
        buffer_held[where] = expected[where]

    def send(rank: int, step: Send) -> bytes:
        assert 0 not in holds[rank][step.start : step.stop], "sent before it was there"
        return bytes(holds[rank][step.start : step.stop])

    def receive(rank: int, step: Receive, data: bytes) -> None:
        assert step.arrival is Arrival.KEEP
        holds[rank][step.start : step.stop] = data

    steps = [allgather_steps(bucket, Position(rank, ranks, channel, channels), size) for rank in range(ranks)]
    play(steps, send, receive)
    assert holds == [expected] * ranks


@given(
    buckets=st.lists(BUCKET, max_size=5),
    ranks=st.integers(2, 9),
    channels=st.integers(1, 3),
    side=st.sampled_from([FIRST, LAST]),
    steps_of=st.sampled_from([allgather_steps, allreduce_steps]),
)
def test_steps_tag_what_the_layout_says(
    buckets: list[Bucket],
    ranks: int,
    channels: int,
    side: int,
    steps_of: Callable[[Bucket, Position, int], RingSteps],
) -> None:
    at = Position(0 if side == FIRST else ranks - 1, ranks, 0, channels)
    sends = [(index, send) for index, b in enumerate(buckets) for send in steps_of(b, at, 16).sends]
    for shadow_id in range(3):
        layout = stream_layout(buckets, channels, 0, ranks, side=side, shadow_id=shadow_id)
        expected = [(s.bucket, b) for s in spans(layout, 0, layout.nbytes) for b in range(s.start, s.stop)]
        tagged = [(i, b) for i, s in sends if s.shadow_id == shadow_id for b in range(s.start, s.stop)]
        assert tagged == expected


def test_a_chunk_is_announced_once_with_its_whole_length() -> None:
    sends = allgather_steps(Bucket(100, 4, 0), Position(2, 3, 0, 1), 64).sends
    assert [send.chunk for send in sends] == [132, 0, 0, 136, 0, 0]
    assert [send.after for send in sends] == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(("ranks", "channels"), [(2, 1), (2, 3), (3, 2), (5, 1)])
def test_all_ranks_end_with_the_same_tensors(ranks: int, channels: int) -> None:
    job = RingJob(
        ips=loopback(ranks),
        channels=channels,
        buckets=[
            BucketSpec(elements=1_000_003),
            BucketSpec(elements=0, shadow_id=1),
            BucketSpec(elements=3, dtype="bfloat16", shadow_id=1),
            BucketSpec(elements=100_001, dtype="float64"),
        ],
        iterations=3,
        port=free_port(),
        tag=False,
        slice_bytes=65536,
        timeout=30,
    )
    results = on_all_ranks(ranks, lambda rank: run_rank(job, rank))
    assert [result.verified for result in results] == [3] * ranks
    assert sum(result.sent_bytes for result in results) == 3 * (ranks - 1) * results[0].bytes_per_iteration
    assert all(result.streams == [] for result in results)


def gathering(
    ranks: int, buckets: Sequence[Bucket], work: Callable[[Ring, Collective], Result]
) -> list[Result]:
    port = free_port()

    def gather_on(rank: int) -> Result:
        place = RingPlace(rank, loopback(ranks), 2, port=port)
        with connect_ring(place, timeout=20) as ring, AllGather(ring, buckets, 4096) as gather:
            return work(ring, gather)

    return on_all_ranks(ranks, gather_on)


def test_tensors_may_be_overwritten_right_after_completion() -> None:
    """Receiving everything is not sending everything: bytes still to be sent could change."""
    ranks, buckets = 3, [Bucket(3_000_000, 4, 0)]

    def work(ring: Ring, gather: Collective) -> bool:
        good = True
        for value in range(1, 5):
            tensor = torch.zeros(buckets[0].elements)
            for channel in range(2):
                own_chunk = chunk_slice(buckets[0].elements, 2, channel, ranks, (ring.place.rank + 1) % ranks)
                tensor[own_chunk.start : own_chunk.stop] = value
            gather.run([tensor])
            good = good and bool((tensor == value).all())
            tensor.fill_(-1)
        return good

    assert gathering(ranks, buckets, work) == [True] * ranks


def test_tensors_that_do_not_match_the_buckets_are_refused() -> None:
    def work(ring: Ring, gather: Collective) -> None:
        with pytest.raises(ValueError, match="don't match"):
            gather.run([torch.zeros(9)])
        with pytest.raises(ValueError, match="flat"):
            gather.run([torch.zeros(2, 5)])
        with pytest.raises(ValueError, match="flat"):
            gather.run([torch.zeros(20)[::2]])

    gathering(2, [Bucket(10, 4, 0)], work)


def test_a_rank_that_leaves_breaks_the_others_with_its_name() -> None:
    def work(ring: Ring, gather: Collective) -> str:
        if ring.place.rank == 1:
            return "left"
        with pytest.raises(RingError) as broken:
            for _ in range(100):
                gather.run([torch.zeros(4_000_000)])
        return str(broken.value)

    words = gathering(3, [Bucket(4_000_000, 4, 0)], work)
    assert "to rank 1" in words[0] or "from rank 2" in words[0]
    assert "from rank 1" in words[2] or "to rank 0" in words[2]


def test_a_forked_child_does_not_keep_the_ring_open() -> None:
    """DataLoader workers outlive a killed rank by some seconds."""
    port = free_port()
    rings = on_all_ranks(2, lambda rank: connect_ring(RingPlace(rank, loopback(2), 1, port=port), timeout=20))
    read_end, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(read_end, 1)  # until the parent closes its end
        os._exit(0)
    try:
        with rings[0]:
            rings[0].receivers[0].settimeout(10)
            rings[1].close()
            assert rings[0].receivers[0].recv(1) == b""
    finally:
        os.close(end)
        os.close(read_end)
        os.waitpid(child, 0)


def test_the_barrier_holds_everybody() -> None:
    arrived: list[int] = []
    lock = threading.Lock()

    def work(ring: Ring, gather: Collective) -> int:
        threading.Event().wait(0.2 * ring.place.rank)
        with lock:
            arrived.append(ring.place.rank)
        ring.barrier()
        return len(arrived)

    assert gathering(4, [], work) == [4] * 4


def test_a_missing_rank_is_named() -> None:
    place = RingPlace(0, loopback(2), 1, port=free_port())
    with pytest.raises(RingError, match=r"rank 0 can't reach rank 1 on 127\.0\.0\.2:\d+: Connection refused"):
        connect_ring(place, timeout=0.3)


def test_a_rank_that_listens_but_never_comes_is_named() -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.2", port)),
        pytest.raises(RingError, match="can't join rank 1 on .* it has not answered the greeting"),
    ):
        connect_ring(RingPlace(0, loopback(2), 1, port=port), timeout=0.3)


def test_a_taken_port_is_named() -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(RingError, match=r"can't listen on 127\.0\.0\.1"),
    ):
        connect_ring(RingPlace(0, loopback(2), 1, port=port), timeout=0.3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"incarnation": 4}, "incarnation 4, not 3"),
        ({"fingerprint": b"other buckets..."}, "fingerprint of the buckets 6f746865"),
        ({"ips": ["127.0.0.1", "127.0.0.2", "127.0.0.1"]}, "number of ranks 3, not 2"),
    ],
)
def test_a_rank_of_another_ring_is_refused(change: dict[str, Any], words: str) -> None:
    port = free_port()
    place_0 = RingPlace(0, loopback(2), 1, port=port, incarnation=3)
    stranger = replace(place_0, rank=1, **change)

    def work(rank: int) -> str:
        place = stranger if rank else place_0
        with pytest.raises(RingError) as excinfo:
            connect_ring(place, timeout=1)
        return str(excinfo.value)

    assert words in on_all_ranks(2, work)[0]


def test_a_stranger_does_not_keep_the_ring_from_forming() -> None:
    port = free_port()

    def work(rank: int) -> int:
        if rank == 2:
            for _ in range(400):
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        return 2
                threading.Event().wait(0.01)
            raise AssertionError("rank 0 never listened")
        if rank == 1:
            threading.Event().wait(0.5)
        with connect_ring(RingPlace(rank, loopback(2), 1, port=port), timeout=10) as ring:
            ring.barrier()
            return len(ring.receivers)

    assert on_all_ranks(3, work) == [1, 1, 2]


def test_contents_differ_by_place_and_iteration() -> None:
    contents = Contents(7)
    tensor = torch.zeros(3_000_000, dtype=torch.int32)
    contents.fill(tensor, 0, 12_000_000, bucket=1, iteration=5)
    assert contents.equal(tensor, bucket=1, iteration=5)
    assert not contents.equal(tensor, bucket=0, iteration=5)
    assert not contents.equal(tensor, bucket=1, iteration=6)
    assert not Contents(8).equal(tensor, bucket=1, iteration=5)
    tensor[2_999_999] ^= 1
    assert not contents.equal(tensor, bucket=1, iteration=5)


Worker = Callable[..., tuple[int, str]]


@pytest.fixture
def worker(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return what runs the command, here, and returns its status and its errors."""

    def run(job: dict[str, object], rank: int = 0) -> tuple[int, str]:
        config = tmp_path / "ring.json"
        config.write_text(json.dumps(job))
        monkeypatch.setattr(sys, "argv", ["rank", "--config", str(config), "--rank", str(rank)])
        threads = torch.get_num_threads()
        try:
            return main(), capsys.readouterr().err
        finally:
            torch.set_num_threads(threads)

    return run


def test_a_bad_job_file_is_explained(worker: Worker) -> None:
    status, errors = worker(
        {"ips": ["127.0.0.1"], "buckets": [{"elements": -1, "colour": 3}], "iterations": 1}
    )
    assert status == 2
    lines = errors.splitlines()
    assert any("ips: List should have at least 2 items" in line for line in lines)
    assert any("buckets.0.elements: Input should be greater than or equal to 0" in line for line in lines)
    assert any("buckets.0.colour: Extra inputs are not permitted" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tree_bytes": 9, "operation": "allgather"}, "trees reduce"),
        ({"dtype": "int8"}, "floating-point types"),
    ],
)
def test_what_an_allreduce_cannot_do_is_explained(worker: Worker, change: dict[str, Any], words: str) -> None:
    bucket = {"elements": 1, "dtype": change.get("dtype", "float32")}
    job = {"ips": loopback(2), "buckets": [bucket], "iterations": 1, "operation": "allreduce"}
    status, errors = worker(job | {key: value for key, value in change.items() if key != "dtype"})
    assert status == 2
    assert words in errors


def test_a_rank_outside_the_ring_is_explained(worker: Worker) -> None:
    job: dict[str, object] = {"ips": loopback(2), "buckets": [{"elements": 1}], "iterations": 1}
    assert worker(job, rank=2) == (1, "rank 2 is not in a ring of 2\n")
