"""The AllReduce's tags on a real kernel: the streams that a switch would build are the reduced gradients."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import closing

import pytest
import torch

from checkmate.ring.connections import connect_ring
from checkmate.ring.engine import RingEngine
from checkmate.ring.place import RingError, RingPlace
from checkmate.ring.steps import allreduce_steps
from checkmate.tagger import TaggedSocket, Tagger
from checkmate.wire.schedule import Bucket, side_of, stream_layout
from tests.support.labs.captured_streams import streams_of
from tests.support.labs.end_hosts import PacketCapture, inside, lone_namespace, needs_root
from tests.support.rings import loopback, on_all_ranks, random_values
from tests.support.streams import spans
from tests.support.waiting import wait_until

pytestmark = needs_root

ITERATIONS = 3


@pytest.mark.parametrize(("ranks", "channels"), [(2, 1), (3, 2)])
def test_streams_are_the_reduced_gradients(ranks: int, channels: int) -> None:
    shards = [(300_001, 0), (3, 1), (200_000, 1), (50_000, 0)]
    buckets = [Bucket(elements, 4, shard) for elements, shard in shards]
    reduced: list[list[bytes]] = []  # by iteration and bucket, on rank 0

    def work(rank: int, name: str) -> dict[tuple[int, int], int]:
        tensors = [torch.empty(bucket.elements) for bucket in buckets]
        finished, errors = threading.Semaphore(0), list[RingError]()
        place = RingPlace(rank, loopback(ranks), channels, incarnation=77)
        with inside(name):
            tagger = Tagger.attach() if side_of(ranks, rank) is not None else None
            ring = connect_ring(place, tagger, timeout=20)
        try:
            engine = RingEngine(
                ring,
                buckets,
                allreduce_steps,
                1 << 16,
                lambda _: finished.release(),
                errors.append,
                divisor=ranks,
            )
            engine.bind(tensors)
            with ring, closing(engine):
                for iteration in range(ITERATIONS):
                    for index, tensor in enumerate(tensors):
                        values = random_values(ranks, len(tensor), tensor.dtype, 10 * iteration + index)
                        tensor.copy_(values[rank])
                        engine.submit(index)
                    for _ in tensors:
                        assert finished.acquire(timeout=20), errors
                    if rank == 0:
                        reduced.append([tensor.numpy().tobytes() for tensor in tensors])
                senders = {
                    (channel, shard): sender
                    for channel, sender in enumerate(ring.senders)
                    if isinstance(sender, TaggedSocket)
                    for shard in (0, 1)
                }
                ends = {stream: sender.position(stream[1]) for stream, sender in senders.items()}
                for (channel, shard), sender in senders.items():
                    end = ends[channel, shard]
                    wait_until(lambda: sender.acknowledged(shard) == end, "acknowledged")  # noqa: B023
                ring.barrier()
                assert tagger is None or not any(tagger.faults().values())
                return ends
        finally:
            if tagger is not None:
                tagger.close()

    with lone_namespace() as name:
        capture = PacketCapture(name, "lo")
        try:
            ends = on_all_ranks(ranks, lambda rank: work(rank, name))
        finally:
            segments = capture.stop()
    streams = streams_of(segments, incarnation=77)
    expected: dict[tuple[str, int, int], bytes] = defaultdict(bytes)
    for side, rank in enumerate((0, ranks - 1)):
        for channel in range(channels):
            for shard in (0, 1):
                layout = stream_layout(buckets, channels, channel, ranks, side=side, shadow_id=shard)
                assert ends[rank][channel, shard] == ITERATIONS * layout.nbytes
                for span in spans(layout, 0, ITERATIONS * layout.nbytes):
                    data = reduced[span.iteration][span.bucket][span.start : span.stop]
                    expected[loopback(ranks)[rank], channel, shard] += data
    assert streams == expected
    assert all(not rank_ends for rank_ends in ends[1:-1])
