"""Streams of parts between a trainer's threads and a node's listener, over loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from checkmate.job.schema import ShadowNode
from checkmate.keys.macs import GRADIENTS, ConnectionProof, ConnectionSide
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.receive import part_streams
from checkmate.shadow.receive.hold_plans import StreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.part_streams import MAX_GREETINGS, PartInlet, PartListener
from checkmate.state import bytes_of
from checkmate.training.gradients import part_stream
from checkmate.training.gradients.part_copies import part_slices
from checkmate.training.gradients.part_stream import KEPT_ITERATIONS, PartStream
from checkmate.wire import copies
from checkmate.wire.copies import NodeAnswer, PartGreeting
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import StreamName
from tests.support.waiting import wait_until

KEY, START, JOB = bytes(range(32)), b"s" * 16, "mine"
RANKS, SENDER = 3, 1
PLAN = StreamPlan(0, 0, SENDER, 0)


def layout_of(elements: int = 1000) -> Layout:
    parameters = [Parameter(f"p{number}", (elements,), "float32") for number in range(4)]
    return make_layout(parameters, 1, 6000, PartSlicing())


class Node:
    """The receiving side of one stream. `release` has the buckets of an iteration used again."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or layout_of()
        self.stream = self.layout.slicing.stream(self.layout.schedule, StreamName(SENDER, 0, 0), 1, RANKS)
        self.sets = BucketSets(self.layout, 0, -1)
        self.broken: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.listener = PartListener(JOB, listener, KEY, lambda: None, self._broken)
        self.inlet: Inlet = self.expect(0)

    def expect(self, joined: int, start: bytes = START) -> Inlet:
        """Expect the stream from an iteration on."""
        self.inlet = PartInlet(PLAN, self.stream, self.sets, first=0, joined=joined)
        self.listener.connect(self.inlet, pb.BeginRequest(start=start))
        return self.inlet

    def release(self, iteration: int) -> None:
        self.sets.release(iteration)
        for reader in self.listener.readers:
            reader.wake()

    def part(self, iteration: int) -> bytes:
        """Return the stream's bytes as they are in the buckets."""
        pieces = []
        for piece in self.stream.pieces:
            elements = self.sets.gradients(iteration)[piece.bucket][piece.where.start : piece.where.stop]
            pieces.append(bytes(bytes_of(elements)))
        return b"".join(pieces)

    def _broken(self, inlet: Inlet) -> None:
        self.broken.append(inlet.broken or "")
        self.listener.connect(inlet, pb.BeginRequest(start=START))

    @property
    def described(self) -> ShadowNode:
        return ShadowNode(id=0, mgmt="127.0.0.1:1", gradients=f"127.0.0.1:{self.port}", nics=())

    @property
    def greeting(self) -> PartGreeting:
        return PartGreeting(
            group=0,
            position=SENDER,
            shard=0,
            incarnation=7,
            nbytes=self.stream.nbytes,
            job=copies.job_digest(JOB),
            start=START,
            nonce=bytes(16),
        )


@pytest.fixture
def node() -> Iterator[Node]:
    receiving = Node()
    yield receiving
    receiving.inlet.close()
    receiving.listener.stop()


@pytest.fixture
def stream(node: Node) -> Iterator[PartStream]:
    sending = PartStream(node.described, node.greeting, KEY)
    sending.start()
    yield sending
    sending.close()


def data_of(stream: PartStream, iteration: int) -> torch.Tensor:
    """Return an iteration's bytes, in the stream's memory."""
    room = stream.room()
    assert room is not None
    generator = torch.Generator().manual_seed(iteration)
    return room.copy_(torch.randint(0, 256, (stream.nbytes,), dtype=torch.uint8, generator=generator))


def send(stream: PartStream, iteration: int) -> bytes:
    data = data_of(stream, iteration)
    sent = bytes(bytes_of(data))
    stream.put(iteration, data)
    return sent


def test_iterations_arrive_in_their_places_and_are_acknowledged(node: Node, stream: PartStream) -> None:
    for iteration in range(6):
        sent = send(stream, iteration)
        wait_until(lambda now=iteration: node.inlet.whole == now)  # type: ignore[misc]
        assert node.part(iteration) == sent
        wait_until(lambda now=iteration: stream._acknowledged == now)  # type: ignore[misc]
        assert stream.has(iteration)
        assert not stream.has(iteration + 1)
        node.release(iteration)
    assert node.broken == []
    assert node.inlet.position == 6 * stream.nbytes == node.inlet.received_bytes


def test_slices_cover_the_part_in_order(node: Node) -> None:
    slices = part_slices(node.layout, node.stream)
    offset = 0
    for part in slices:
        assert part.offset == offset
        assert 0 <= part.where.start < part.where.stop <= 1000
        offset += 4 * len(part.where)
    assert offset == node.stream.nbytes


def test_a_broken_connection_loses_nothing() -> None:
    """An iteration that has come in part comes again, whole."""
    node = Node(layout_of(500_000))
    stream = PartStream(node.described, node.greeting, KEY)
    stream.start()
    for iteration in range(8):
        wait_until(lambda: node.inlet.connected)
        sock = node.inlet.socket
        assert sock is not None
        sent = send(stream, iteration)
        wait_until(lambda now=iteration: node.inlet.position > now * stream.nbytes)  # type: ignore[misc]
        sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda now=iteration: node.inlet.whole == now)  # type: ignore[misc]
        assert node.part(iteration) == sent
        wait_until(lambda now=iteration: len(node.broken) > now)  # type: ignore[misc]
        node.release(iteration)
    stream.close()
    node.inlet.close()
    node.listener.stop()


def test_for_a_node_that_takes_too_little_iterations_are_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "KEPT_BYTES", 0)
    monkeypatch.setattr(part_stream, "KEPT_SECONDS", 0.0)
    stream = PartStream(node.described, node.greeting, KEY)  # which is not started, and so sends nothing
    for iteration in range(KEPT_ITERATIONS):
        send(stream, iteration)
    assert stream.room() is None
    for iteration in range(KEPT_ITERATIONS, KEPT_ITERATIONS + 5):
        stream.put(iteration, None)
    assert stream.left_out == 5
    assert [part.iteration for part in stream._parts] == [0, 1, 6], "one mark for all of them"


def test_what_was_left_out_breaks_the_stream_which_is_joined_later(node: Node, stream: PartStream) -> None:
    send(stream, 0)
    wait_until(lambda: node.inlet.whole == 0)
    stream.put(1, None)
    wait_until(lambda: bool(node.broken))
    assert "left out iterations up to 1, because this node took too little" in node.broken[0]
    assert node.inlet.left_out == range(1, 2)
    node.inlet.close()
    node.sets.release(4)
    node.expect(5)
    for iteration in range(2, 8):
        sent = send(stream, iteration)
        if iteration >= 5:
            wait_until(lambda now=iteration: node.inlet.whole == now)  # type: ignore[misc]
            assert node.part(iteration) == sent
            node.release(iteration)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": copies.job_digest("other")}, "this node belongs to job mine"),
        ({"start": b"x" * 16}, "this start of training has not begun here"),
        ({"position": 2}, "this start of training has not begun here"),
        ({"nbytes": 4}, "the rank's part has 4 bytes, and this node expects"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_with_a_reason(
    node: Node,
    changes: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    sending = PartStream(node.described, node.greeting._replace(**changes), KEY)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "checkmate"):
        sending.start()
        wait_until(lambda: bool(caplog.messages))
        time.sleep(0.5)
        sending.close()
    assert len(caplog.messages) == 1, "it is logged once"
    assert reason in caplog.messages[0]
    assert sending.has(0), "training does not wait for it"


def test_another_key_is_noticed_on_both_sides(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    sending = PartStream(node.described, node.greeting, bytes(32))
    with caplog.at_level(logging.INFO, "checkmate"):
        sending.start()
        wait_until(
            lambda: sum("does not take this rank's gradients" in text for text in caplog.messages) == 1
        )
        sending.close()
    assert any("it has another gradients.key" in text for text in caplog.messages)
    assert not node.inlet.connected


def test_a_recorded_greeting_cannot_be_used_again(node: Node) -> None:
    """The node's nonce is another one each time."""
    greeting = node.greeting._replace(nonce=b"n" * 16).pack()
    answers: list[bytes] = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", node.port), 5) as sock:
            sock.sendall(greeting)
            challenge = sock.recv(copies.CHALLENGE_BYTES)
            nonce = copies.unpack_challenge(challenge)
            if not answers:
                proof = ConnectionProof(KEY, greeting, b"n" * 16, nonce, GRADIENTS)
                mac = proof.mac(ConnectionSide.CONNECTS)
            sock.sendall(mac)
            answers.append(sock.recv(copies.ANSWER_BYTES))
    assert len(answers[0]) == copies.ANSWER_BYTES
    assert answers[1] == b""


@pytest.mark.parametrize(
    "data",
    ["", "474554202f20485454502f312e300d0a0d0a", "5a" * 200, "00" * copies.GREETING_BYTES, "c4ecffff" * 30],
)
def test_strangers_get_nothing_and_stop_nobody(
    node: Node, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_streams, "GREETING_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", node.port), 5) as stranger:
        stranger.sendall(bytes.fromhex(data))
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # if something was not read
            assert stranger.recv(1000) == b""
    sending = PartStream(node.described, node.greeting, KEY)
    sending.start()
    wait_until(lambda: node.inlet.connected)
    sending.close()


def test_a_flood_of_connections_is_bounded_and_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_streams, "GREETING_SECONDS", 0.3)
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", node.port), 5) for _ in range(3 * MAX_GREETINGS)]
    try:
        assert threading.active_count() <= threads + part_streams._WORKERS + 2
        sending = PartStream(node.described, node.greeting, KEY)
        sending.start()
        sent = send(sending, 0)
        wait_until(lambda: node.inlet.whole == 0)
        assert node.part(0) == sent
        sending.close()
    finally:
        for sock in silent:
            sock.close()


def test_a_header_that_does_not_fit_ends_the_stream(node: Node) -> None:
    greeting = node.greeting._replace(nonce=b"n" * 16).pack()
    with socket.create_connection(("127.0.0.1", node.port), 5) as sock:
        sock.sendall(greeting)
        nonce = copies.unpack_challenge(sock.recv(copies.CHALLENGE_BYTES))
        proof = ConnectionProof(KEY, greeting, b"n" * 16, nonce, GRADIENTS)
        sock.sendall(proof.mac(ConnectionSide.CONNECTS))
        sock.recv(copies.ANSWER_BYTES)
        sock.sendall(copies.pack_header(0, 1 << 60))
        wait_until(lambda: bool(node.broken))
    assert f"iteration 0 with {1 << 60} bytes, and iteration 0 with {node.stream.nbytes} is" in node.broken[0]


def test_a_rank_that_goes_while_it_is_answered_comes_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("gone"), OSError("gone")]
    pack = NodeAnswer.pack

    def pack_or_fail(answer: NodeAnswer) -> bytes:
        if not answer.reason and failures:
            raise failures.pop()
        return pack(answer)

    monkeypatch.setattr(NodeAnswer, "pack", pack_or_fail)
    stream = PartStream(node.described, node.greeting, KEY)
    stream.start()
    sent = send(stream, 0)
    wait_until(lambda: node.inlet.whole == 0)
    stream.close()
    assert node.part(0) == sent
    assert failures == []
