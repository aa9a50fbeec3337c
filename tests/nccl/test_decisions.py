"""Which sends the plugin tags, when it is called as NCCL was recorded to call it; and what makes it stop."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.nccl.test_connections import buffer, until
from tests.support.nccl_calls import RELEASES, Caller
from tests.support.nccl_traces import ITEMSIZES, NAMES, Trace, TracedCollective

LOOPBACK = IPv4Address("127.0.0.1")
OURS = 4711
SHADOW_IDS = 3
ROOM = 2 << 20


def address(number: int) -> int:
    return 0x1000 * (number + 1)


class SendingRank:
    """One rank's NCCL, and a sink for its channels' connections."""

    def __init__(
        self, folder: Path, release: str, rank: int, ranks: int, channels: int, buffsize: int
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.library, self.caller = self._load(folder / f"rank{rank}.so", rank, channels, buffsize, release)
        _, self._sink = self._load(folder / "sink.so", (rank + 1) % ranks, channels, buffsize, release)
        self._ends, self._listeners = [], []
        self.connections = []
        for _ in range(channels):
            handle, listening = self._sink.listen()
            place = buffer(handle)
            self.connections.append(until(lambda place=place: self.caller.connect(place)))  # type: ignore[misc]
            self._ends.append(until(lambda to=listening: self._sink.accept(to)))  # type: ignore[misc]
            self._listeners.append(listening)
        self._stopping = threading.Event()
        self._rooms = [buffer(ROOM) for _ in self._ends]  # the plugin may write there until it has closed
        self._threads = [
            threading.Thread(target=self._drain, args=pair)
            for pair in zip(self._ends, self._rooms, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _load(
        self, path: Path, rank: int, channels: int, buffsize: int, release: str
    ) -> tuple[NcclLibrary, Caller]:
        shutil.copy(shared_object(), path)
        library = NcclLibrary(path)
        place = NcclPlace(rank, self.ranks, LOOPBACK, "lo")
        library.begin(place, channels=channels, slicing=NcclSlicing(buffer=buffsize), incarnation=1)
        caller = Caller(path, RELEASES[release])
        with library.expected():
            assert caller.init(OURS, self.ranks, self.ranks, rank) == 0
        return library, caller

    def _drain(self, comm: int, room: ctypes.Array[ctypes.c_char]) -> None:
        while not self._stopping.is_set():
            result, request = self._sink.irecv(comm, room, ROOM)
            while request is not None and not self._stopping.is_set():
                result, size = self._sink.test(request)
                if result or size is not None:
                    break
            if result:
                return

    def send(self, channel: int, nbytes: int, step: int | None) -> None:
        data = buffer(nbytes or 1)

        def accepted() -> int | None:
            result, request = self.caller.isend(self.connections[channel], data, nbytes, step)
            assert result == 0
            return request

        request = until(accepted)
        until(lambda: None if self.caller.test(request)[1] is None else 1)

    def collective(self, number: int, one: TracedCollective, **more: Any) -> list[int | None]:
        """Begin a collective; return the handles of its proxy operations, by channel."""
        coll = self.caller.coll(
            address(number), one.count, one.datatype, one.channels, comm_hash=OURS, **more
        )
        return [
            self.caller.proxy_op(coll, channel, (self.rank + 1) % self.ranks)
            for channel in range(one.channels)
        ]

    def close(self) -> None:
        for comm in self.connections:
            self.caller.close_send(comm)
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            self._sink.close_receive(end)
        for listening in self._listeners:
            self._sink.close_listen(listening)


Make = Callable[..., SendingRank]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SendingRank] = []

    def begin(release: str, rank: int, ranks: int, channels: int, buffsize: int = 4 << 20) -> SendingRank:
        (folder := tmp_path / str(len(made))).mkdir()
        made.append(SendingRank(folder, release, rank, ranks, channels, buffsize))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def buckets_of(alone: dict[int, TracedCollective]) -> list[NcclBucket]:
    return [
        NcclBucket(address(number), one.count, ITEMSIZES[one.datatype], number % SHADOW_IDS, one.channels)
        for number, one in alone.items()
    ]


QUICK = ("full_n2_c1", "loops_n3_c2", "null_n3_c2", "sends_n3_c3")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.parametrize("side", [0, 1])
def test_the_boundary_ranks_tag_each_reduced_send_once(make: Make, name: str, side: int) -> None:
    trace = Trace.read(name)
    rank = 0 if side == 0 else trace.ranks - 1
    release = "2.30"
    sender = make(release, rank, trace.ranks, trace.channels, trace.buffer)
    slicing = NcclSlicing(buffer=trace.buffer)
    alone = trace.alone(rank)
    sender.library.set_buckets(buckets_of(alone))
    for number, one in alone.items():
        itemsize, shadow_id = ITEMSIZES[one.datatype], number % SHADOW_IDS
        ops = sender.collective(number, one)
        expected = {
            channel: {
                send.step: len(send.where) * itemsize
                for send in slicing.tagged(
                    slicing.part(one.count, itemsize, one.channels, channel), itemsize, trace.ranks, side
                )
            }
            for channel in range(one.channels)
        }
        for send in trace.sends(rank, number):
            before = sender.library.count(send.channel, shadow_id)[0]
            step = sender.caller.proxy_step(ops[send.channel], send.step)
            sender.send(send.channel, send.nbytes, step)
            tagged = sender.library.count(send.channel, shadow_id)[0] - before
            assert tagged == expected[send.channel].get(send.step, 0)
    assert sender.library.trouble == ""


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_s_interfaces_lead_to_the_same_tags(make: Make, release: str) -> None:
    sender = make(release, 2, 3, 2)
    one = TracedCollective(100_000, "ncclFloat32", 2)
    sender.library.set_buckets([NcclBucket(address(0), 100_000, 4, 1, 2)])
    slicing = NcclSlicing()
    with sender.library.expected():  # NCCL 2.26 names the communicator only in collectives
        both = [sender.collective(0, one) for _ in range(2)]
    for ops in both:
        for channel, op in enumerate(ops):
            for send in slicing.sends(slicing.part(100_000, 4, 2, channel), 4, 3, 2):
                sender.send(channel, 4 * len(send.where), sender.caller.proxy_step(op, send.step))
    assert sender.library.trouble == ""
    total = sum(sender.library.count(channel, 1)[0] for channel in range(2))
    first_chunks = sum(
        len(send.where) * 4
        for channel in range(2)
        for send in slicing.tagged(slicing.part(100_000, 4, 2, channel), 4, 3, 1)
    )
    assert total == 2 * first_chunks


def test_a_rank_inside_the_ring_tags_nothing(make: Make) -> None:
    sender = make("2.30", 1, 3, 1)
    one = TracedCollective(10_000, "ncclFloat32", 1)
    sender.library.set_buckets([NcclBucket(address(0), 10_000, 4, 0)])
    (op,) = sender.collective(0, one)
    slicing = NcclSlicing()
    for send in slicing.sends(range(10_000), 4, 3, 1):
        sender.send(0, 4 * len(send.where), sender.caller.proxy_step(op, send.step))
    assert sender.library.trouble == ""
    assert sender.library.used(0) == 1
    assert sender.library.count(0, 0) == (0, 0)


def test_another_communicator_is_not_tagged(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([NcclBucket(address(0), 100, 4, 0)])
    other = Caller(Path(sender.caller.library._name), RELEASES["2.30"])
    assert other.init(12, 2, 2, 0) == 0
    coll = other.coll(address(0), 100, "ncclFloat32", 1)
    assert coll is None
    assert other.proxy_op(coll, 0, 1) is None
    sender.send(0, 400, None)
    assert (sender.library.trouble, sender.library.count(0, 0)) == ("", (0, 0))
    assert other.tuned(12, 2) == ([[5.0] * 3] * 7, 0)


@pytest.mark.parametrize("release", RELEASES)
def test_the_tuner_chooses_the_ring_for_gradients(make: Make, release: str) -> None:
    sender = make(release, 0, 2, 2)
    with sender.library.expected():
        costs, channels = sender.caller.tuned(OURS, 2)
    assert (channels, costs[1][2]) == (2, 0.0)
    assert all(cost == -1 for i, row in enumerate(costs) for j, cost in enumerate(row) if (i, j) != (1, 2))
    assert sender.caller.tuned(OURS, 2, function=2) == ([[5.0] * 3] * 7, 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"algorithm": b"TREE"}, "uses algorithm TREE and protocol SIMPLE"),
        ({"protocol": b"LL128"}, "uses algorithm RING and protocol LL128"),
    ],
)
def test_another_algorithm_stops_tagging(make: Make, more: dict[str, Any], words: str) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([NcclBucket(address(0), 100, 4, 0)])
    sender.collective(0, TracedCollective(100, "ncclFloat32", 1), **more)
    assert words in sender.library.trouble


def test_what_does_not_fit_stops_tagging_with_a_reason(make: Make) -> None:
    one, two = (TracedCollective(10_000, "ncclFloat32", channels) for channels in (1, 2))
    cases = [
        ([NcclBucket(address(1), 10_000, 4, 0)], one, "is not that of a bucket"),
        ([NcclBucket(address(0), 10_000, 2, 0)], one, "bucket 0 has elements of 2 bytes"),
        ([NcclBucket(address(0), 10_000, 4, 0)], two, "bucket 0 has 2 channels, and not 1"),
    ]
    for buckets, collective, words in cases:
        sender = make("2.30", 0, 2, 1)
        sender.library.set_buckets(buckets)
        sender.collective(0, collective)
        assert words in sender.library.trouble


def test_sends_of_another_size_or_order_stop_tagging(make: Make) -> None:
    slicing = NcclSlicing()
    sends = list(slicing.sends(range(10_000), 4, 2, 0))
    for order, sizes, words in (
        ([0], {0: 8}, "step 0: NCCL sends 8 bytes, and not"),
        ([0, 2], {}, "step 2 follows step 0"),
        ([1], {}, "step 1 follows step 0"),
        ([0, 1, 2, 3, 4], {}, "bucket 0, channel 0 has no step 4"),
    ):
        sender = make("2.30", 0, 2, 1)
        sender.library.set_buckets([NcclBucket(address(0), 10_000, 4, 0)])
        (op,) = sender.collective(0, TracedCollective(10_000, "ncclFloat32", 1))
        for step in order:
            size = sizes.get(step, 4 * len(sends[step].where) if step < len(sends) else 4)
            sender.send(0, size, sender.caller.proxy_step(op, step))
        assert words in sender.library.trouble, (order, sender.library.trouble)


def test_a_second_communicator_during_the_creation_is_doubt(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    other = Caller(Path(sender.caller.library._name), RELEASES["2.30"])
    with sender.library.expected():
        other.init(12, 2, 2, 0)
    assert "two communicators were created at once" in sender.library.trouble


def test_several_ranks_of_a_node_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plugin.so"
    shutil.copy(shared_object(), path)
    library = NcclLibrary(path)
    library.begin(NcclPlace(0, 4, LOOPBACK, "lo"), channels=1, slicing=NcclSlicing(), incarnation=1)
    caller = Caller(path, RELEASES["2.30"])
    with library.expected():
        caller.init(OURS, 2, 4, 0)
    assert "4 ranks on 2 nodes: use one rank for each node" in library.trouble


def test_buckets_have_a_limit(tmp_path: Path) -> None:
    shutil.copy(shared_object(), tmp_path / "plugin.so")
    library = NcclLibrary(tmp_path / "plugin.so")
    with pytest.raises(ValueError, match="5000 buckets are too many"):
        library.set_buckets([NcclBucket(1, 1, 4, 0)] * 5000)


def test_the_structures_of_python_are_those_of_c(tmp_path: Path) -> None:
    from checkmate.nccl import library  # noqa: PLC0415

    assert ctypes.sizeof(library._Job) == 56
    assert ctypes.sizeof(library._Bucket) == 32
