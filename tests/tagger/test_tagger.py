"""The tagger on a real kernel: segments on the wire."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkmate.tagger import TaggedSocket, Tagger, TaggerError
from checkmate.tagger.program import RANGES, SocketState
from checkmate.wire import tag as wire
from checkmate.wire import tcp
from tests.support.labs.end_hosts import (
    CapturedSegment,
    HostPair,
    PacketCapture,
    SocketReader,
    inside,
    needs_root,
    veth_pair,
)
from tests.support.streams import copy_sequence

pytestmark = needs_root

CHANNEL, INCARNATION = 3, 200
SYN, PUSH = 0x02, 0x08
TIMESTAMPS = b"\x01\x01\x08\x0a"
OFFLOADS = {
    "tso": (),
    "software_gso": ("tso off",),
    "packet_by_packet": ("tso off", "gso off", "gro off", "tx off"),
}


@dataclass(frozen=True)
class Chunk:
    """A chunk: its place in the connection, its data, and its stream position if it is tagged."""

    start: int
    data: bytes
    shadow_id: int | None
    position: int


@pytest.fixture(scope="module")
def tagger() -> Iterator[Tagger]:
    with Tagger.attach() as attached:
        yield attached
        assert attached.faults() == {"reserve": 0, "store": 0, "tos": 0, "flags": 0}


def chunks_of(seed: int, sizes: list[int], untagged_share: float = 0.4) -> list[Chunk]:
    """Return chunks of random content: some untagged, the others with two shadow ids."""
    pick = random.Random(seed)
    positions = {0: 0, 0xABCD: 0}
    chunks: list[Chunk] = []
    start = 0
    for size in sizes:
        shadow_id = None if pick.random() < untagged_share else pick.choice(list(positions))
        position = 0 if shadow_id is None else positions[shadow_id]
        chunks.append(Chunk(start, pick.randbytes(size), shadow_id, position))
        if shadow_id is not None:
            positions[shadow_id] += size
        start += size
    return chunks


def send_all(sender: TaggedSocket, chunks: list[Chunk], *, planned: bool = False) -> None:
    if planned:
        sender.plan((len(chunk.data), chunk.shadow_id) for chunk in chunks)
    for chunk in chunks:
        sender.send_chunk(chunk.data, chunk.shadow_id)


def check_segments(segments: list[CapturedSegment], first: int, chunks: list[Chunk], timestamps: bool) -> int:
    """Check that every data segment lies in one chunk and has exactly its tag; return their number."""
    starts = {}
    for chunk in chunks:
        starts[chunk.start] = chunk
    ordered = sorted(starts)
    count = 0
    for segment in segments:
        if not segment.payload:
            assert not segment.dscp and not segment.tagged
            continue
        count += 1
        offset = (segment.sequence - first) % wire.MODULUS
        chunk = starts[max(start for start in ordered if start <= offset)]
        within = offset - chunk.start
        assert segment.payload == chunk.data[within : within + len(segment.payload)]
        kernel, tag = segment.options[:-16], segment.options[-16:]
        assert len(kernel) == 12 * timestamps and kernel.startswith(TIMESTAMPS if timestamps else b"")
        if chunk.shadow_id is None:
            assert segment.dscp == 0
            assert tag == b"\x01" * 16
            continue
        assert segment.dscp == wire.DEFAULT_DSCP_BIT
        parsed = wire.Tag.unpack(tag)
        anchor = (first + chunk.start) % wire.MODULUS
        assert parsed == wire.Tag(chunk.position, anchor, chunk.shadow_id, CHANNEL, INCARNATION)
        assert copy_sequence(parsed, segment.sequence) == (chunk.position + within) % wire.MODULUS
    return count


def first_sequence(segments: list[CapturedSegment]) -> int:
    """Return the first sequence number, from the SYN on the wire, not from the tagger."""
    (syn,) = {segment.sequence for segment in segments if segment.flags & SYN}
    return (syn + 1) % wire.MODULUS


def assert_covered(segments: list[CapturedSegment], first: int, chunks: list[Chunk]) -> None:
    """Check that the capture has every byte."""
    end = 0
    for start, stop in sorted(
        ((s.sequence - first) % wire.MODULUS, (s.sequence - first) % wire.MODULUS + len(s.payload))
        for s in segments
        if s.payload
    ):
        assert start <= end, f"bytes {end} to {start} were not captured"
        end = max(end, stop)
    assert end == chunks[-1].start + len(chunks[-1].data)


@pytest.mark.parametrize("planned", [False, True], ids=["one_by_one", "planned"])
@pytest.mark.parametrize("timestamps", [True, False], ids=["timestamps", "bare"])
@pytest.mark.parametrize("mode", OFFLOADS)
def test_every_segment_has_its_chunks_tag(tagger: Tagger, mode: str, timestamps: bool, planned: bool) -> None:
    sizes = [1, 10, 1431, 1432, 1433, 2864, 100_000, 3, 1_000_000, 65_536, 7, 7, 300_001, 1] * 3
    chunks = chunks_of(1, sizes)
    with veth_pair(OFFLOADS[mode]) as pair:
        pair.in_each(f"sysctl -qw net.ipv4.tcp_timestamps={int(timestamps)}")
        segments, sink_bytes, _ = run_transfer(tagger, pair, chunks, planned=planned)
    assert sink_bytes == b"".join(chunk.data for chunk in chunks)
    first = first_sequence(segments)
    assert check_segments(segments, first, chunks, timestamps) >= len(chunks)
    assert_covered(segments, first, chunks)
    longest = max(len(segment.payload) for segment in segments)
    mss = 1500 - 40 - 12 * timestamps - wire.TAG_LENGTH
    assert longest > 20 * mss if mode == "tso" else longest == mss


def run_transfer(
    tagger: Tagger, pair: HostPair, chunks: list[Chunk], *, planned: bool = False
) -> tuple[list[CapturedSegment], bytes, int]:
    """Send the chunks over a fresh tagged connection from `a` to `b`.

    Return the segments that `b` captured, the bytes that it read, and the number that `a` sent again.
    """
    capture = PacketCapture(pair.b)
    reader = SocketReader(pair.b, pair.b_ip)
    try:
        with inside(pair.a):
            sock = socket.socket()
        tcp.tune_for_bulk(sock)
        sender = TaggedSocket(tagger, sock, CHANNEL, INCARNATION)
        sender.socket.connect(reader.address)
        send_all(sender, chunks, planned=planned)
        tcp.drain(sender.socket, 60)
        assert sender.unacknowledged() == 0
        retransmitted = tcp.retransmitted(sock)
        sender.socket.close()
        reader.join(30)
    finally:
        segments = capture.stop()
    own_segments = [segment for segment in segments if segment.source_port != reader.address[1]]
    return own_segments, bytes(reader.received), retransmitted


@pytest.mark.parametrize(("mode", "per_mille"), [("tso", 80), ("packet_by_packet", 30)])
def test_retransmissions_carry_the_same_mapping(
    tagger: Tagger, mode: str, per_mille: int, tmp_path: Path
) -> None:
    chunks = chunks_of(2, [200_000, 5, 1433, 40_000, 9] * 20)
    with veth_pair(OFFLOADS[mode]) as pair:
        pair.lose(per_mille, tmp_path)
        segments, sink_bytes, retransmitted = run_transfer(tagger, pair, chunks)
    assert sink_bytes == b"".join(chunk.data for chunk in chunks)
    first = first_sequence(segments)
    check_segments(segments, first, chunks, timestamps=True)
    assert_covered(segments, first, chunks)
    assert retransmitted, "the loss has caused no retransmission: nothing was tested"


@pytest.mark.parametrize("planned", [False, True], ids=["one_by_one", "planned"])
def test_more_chunks_than_ranges_wait_for_acknowledgements(tagger: Tagger, planned: bool) -> None:
    chunks = chunks_of(3, [1, 2, 3, 4] * RANGES, untagged_share=0)
    with veth_pair() as pair:
        segments, sink_bytes, _ = run_transfer(tagger, pair, chunks, planned=planned)
    assert sink_bytes == b"".join(chunk.data for chunk in chunks)
    assert check_segments(segments, first_sequence(segments), chunks, timestamps=True) >= len(chunks)


def connect_near_the_wrap(
    tagger: Tagger, pair: HostPair, most: int
) -> tuple[TaggedSocket, socket.socket, int]:
    """Connect repeatedly until sequence numbers wrap after at most `most` bytes."""
    reset = struct.pack("ii", 1, 0)
    with inside(pair.b):
        server = socket.create_server((pair.b_ip, 0))
    with server, inside(pair.a):
        for _ in range(20_000):
            sender = TaggedSocket(tagger, socket.socket(), CHANNEL, INCARNATION)
            sender.socket.connect(server.getsockname())
            sink, _ = server.accept()
            state = SocketState()
            tagger.fetch(sender.socket, state)
            if wire.MODULUS - state.first_sequence <= most:
                return sender, sink, state.first_sequence
            sender.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            sender.socket.close()
            sink.close()
    raise AssertionError("no initial sequence number close to 2^32")


def read_all(sink: socket.socket, data: bytearray) -> None:
    """Add all bytes of a connection to `data`."""
    while piece := sink.recv(1 << 20):
        data += piece


@pytest.mark.parametrize("mode", ["tso", "packet_by_packet"])
def test_sequence_numbers_wrap_at_32_bits(tagger: Tagger, mode: str) -> None:
    with veth_pair(OFFLOADS[mode]) as pair:
        sender, sink, first = connect_near_the_wrap(tagger, pair, most=4 << 20)
        chunks = chunks_of(4, [(wire.MODULUS - first) // 10 + 1] * 20)
        capture = PacketCapture(pair.b)
        sink_bytes = bytearray()
        # All the time: what a socket holds unread may be less than a chunk.
        reader = threading.Thread(target=read_all, args=(sink, sink_bytes))
        reader.start()
        try:
            for chunk in chunks:
                sender.send_chunk(chunk.data, chunk.shadow_id)
            tcp.drain(sender.socket, 10)
            sender.socket.shutdown(socket.SHUT_WR)
            reader.join(30)
        finally:
            segments = [segment for segment in capture.stop() if segment.source_port != sink.getsockname()[1]]
            sender.socket.close()
            sink.close()
    assert bytes(sink_bytes) == b"".join(chunk.data for chunk in chunks)
    assert check_segments(segments, first, chunks, timestamps=True) >= len(chunks)
    assert_covered(segments, first, chunks)
    assert {segment.sequence < 1 << 31 for segment in segments if segment.payload} == {True, False}


def test_other_sockets_are_left_alone(tagger: Tagger) -> None:
    with veth_pair() as pair:
        capture = PacketCapture(pair.b)
        reader = SocketReader(pair.b, pair.b_ip)
        with inside(pair.a):
            plain = socket.socket()
        plain.connect(reader.address)
        plain.sendall(bytes(200_000), socket.MSG_EOR)
        plain.close()
        reader.join(10)
        segments = [s for s in capture.stop() if s.source_port != reader.address[1] and s.payload]
    assert len(reader.received) == 200_000
    assert {(s.dscp, len(s.options), s.options[:4]) for s in segments} == {(0, 12, TIMESTAMPS)}


def test_a_socket_keeps_its_own_dscp(tagger: Tagger) -> None:
    with veth_pair() as pair:
        capture = PacketCapture(pair.b)
        reader = SocketReader(pair.b, pair.b_ip)
        with inside(pair.a):
            sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 10 << 2)
        sender = TaggedSocket(tagger, sock, CHANNEL, INCARNATION, dscp_bit=0x04)
        sender.socket.connect(reader.address)
        sender.send_chunk(b"plain")
        sender.send_chunk(b"tagged", 0)
        tcp.drain(sender.socket, 10)
        sender.socket.close()
        reader.join(10)
        segments = [s for s in capture.stop() if s.source_port != reader.address[1] and s.payload]
    assert [(s.payload, s.dscp) for s in segments] == [(b"plain", 10), (b"tagged", 14)]


@contextlib.contextmanager
def connected(tagger: Tagger) -> Iterator[tuple[TaggedSocket, SocketReader]]:
    """Yield a socket that is connected to another host, where all is read until the end."""
    with veth_pair() as pair:
        reader = SocketReader(pair.b, pair.b_ip)
        with inside(pair.a):
            sender = TaggedSocket(tagger, socket.socket(), CHANNEL, INCARNATION)
        sender.socket.connect(reader.address)
        yield sender, reader
        sender.socket.close()
        reader.join(10)


def test_positions_count_tagged_bytes_only(tagger: Tagger) -> None:
    with connected(tagger) as (sender, reader):
        sender.send_chunk(b"")
        sender.send_chunk(b"123", 5)
        sender.send_chunk(b"4567")
        sender.begin_chunk(4, 6)
        sender.write(b"8")
        with pytest.raises(TaggerError, match="still lacks 3"):
            sender.begin_chunk(1)
        with pytest.raises(TaggerError, match="4 bytes exceed the 3 bytes left of the chunk"):
            sender.write(b"toom")
        sender.write(b"9ab")
        assert (sender.position(5), sender.position(6), sender.position(7)) == (3, 4, 0)
        assert sender.written_bytes == 11
    assert reader.received == b"123456789ab"


def test_the_kernel_gets_the_ranges_of_planned_chunks_at_once(
    tagger: Tagger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkmate.tagger.sockets.LOT_BYTES", 10)
    socket_state = SocketState()
    chunks: list[tuple[int, int | None]] = [(2, 5), (3, None), (4, 5), (5, 6), (11, 5), (1, 5)]
    with connected(tagger) as (sender, reader):
        sender.plan(chunks)
        tails = []
        for length, shadow_id in chunks:
            sender.begin_chunk(length, shadow_id)
            tagger.fetch(sender.socket, socket_state)
            tails.append(socket_state.tail)
            sender.write(bytes(length))
        assert tails == [2, 2, 2, 3, 4, 5]
        assert (sender.position(5), sender.position(6)) == (18, 5)
        sender.plan([(7, 5)])
        with pytest.raises(TaggerError, match=r"\(7, None\) is not the planned chunk \(7, 5\)"):
            sender.begin_chunk(7)
    assert len(reader.received) == 26


def test_a_position_counts_chunks_that_have_begun(tagger: Tagger) -> None:
    with connected(tagger) as (sender, _):
        sender.plan([(2, 5), (3, 5)])
        sender.send_chunk(b"12", 5)
        assert sender.position(5) == 2
        sender.send_chunk(b"345", 5)
        assert sender.position(5) == 5


def test_a_range_is_retired_before_its_sequence_numbers_come_again(
    tagger: Tagger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkmate.tagger.sockets.RETIRE_AFTER", 100)
    socket_state = SocketState()
    with connected(tagger) as (sender, reader):
        sender.send_chunk(b"123", 5)
        sender.send_chunk(bytes(90))
        tagger.fetch(sender.socket, socket_state)
        assert (socket_state.head, socket_state.tail) == (0, 1)
        sender.send_chunk(bytes(20))
        tagger.fetch(sender.socket, socket_state)
        assert (socket_state.head, socket_state.tail) == (1, 1)
        sender.send_chunk(b"456", 5)
        tagger.fetch(sender.socket, socket_state)
        assert (socket_state.head, socket_state.tail, socket_state.ranges[1].sequence) == (1, 2, 3)
    assert len(reader.received) == 116


def test_no_range_outlives_its_sequence_numbers_between_tagged_chunks(
    tagger: Tagger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ranges are not dropped at each chunk, but none is left when its numbers may come again."""
    monkeypatch.setattr("checkmate.tagger.sockets.RETIRE_AFTER", 100)
    socket_state = SocketState()
    with connected(tagger) as (sender, _):
        for number in range(12):
            sender.send_chunk(bytes(10), 5 if number % 3 == 0 else None)
            sender.send_chunk(bytes(15))
            tagger.fetch(sender.socket, socket_state)
            live = [
                socket_state.ranges[range_ % RANGES] for range_ in range(socket_state.head, socket_state.tail)
            ]
            ends = [
                (range_.anchor + range_.length - socket_state.first_sequence) % wire.MODULUS
                for range_ in live
            ]
            assert all(sender.written_bytes - end <= 100 for end in ends), (number, ends)
        assert socket_state.head and socket_state.tail == 4


def test_a_connection_made_before_is_refused(tagger: Tagger) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        late = TaggedSocket(tagger, sock, CHANNEL, INCARNATION)
        with pytest.raises(TaggerError, match="before it connects"):
            late.send_chunk(b"x", 0)


def test_only_ipv4_tcp_is_tagged(tagger: Tagger) -> None:
    with socket.socket(socket.AF_INET6) as sock, pytest.raises(TaggerError, match="IPv4"):
        TaggedSocket(tagger, sock, CHANNEL, INCARNATION)


def test_draining_ends_when_the_peer_resets(tagger: Tagger) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, tcp.SO_SNDBUFFORCE, 4 << 20)
        sender = TaggedSocket(tagger, sock, CHANNEL, INCARNATION)
        sender.socket.connect(server.getsockname())
        peer, _ = server.accept()
        sender.send_chunk(bytes(1 << 20), 1)
        with pytest.raises(TimeoutError, match="did not acknowledge"):
            tcp.drain(sender.socket, 0.1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        with pytest.raises(ConnectionResetError, match="bytes unacknowledged"):
            tcp.drain(sender.socket, 10)
        sender.socket.close()


def test_what_is_sent_again_has_its_place_in_the_stream(tagger: Tagger) -> None:
    """Whatever is sent again, in any order, with positions beyond 32 bits, and other channels."""
    data = random.Random(4).randbytes(300_000)
    pieces = [(1 << 33, 5, 0xABCD), (0, 0, 1), ((1 << 32) - 1000, 2, 7), (12345, 5, 0xABCD)] * RANGES
    with veth_pair() as pair:
        capture = PacketCapture(pair.b)
        reader = SocketReader(pair.b, pair.b_ip)
        try:
            with inside(pair.a):
                sock = socket.socket()
            sender = TaggedSocket(tagger, sock, CHANNEL, INCARNATION)
            sender.socket.connect(reader.address)
            sender.send_chunk(b"a greeting")
            sent, start = {}, len(b"a greeting")
            for number, (position, channel, shadow_id) in enumerate(pieces):
                piece = data[: 1 + 1499 * (number % 40)]
                sender.send_again(piece, channel, shadow_id, position)
                sent[start] = (piece, position, channel, shadow_id)
                start += len(piece)
            tcp.drain(sender.socket, 60)
            sender.socket.close()
            reader.join(30)
        finally:
            segments = capture.stop()
    first = first_sequence(segments)
    tagged = [s for s in segments if s.payload and s.tagged and s.source_port != reader.address[1]]
    assert len(tagged) >= len(pieces)
    for segment in tagged:
        offset = (segment.sequence - first) % wire.MODULUS
        begin = max(start for start in sent if start <= offset)
        piece, position, channel, shadow_id = sent[begin]
        within = offset - begin
        parsed = wire.Tag.unpack(segment.options[-16:])
        assert segment.payload == piece[within : within + len(segment.payload)]
        assert (parsed.channel, parsed.shadow_id, parsed.incarnation) == (channel, shadow_id, INCARNATION)
        assert copy_sequence(parsed, segment.sequence) == (position + within) % wire.MODULUS
