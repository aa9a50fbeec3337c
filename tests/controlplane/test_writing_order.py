"""While a switch is filled or emptied, connected streams get all segments that training receives.

The compiled program runs on the embedded target, and a tagged segment of each stream is sent between any two
updates, as when a restarted switch is filled under traffic.
"""

from __future__ import annotations

import struct

import pytest

from checkmate.job.boundaries import Stream
from controlplane.entities import Holdings, difference, mac_number
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.plan import plan
from softswitch.p4runtime.pipeline import Pipeline, build
from softswitch.p4runtime.writes import apply
from testbed.jobs import job
from tests.support.controlplane.planned import connect_all
from tests.support.p4.frames import TAG, Frame

INCARNATION = 3
CODEC = Codec.for_target("softswitch")


def tagged(stream: Stream) -> bytes:
    """Return a segment that belongs to a stream."""
    source, destination = stream.boundary.source, stream.boundary.destination
    option = TAG + struct.pack("!IIHBB", 0, 0, stream.shadow_id, stream.channel, INCARNATION)
    return Frame(
        destination=destination.mac, addresses=(str(source.ip), str(destination.ip)), options=option
    ).encode()


def copies(pipeline: Pipeline, stream: Stream) -> tuple[bool, bool]:
    """Return whether a tagged segment reaches the next rank, and the stream's shadow node."""
    frame = tagged(stream)
    outputs = pipeline.program.process(stream.boundary.source.port, frame)
    rewritten = mac_number(stream.nic.mac).to_bytes(6, "big")
    return (
        any(o.port == stream.boundary.destination.port and o.frame == frame for o in outputs),
        any(o.port == stream.nic.port and o.frame.startswith(rewritten) for o in outputs),
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_trained_with_that_a_connected_stream_misses(replicas: int) -> None:
    jobs = [job(channels=2, nodes=2, replicas=replicas)]
    planned = plan(jobs)["tor0"]
    full = connect_all(Network(jobs), planned, INCARNATION)
    pipeline = build(CODEC.pipeline_config())
    streams = list(planned.streams.values())
    assert streams
    for start, end in ((Holdings(), full), (full, Holdings())):
        both = 0
        for update in difference(start, end):
            apply(pipeline, CODEC.encode_update(update))
            for stream in streams:
                trained, followed = copies(pipeline, stream)
                assert followed or not trained, f"after {update}: {stream}"
                both += trained
        assert both  # while all entries are there
