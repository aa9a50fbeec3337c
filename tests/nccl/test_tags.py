"""Tags of the plugin's sends, as they are on the wire."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from checkmate.nccl.library import NcclBucket
from checkmate.tagger import Tagger
from checkmate.wire import tag
from checkmate.wire.nccl_slicing import NcclSend
from tests.support.labs.end_hosts import CapturedSegment, PacketCapture, needs_root, veth_pair
from tests.support.nccl.calls import REMOTE_ERROR
from tests.support.nccl.sender import SendingRank, address, buffer, until
from tests.support.streams import copy_sequence

pytestmark = needs_root

Make = Callable[..., SendingRank]

BUCKETS = [NcclBucket(address(0), 300_001, 4, 0), NcclBucket(address(1), 200_003, 2, 1)]
"""On two channels. The first has chunks of several segments, the second an empty slice."""


@pytest.fixture
def tagger() -> Iterator[Tagger]:
    with Tagger.attach() as attached:
        yield attached
        assert not any(attached.faults().values())


def contents(number: int, round_: int) -> Callable[[NcclSend], bytes]:
    """Return contents that differ between sends."""

    def contents_of(send: NcclSend) -> bytes:
        seed = f"{number} {round_} {send.round} {send.where}"
        return random.Random(seed).randbytes(len(send.where) * BUCKETS[number].itemsize)

    return contents_of


def streams_of(segments: list[CapturedSegment]) -> dict[tuple[int, int], bytes]:
    """Return what a switch would copy, by channel and shadow id."""
    pieces_by_stream: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
    for segment in segments:
        if segment.dscp != tag.DEFAULT_DSCP_BIT:
            assert not segment.tagged
            continue
        parsed = tag.Tag.unpack(segment.options[-16:])
        assert parsed.incarnation == 1
        place = copy_sequence(parsed, segment.sequence)
        pieces = pieces_by_stream[parsed.channel, parsed.shadow_id]
        pieces[place] = max(segment.payload, pieces.get(place, b""), key=len)
    return {stream: assembled(pieces) for stream, pieces in pieces_by_stream.items()}


def assembled(pieces: dict[int, bytes]) -> bytes:
    """Return the stream of pieces, which overlap if they were sent again."""
    whole = b""
    for place, piece in sorted(pieces.items()):
        assert place <= len(whole), f"bytes {len(whole)} to {place} are not tagged"
        twice = whole[place : place + len(piece)]
        assert piece.startswith(twice)
        whole += piece[len(twice) :]
    return whole


@pytest.mark.parametrize(("release", "ahead"), [("2.26", 1), ("2.30", 1), ("2.30", 8)])
def test_exactly_the_schedule_s_bytes_are_tagged_in_place(
    make: Make, tagger: Tagger, release: str, ahead: int
) -> None:
    with veth_pair() as pair:
        ends = [(pair.a, IPv4Address(pair.a_ip)), (pair.b, IPv4Address(pair.b_ip))]
        capture = PacketCapture(pair.b)
        sender = make(release, 2, 3, 2, here=ends[0], peer=ends[1], sockets_map=tagger.sockets_map)
        sender.library.set_buckets(BUCKETS)
        expected: dict[tuple[int, int], bytes] = defaultdict(bytes)
        for round_ in range(2):
            for number, bucket in enumerate(BUCKETS):
                contents_of = contents(number, round_)
                with sender.library.expected():
                    sender.reduce(number, bucket, contents_of, ahead)
                for channel in range(2):
                    part = sender.slicing.part(bucket.elements, bucket.itemsize, 2, channel)
                    for send in sender.slicing.tagged(part, bucket.itemsize, 3, side=1):
                        expected[channel, bucket.shadow_id] += contents_of(send)
        assert sender.library.trouble == ""
        for stream, data in expected.items():
            until(lambda s=stream, d=data: 1 if sender.library.count(*s) == (len(d), len(d)) else None)  # type: ignore[misc]
        segments = capture.stop()
    assert streams_of([s for s in segments if s.source_ip == pair.a_ip and s.payload]) == expected


def test_training_goes_on_untagged_if_the_kernel_refuses_a_tag(make: Make) -> None:
    with Tagger.attach() as tagger:
        sender = make("2.30", 1, 2, 2, sockets_map=tagger.sockets_map)
    sender.library.set_buckets(BUCKETS)
    for _ in range(2):
        for number, bucket in enumerate(BUCKETS):
            sender.reduce(number, bucket)
    assert sender.library.trouble.startswith("the kernel refuses a tag: ")
    assert sender.library.broken == ""


def test_a_map_that_is_none_is_named_before_the_connection_is_made(make: Make) -> None:
    sender = make("2.30", 1, 2, 2, sockets_map=12345)
    sender.library.set_buckets(BUCKETS)
    sender.reduce(0, BUCKETS[0])
    expected = "the kernel refuses to prepare a socket for tags: Bad file descriptor"
    assert (sender.library.trouble, sender.library.count(0, 0)) == (expected, (0, 0))


@pytest.mark.slow
def test_a_peer_that_vanishes_breaks_both_ends_in_bounded_time(make: Make, tmp_path: Path) -> None:
    with veth_pair() as pair:
        ends = [(pair.a, IPv4Address(pair.a_ip)), (pair.b, IPv4Address(pair.b_ip))]
        sender = make("2.30", 1, 2, 2, here=ends[0], peer=ends[1])
        sender.library.set_buckets(BUCKETS)
        sender.reduce(0, BUCKETS[0])
        pair.lose(1000, tmp_path)
        sender.send(0, 100, None)  # into the kernel; nothing follows
        for library in (sender.library, sender.sink_library):
            until(lambda loaded_library=library: 1 if loaded_library.broken else None, seconds=25)  # type: ignore[misc]
            assert "Connection timed out" in library.broken
        data, comm = buffer(1), sender.connections[0]
        assert until(lambda: sender.caller.isend(comm, data, 1, None)[0] or None) == REMOTE_ERROR
