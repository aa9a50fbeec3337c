"""A node's holds, the places of its streams' bytes, and the threads that receive them."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import state
from checkmate.job import boundaries
from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.hold import StreamState
from checkmate.shadow.logic.records import Records
from checkmate.shadow.memory import resident
from checkmate.shadow.receive.hold_plans import (
    SETS,
    StreamPlan,
    StreamTooLong,
    TaggedStreamPlan,
    ahead_at_most,
    check_lengths,
    hold_plans,
    start_of,
    whole_through,
)
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.stream_threads import Reader
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import Bucket, StreamLayout, stream_layout
from testbed.copies import local_job
from testbed.jobs import job
from tests.support.jobs import lists_of_jobs
from tests.support.waiting import wait_until

PLAN = TaggedStreamPlan(0, 1, 1, 0, 1, 1, 0, "127.0.0.1", ("127.0.0.1", 7400), 1)


@given(lists_of_jobs(most=1))
def test_nodes_connect_exactly_the_streams_that_switches_expect(jobs: list[Job]) -> None:
    (network,) = jobs
    expected = {
        (s.boundary.number, s.channel, s.shadow_id, s.node.id, str(s.nic.ip))
        for s in boundaries.streams(network)
    }
    streams = set()
    for node in network.shadow_nodes:
        for plan in hold_plans(network, node.id):
            holders = {network.holder(plan.group, plan.shard, i + 1).id for i in range(network.replicas)}
            assert holders == {node.id, *plan.other_holders}
            for stream in plan.tagged_streams:
                assert stream.nic_ip == str(node.nics[stream.nic].ip)
                assert stream.shard == plan.shard
                streams.add((stream.boundary, stream.channel, stream.shadow_id, node.id, stream.nic_ip))
    assert streams == expected


def test_a_stream_is_connected_to_the_stub_of_its_boundary_ranks_own_switch() -> None:
    network = job(ranks=3, switches=3)
    (plan,) = hold_plans(network, 0)
    stubs = {stream.side: stream.stub[0] for stream in plan.tagged_streams}
    assert stubs == {0: "10.255.0.1", 1: "10.255.0.3"}


def layout_of(shapes: list[int], shards: int, dtype: str = "float32", bucket_bytes: int = 400) -> Layout:
    return make_layout([Parameter(f"p{i}", (n,), dtype) for i, n in enumerate(shapes)], shards, bucket_bytes)


def streams_of(layout: Layout, ranks: int, channels: int, shard: int) -> list[tuple[int, int, StreamLayout]]:
    return [
        (
            side,
            channel,
            stream_layout(layout.schedule, channels, channel, ranks, side=side, shadow_id=shard),
        )
        for side in (0, 1)
        for channel in range(channels)
    ]


def iteration_of(layout: Layout, shard: int, seed: int) -> dict[int, torch.Tensor]:
    """Return random gradients of one iteration."""
    generator = torch.Generator().manual_seed(seed)
    buckets = {}
    for index, bucket in enumerate(layout.buckets):
        if bucket.shard == shard:
            buckets[index] = torch.randn(bucket.elements, generator=generator).to(
                getattr(torch, bucket.dtype)
            )
    return buckets


def on_the_wire(stream: StreamLayout, buckets: dict[int, torch.Tensor]) -> bytes:
    return b"".join(
        bytes(state.bytes_of(buckets[p.bucket]))[
            p.where.start * stream.itemsizes[p.bucket] : p.where.stop * stream.itemsizes[p.bucket]
        ]
        for p in stream.pieces
    )


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
    st.integers(2, 5),
    st.integers(1, 3),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 3),
    st.integers(0, 1 << 32),
)
def test_every_byte_lands_in_its_place(
    shapes: list[int], ranks: int, channels: int, dtype: str, joined: int, seed: int
) -> None:
    """All streams of a shard, in odd pieces and in turns, assemble three iterations."""
    pick = random.Random(seed)
    layout = layout_of(shapes, 1, dtype)
    sets = BucketSets(layout, 0, joined - 1)
    ends: list[tuple[socket.socket, Inlet, bytes]] = []
    iterations = {t: iteration_of(layout, 0, t) for t in range(joined, joined + 3)}
    try:
        for side, channel, stream in streams_of(layout, ranks, channels, 0):
            near, far = socket.socketpair()
            plan = StreamPlan(0, 0, side, channel)
            inlet = Inlet(plan, stream, sets, first=0, joined=joined)
            assert inlet.attach(near)
            data = b"".join(on_the_wire(stream, buckets) for buckets in iterations.values())
            ends.append((far, inlet, data))
        for t, buckets in iterations.items():
            while any(inlet.whole is not None and inlet.whole < t for _, inlet, _ in ends):
                at = pick.randrange(len(ends))
                far, inlet, data = ends[at]
                count = pick.randint(1, 700)
                far.sendall(data[:count])
                ends[at] = (far, inlet, data[count:])
                inlet.take()
            assert all(torch.equal(sets.gradients(t)[index], bucket) for index, bucket in buckets.items()), (
                f"iteration {t}"
            )
            sets.released = t
            for _, inlet, _ in ends:
                inlet.take()
    finally:
        for far, inlet, _ in ends:
            far.close()
            if inlet.socket is not None:
                inlet.socket.close()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(1, 10))
def test_positions_have_64_bits_and_hellos_32(first: int, ahead: int, elements: int) -> None:
    layout = layout_of([elements * 8], 1)
    (_, _, stream), *_ = streams_of(layout, 2, 1, 0)
    position = start_of(stream, first, first + ahead)
    assert position == stream.nbytes * ahead
    assert whole_through(stream, first, position) == first + ahead - 1
    assert PLAN.hello(position, 3, 7).base == position % (1 << 32)


def test_streams_are_joined_less_than_2_gb_ahead() -> None:
    layout = layout_of([100_000_000], 1)
    streams = [stream for _, _, stream in streams_of(layout, 2, 1, 0)]
    ahead = ahead_at_most(streams)
    assert ahead == (1 << 31) // max(stream.nbytes for stream in streams)
    assert ahead_at_most([]) > 1000


def test_streams_of_2_gb_an_iteration_are_refused() -> None:
    for elements, fits in ((100_000_000, True), (2_000_000_000, False)):
        streams = [stream for _, _, stream in streams_of(layout_of([elements], 1), 2, 1, 0)]
        assert (max(stream.nbytes for stream in streams) < 1 << 31) == fits
        with nullcontext() if fits else pytest.raises(StreamTooLong, match="use more channels"):
            check_lengths(streams)


class Pipe:
    """An inlet of one stream of two ranks, read by a real thread from a real TCP connection."""

    def __init__(self) -> None:
        self.layout = layout_of([100_000], 1)
        (_, _, self.stream), *_ = streams_of(self.layout, 2, 1, 0)
        self.sets = BucketSets(self.layout, 0, -1)
        self.inlet = Inlet(PLAN, self.stream, self.sets, first=0, joined=0)
        self.whole = threading.Event()
        self.broken: list[Inlet] = []
        self.reader = Reader("nic", self.whole.set, self.broken.append)
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            self.peer, _ = server.accept()
        assert self.inlet.attach(near)
        self.reader.add(self.inlet)

    def send(self, iteration: int) -> bytes:
        buckets = {0: iteration_of(self.layout, 0, iteration)[0]}
        data = on_the_wire(self.stream, buckets)
        self.peer.sendall(data)
        return data

    def content(self, iteration: int) -> bytes:
        return on_the_wire(self.stream, dict(self.sets.gradients(iteration)))

    def close(self) -> None:
        self.inlet.close()
        self.reader.stop()
        self.peer.close()


@pytest.fixture
def pipe() -> Iterator[Callable[[], Pipe]]:
    pipes: list[Pipe] = []

    def make() -> Pipe:
        pipes.append(Pipe())
        return pipes[-1]

    yield make
    for each_pipe in pipes:
        each_pipe.close()


def test_a_stream_pauses_while_no_set_of_buckets_is_free(pipe: Callable[[], Pipe]) -> None:
    stream = pipe()
    iterations = [stream.send(t) for t in range(SETS)]
    wait_until(lambda: stream.inlet.whole == 1, "two iterations")
    assert stream.whole.is_set()
    third = stream.send(2)
    wait_until(lambda: stream.inlet.paused, "the pause")
    time.sleep(0.1)
    assert [stream.content(0), stream.content(1)] == iterations
    assert stream.inlet.queued() == len(third)
    stream.sets.released = 0
    stream.reader.wake()
    wait_until(lambda: stream.inlet.whole == 2, "the third")
    assert [stream.content(1), stream.content(2)] == [iterations[1], third]
    assert stream.reader.bytes == 3 * len(third)


def test_an_iteration_is_timed_from_its_first_byte_to_its_last(pipe: Callable[[], Pipe]) -> None:
    stream = pipe()
    buckets = {0: iteration_of(stream.layout, 0, 0)[0]}
    data = on_the_wire(stream.stream, buckets)
    before = time.monotonic()
    stream.peer.sendall(data[:10])
    wait_until(lambda: stream.inlet.received_bytes == 10, "ten bytes")
    between = time.monotonic()
    time.sleep(0.05)
    stream.peer.sendall(data[10:])
    wait_until(lambda: stream.inlet.whole == 0, "an iteration")
    ((iteration, begin, end),) = stream.inlet.pulls
    assert iteration == 0
    assert before <= begin <= between < between + 0.05 < end <= time.monotonic()


@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_connection_is_noticed_also_in_a_pause_and_what_came_is_read(
    pipe: Callable[[], Pipe], reset: bool
) -> None:
    stream = pipe()
    for t in range(3):
        stream.send(t)
    wait_until(lambda: stream.inlet.paused, "the pause")
    if reset:
        stream.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.peer.close()
    time.sleep(0.1)
    assert not stream.broken
    stream.sets.released = 0
    stream.reader.wake()
    wait_until(lambda: bool(stream.broken), "the end")
    assert stream.inlet.broken is not None
    if not reset:
        assert stream.inlet.whole == 2


def test_a_stream_that_stands_below_its_end_is_timed() -> None:
    plan = hold_plans(local_job(ranks=2, nodes=1), 0)[0].streams[0]
    stream = StreamState(plan, stream_layout([Bucket(4, 4, 0)], 1, 0, 2, side=0, shadow_id=0), position=16)
    assert stream.stands_below(16, 10.0) == 0
    assert stream.stands_below(17, 11.0) == 0
    assert stream.stands_below(17, 13.0) == 2
    stream.paused = True
    assert stream.stands_below(17, 14.0) == 0
    stream.paused, stream.position = False, 17
    assert stream.stands_below(18, 15.0) == 0


def test_nothing_is_written_once_an_inlet_is_closed(pipe: Callable[[], Pipe]) -> None:
    stream = pipe()
    stream.inlet.close()
    before = stream.content(0)
    stream.peer.sendall(b"\1" * 1000)
    wait_until(lambda: stream.inlet.socket is None, "the socket's end")
    assert stream.content(0) == before
    assert not stream.broken


def test_discarded_buckets_give_their_memory_back() -> None:
    """A settled node keeps its parameters only. It is tried in a process that holds nothing else."""
    code = """
from checkmate.shadow.memory import resident
from checkmate.shadow.receive.inlet import BucketSets
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
layout = make_layout([Parameter("w", (16_000_000,), "float32")], 1, bucket_bytes=1 << 26)
sets = BucketSets(layout, 0, -1)
filled = sum(bucket.fill_(1.0).nbytes for buckets in sets.tensors for bucket in buckets.values())
before = resident()
sets.clear()
print(filled, before - resident())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    filled, freed = map(int, result.stdout.split())
    assert filled == SETS * 64_000_000
    assert freed > filled // 2


def part(iteration: int, position: int, **fields: object) -> pb.RecordPart:
    return pb.RecordPart(iteration=iteration, position=position, **fields)  # type: ignore[arg-type]


@given(st.permutations([(t, p) for t in range(3) for p in range(3)]))
def test_a_record_is_complete_when_all_parts_are_there_in_any_order(order: list[tuple[int, int]]) -> None:
    records = Records(3, 0)
    positions: dict[int, set[int]] = {}
    for t, position in order:
        records.add(part(t, position), 1.0)
        records.add(part(t, position, rng=b"again"), 1.0)
        positions.setdefault(t, set()).add(position)
        assert {i for i in range(3) if records.complete(i)} == {
            i for i, p in positions.items() if len(p) == 3
        }
    assert records.count == 9
    records.keep(1)
    assert [p.position for p in records.served(1).parts] == [0, 1, 2]
    assert {p.rng for p in records.served(1).parts} == {b""}


def test_buffers_that_changed_once_stay_in_later_records() -> None:
    records = Records(1, 0)
    mean, count = torch.tensor([1.5]), torch.tensor(7)
    records.add(part(0, 0, buffers=state.dumps({"mean": mean, "count": count})), 0.0)
    records.keep(0)
    records.add(part(1, 0, buffers=state.dumps({"mean": mean + 1})), 0.0)
    records.keep(1)
    assert {n: state.loads(b) for n, b in records.served(1).buffers.items()} == {
        "mean": mean + 1,
        "count": count,
    }
    assert state.loads(records.served(0).buffers["mean"]) == mean
    records.forget([1], {})
    assert not records.served(0).parts
    assert records.served(1).parts


def test_kept_records_share_buffers_that_stay_as_they_are() -> None:
    """Those of a frozen model are large: a copy per iteration costs memory, and time under the lock."""
    records, frozen = Records(1, 0), torch.ones(1 << 20)
    records.add(part(0, 0, buffers=state.dumps({"frozen": frozen})), 0.0)
    records.keep(0)
    before = resident()
    for t in range(1, 65):
        records.add(part(t, 0), 0.0)
        records.keep(t)
    assert resident() - before < 16 * frozen.nbytes
    assert all(state.loads(records.served(t).buffers["frozen"]).equal(frozen) for t in (0, 64))


def test_buffers_of_iterations_that_nobody_steps_are_kept() -> None:
    """A hold joins at iteration 3; contents of earlier records may never be sent again."""
    records = Records(2, 0)
    for t in range(4):
        records.add(part(t, 1), 0.0)
        records.add(part(t, 0, buffers=state.dumps({f"b{t}": torch.tensor(t)})), 0.0)
    records.forget([2], {})
    records.keep(3)
    assert set(records.served(3).buffers) == {"b0", "b1", "b2", "b3"}


def test_an_older_iteration_that_is_stepped_later_changes_no_newer_buffer() -> None:
    records = Records(1, 0)
    for t in (9, 10, 11):
        records.add(part(t, 0, buffers=state.dumps({"mean": torch.tensor(t)}) if t < 11 else b""), 0.0)
    records.keep(10)
    records.forget([10, 8], {})
    for t, mean in ((9, 9), (10, 10), (11, 10)):
        records.keep(t)
        assert state.loads(records.served(t).buffers["mean"]) == mean
    late = Records(1, 0)
    late.add(part(2, 0, buffers=state.dumps({"mean": torch.tensor(2)})), 0.0)
    late.keep(2)
    late.add(part(1, 0, buffers=state.dumps({"mean": torch.tensor(1), "once": torch.tensor(1)})), 0.0)
    late.add(part(3, 0), 0.0)
    late.keep(3)
    assert {n: state.loads(b).item() for n, b in late.served(3).buffers.items()} == {"mean": 2, "once": 1}


def test_buffers_may_have_changed_in_a_record_that_never_came() -> None:
    """They count as lacking from then on, until they are sent again; before it they are known."""
    records = Records(1, 0, ["mean", "once"])

    def packed(**buffers: int) -> bytes:
        return state.dumps({name: torch.tensor(value) for name, value in buffers.items()})

    records.add(part(0, 0, buffers=packed(mean=0)), 0.0)
    records.keep(0)
    assert records.lacking(0) == 1
    records.add(part(1, 0, buffers=packed(once=1)), 0.0)
    records.add(part(2, 0), 0.0)
    assert not records.take_wants_buffers()
    records.add(part(4, 0, buffers=packed(mean=4)), 0.0)
    assert records.take_wants_buffers()
    assert not records.take_wants_buffers()
    records.keep(2)
    assert records.lacking(2) == 0
    records.keep(4)
    assert (records.lacking(2), records.lacking(4)) == (0, 1)
    records.add(part(3, 0, buffers=packed(once=3)), 0.0)
    records.add(part(5, 0, buffers=packed(once=5)), 0.0)
    records.keep(5)
    assert {n: state.loads(b).item() for n, b in records.served(5).buffers.items()} == {"mean": 4, "once": 5}


def test_buffers_from_another_holder_replace_older_ones() -> None:
    records = Records(1, 0, ["mean", "once"])
    old, new = ({n: state.dumps(torch.tensor(v)) for n in ("mean", "once")} for v in (1, 5))
    records.add(part(1, 0, buffers=state.dumps({"mean": torch.tensor(1), "once": torch.tensor(1)})), 0.0)
    records.keep(1)
    records.add(part(3, 0), 0.0)
    records.adopt(pb.IterationRecord(iteration=1, buffers=old))  # from before the skipped one
    records.adopt(pb.IterationRecord(iteration=5, buffers=new))
    records.add(part(6, 0, buffers=state.dumps({"mean": torch.tensor(6)})), 0.0)
    records.keep(6)
    assert {n: state.loads(b).item() for n, b in records.served(6).buffers.items()} == {"mean": 6, "once": 5}


def test_a_rank_that_passes_over_an_iteration_is_noticed() -> None:
    records = Records(2, 0)
    for t in (0, 1, 3):
        records.add(part(t, 0), float(t))
    assert (records.missing.since(1), records.missing.since(2), records.missing.since(3)) == (None, 3.0, None)
    records.add(part(2, 0), 4.0)
    records.add(part(2, 1), 4.0)
    assert not records.missing
    records.add(part(9, 1), 5.0)
    records.forget([8], {})
    assert not records.missing


def test_a_streams_end_only_grows() -> None:
    records = Records(2, 0)
    records.add(part(1, 0, ends=[pb.StreamEnd(channel=1, shard=2, end=1 << 40)]), 0.0)
    records.add(part(0, 0, ends=[pb.StreamEnd(channel=1, shard=2, end=5)]), 0.0)
    assert records.ends == {(0, 1, 2): 1 << 40}
