"""The streams that a switch would send to shadow nodes, out of captured segments."""

from __future__ import annotations

from collections import defaultdict

from checkmate.wire import tag as wire
from tests.support.labs.end_hosts import CapturedSegment
from tests.support.streams import copy_sequence


def streams_of(segments: list[CapturedSegment], incarnation: int) -> dict[tuple[str, int, int], bytes]:
    """Return the streams to shadow nodes, by (source IP, channel, shadow id), in order of their bytes."""
    streams: dict[tuple[str, int, int], bytearray] = defaultdict(bytearray)
    for segment in segments:
        if not segment.dscp:
            continue
        tag = wire.Tag.unpack(segment.options[-wire.TAG_LENGTH :])
        assert tag.incarnation == incarnation
        stream = streams[segment.source_ip, tag.channel, tag.shadow_id]
        start = copy_sequence(tag, segment.sequence)
        stop = start + len(segment.payload)
        stream.extend(bytes(max(0, stop - len(stream))))
        stream[start:stop] = segment.payload
    return {key: bytes(stream) for key, stream in streams.items()}
