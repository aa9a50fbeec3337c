"""The tagging ring on a real kernel: a switch would build the streams that were tagged."""

from __future__ import annotations

import errno
import hashlib
import socket

import pytest

from checkmate.wire import tcp
from checkmate.wire.schedule import Bucket, stream_layout
from tests.support.labs.captured_streams import streams_of
from tests.support.labs.end_hosts import (
    CapturedSegment,
    PacketCapture,
    inside,
    lone_namespace,
    needs_root,
    shell,
    veth_pair,
)
from tests.support.rings import on_all_ranks
from topologies.traffic.rank import BucketSpec, Operation, RankResult, RingJob, run_rank

pytestmark = needs_root


def run_captured(job: RingJob) -> tuple[list[RankResult], list[CapturedSegment]]:
    """Run all ranks on the loopback device of a namespace; return their results, and the segments."""
    with lone_namespace() as name:
        capture = PacketCapture(name, "lo")

        def gather_on(rank: int) -> RankResult:
            with inside(name):
                return run_rank(job, rank)

        try:
            results = on_all_ranks(len(job.ips), gather_on)
        finally:
            segments = capture.stop()
    return results, segments


@pytest.mark.parametrize(
    ("ranks", "channels", "operation"), [(2, 1, "allgather"), (4, 2, "allgather"), (3, 2, "allreduce")]
)
def test_streams_are_byte_for_byte_what_was_tagged(ranks: int, channels: int, operation: Operation) -> None:
    gathers = operation == "allgather"
    sizes = [(700_001, 0), (3, 1), (500_000, 1), (250_000, 0)]
    job = RingJob(
        ips=[f"127.0.0.{rank + 1}" for rank in range(ranks)],
        channels=channels,
        buckets=[BucketSpec(elements=count, shadow_id=shadow_id) for count, shadow_id in sizes],
        iterations=2,
        incarnation=250,
        group=3,
        slice_bytes=100_000,
        operation=operation,
        verify="each" if gathers else "none",
    )
    results, segments = run_captured(job)
    streams = streams_of(segments, incarnation=250)
    buckets = [Bucket(count, 4, shadow_id) for count, shadow_id in sizes]
    assert [result.verified for result in results] == [2 * gathers] * ranks
    rounds = (ranks - 1) if gathers else 2 * (ranks - 1)
    assert sum(result.sent_bytes for result in results) == 2 * rounds * results[0].bytes_per_iteration
    reported = 0
    for rank, result in enumerate(results):
        assert not any(result.faults.values())
        for stream_report in result.streams:
            layout = stream_layout(
                buckets,
                channels,
                stream_report.channel,
                ranks,
                side=stream_report.side,
                shadow_id=stream_report.shadow_id,
            )
            stream = streams.get((job.ips[rank], stream_report.channel, stream_report.shadow_id), b"")
            assert (stream_report.side, stream_report.boundary) == (int(rank > 0), 6 + int(rank > 0))
            assert stream_report.bytes == len(stream) == 2 * layout.nbytes
            assert stream_report.sha256 == hashlib.sha256(stream).hexdigest()
            reported += bool(stream_report.bytes)
    assert reported == len(streams)
    assert sum(map(len, streams.values())) == 2 * results[0].bytes_per_iteration


@pytest.mark.slow
def test_a_reader_notices_that_the_other_machine_is_gone() -> None:
    with veth_pair() as pair:
        with inside(pair.a):
            listener = socket.create_server((pair.a_ip, 0))
        with inside(pair.b), listener:
            sender = socket.create_connection(listener.getsockname())
            reader, _ = listener.accept()
        with sender, reader:
            tcp.notice_vanished(reader, 6)
            shell(f"nsenter --net=/run/netns/{pair.b} ip link set {pair.b} down")
            reader.settimeout(20)
            with pytest.raises(OSError) as excinfo:
                reader.recv(1)
            assert excinfo.value.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH), excinfo.value
