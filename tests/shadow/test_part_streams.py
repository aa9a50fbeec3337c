"""Streams of parts between a trainer's threads and a node's listener, over loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkmate.job import host_copies
from checkmate.job.schema import Job, ShadowNode
from checkmate.keys.macs import GRADIENTS, MAC_BYTES, ConnectionProof, ConnectionSide
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic import hold as logic_hold
from checkmate.shadow.logic.hold import Hold, StreamState
from checkmate.shadow.logic.records import Records
from checkmate.shadow.receive import part_listener
from checkmate.shadow.receive.hold_plans import HoldPlan, StreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.part_listener import MAX_GREETINGS, PartListener
from checkmate.shadow.receive.part_streams import PartInlet
from checkmate.state import bytes_of
from checkmate.training.gradients import part_stream
from checkmate.training.gradients.part_copies import part_slices
from checkmate.training.gradients.part_stream import PartStream
from checkmate.wire import copies
from checkmate.wire.copies import KEPT_ITERATIONS, NodeAnswer, PartGreeting, PartHeader
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import StreamName
from tests.support.waiting import wait_until

KEY, START, JOB = bytes(range(32)), b"s" * 16, "mine"
RANKS, SENDER = 3, 1


def job(**changes: object) -> Job:
    nodes = [{"id": 0, "mgmt": "127.0.0.1:1"}]
    made, faults = host_copies.read(
        {"job": JOB, "copies": "host", "ranks": RANKS, "shadow_nodes": nodes, **changes}
    )
    assert made is not None, faults
    return made


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
        self.listener = PartListener(job(), listener, KEY, None, lambda: None, self._broken)
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


def test_a_mark_that_is_on_its_way_is_not_changed(
    node: Node, stream: PartStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header says up to which iteration they are left out; later ones get a mark of their own."""
    write, reached, going_on = stream._write, threading.Event(), threading.Event()

    def wait(*arguments: Any) -> None:
        reached.set()
        going_on.wait()
        write(*arguments)

    monkeypatch.setattr(stream, "_write", wait)
    stream.put(0, None)
    assert reached.wait(10)
    stream.put(1, None)
    stream.put(2, None)
    assert [part.iteration for part in stream._parts] == [0, 2]
    going_on.set()
    wait_until(lambda: stream._acknowledged == 2)


def test_bytes_are_read_once_they_are_there(node: Node, stream: PartStream) -> None:
    """Copies from a GPU may arrive after the part was queued; the caller does not wait for them."""
    room = stream.room()
    assert room is not None
    room.zero_()
    arrival = threading.Event()
    stream.put(0, room, arrival.wait)
    stream.put(1, None)
    room.fill_(7)
    arrival.set()
    wait_until(lambda: node.inlet.whole == 0)
    assert node.part(0) == bytes([7]) * stream.nbytes


def test_for_a_node_that_takes_too_little_iterations_are_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "KEPT_BYTES", 0)
    monkeypatch.setattr(copies, "KEPT_SECONDS", 0.0)
    stream = PartStream(node.described, node.greeting, KEY)  # which is not started, and so sends nothing
    for iteration in range(KEPT_ITERATIONS):
        send(stream, iteration)
    assert stream.room() is None
    for iteration in range(KEPT_ITERATIONS, KEPT_ITERATIONS + 5):
        stream.put(iteration, None)
    assert stream.left_out == 5
    assert [part.iteration for part in stream._parts] == [0, 1, 6], "one mark for all of them"


def test_after_what_was_left_out_the_same_connection_goes_on(node: Node, stream: PartStream) -> None:
    send(stream, 0)
    wait_until(lambda: node.inlet.whole == 0)
    sock = node.inlet.socket
    stream.put(1, None)
    wait_until(lambda: bool(node.inlet.lost))
    assert "left out iterations up to 1, because this node took too little" in node.inlet.lost
    assert node.inlet.left_out == range(1, 2)
    send(stream, 2)  # which is read and discarded
    wait_until(lambda: stream._acknowledged == 2)
    assert node.inlet.rejoin(5)
    node.release(4)
    for iteration in range(3, 8):
        sent = send(stream, iteration)
        if iteration >= 5:
            wait_until(lambda now=iteration: node.inlet.whole == now)  # type: ignore[misc]
            assert node.part(iteration) == sent
            node.release(iteration)
    assert (node.inlet.socket, node.broken) == (sock, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": copies.job_digest("other")}, "this node belongs to job mine"),
        ({"start": b"x" * 16}, "this start of training has not begun here"),
        ({"position": 2}, "this start of training has not begun here"),
        ({"position": 3}, "job file has 1 DP group, and 3 ranks in group 0: trainers and shadow nodes must"),
        ({"group": 1}, "job file has 1 DP group, and 0 ranks in group 1: trainers and shadow nodes must"),
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
    assert copies.unpack_answer(answers[1]) == (-1, len("it has another gradients.key"), bytes(16))


@pytest.mark.parametrize(
    "data",
    ["", "474554202f20485454502f312e300d0a0d0a", "5a" * 200, "00" * copies.GREETING_BYTES],
)
def test_strangers_get_nothing_and_stop_nobody(
    node: Node, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_listener, "GREETING_SECONDS", 0.3)
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
    monkeypatch.setattr(part_listener, "GREETING_SECONDS", 0.3)
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", node.port), 5) for _ in range(3 * MAX_GREETINGS)]
    try:
        assert threading.active_count() <= threads
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
        sock.sendall(PartHeader(0, 1 << 60).pack())
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


class Meddler:
    """A proxy on the way to a node, which changes a byte at some place of what passes."""

    def __init__(self, port: int, place: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self._target, self._place = port, place
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pass_on, args=(source, target, source is near), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, changing: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                with self._lock:
                    if changing and passed <= self._place < passed + len(data):
                        data[self._place - passed] ^= 1
                        self._place = -1  # once
                passed += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


GREETED = copies.GREETING_BYTES + MAC_BYTES


@pytest.mark.parametrize("place", ["first", "middle", "last", "mac"])
def test_a_changed_byte_is_found_before_the_iteration_counts(place: str) -> None:
    node = Node(layout_of(100_000))
    nbytes = node.stream.nbytes
    start = GREETED + copies.HEADER_BYTES
    meddler = Meddler(
        node.port, start + {"first": 0, "middle": nbytes // 2, "last": nbytes - 1, "mac": nbytes + 3}[place]
    )
    near = ShadowNode(id=0, mgmt="127.0.0.1:1", gradients=f"127.0.0.1:{meddler.port}", nics=())
    stream = PartStream(near, node.greeting, KEY)
    stream.start()
    try:
        send(stream, 0)
        wait_until(lambda: bool(node.broken))
        assert "the part of iteration 0 does not fit its authentication code" in node.broken[0]
        assert node.inlet.lost == node.broken[0]
        assert (node.inlet.whole, node.inlet.position) == (-1, 0), "no step may use it"
        wait_until(lambda: node.inlet.connected)
        assert node.inlet.rejoin(3)
        node.release(2)
        for iteration in range(1, 4):
            sent = send(stream, iteration)
        wait_until(lambda: node.inlet.whole == 3)
        assert node.part(3) == sent
    finally:
        stream.close()
        node.inlet.close()
        node.listener.stop()
        meddler.server.close()


def test_a_hold_whose_part_was_changed_has_a_gap() -> None:
    layout = layout_of()
    stream = layout.slicing.stream(layout.schedule, StreamName(SENDER, 0, 0), 1, RANKS)
    state = StreamState(PLAN, stream)
    hold = Hold(HoldPlan(0, 0, (), (PLAN,)), layout.of_shard(0), [state], 0, 0)
    records = Records(RANKS, 0)
    assert hold.gap(records, 0.0, 2.0) is None
    state.observe(0, 0, connected=True, paused=False, queued=0, lost="it was changed")
    assert hold.gap(records, 0.0, 2.0) == "group 0, shard 0, rank at position 1: it was changed"


def test_an_inlet_joins_again_in_the_middle_of_a_part() -> None:
    node = Node(layout_of(2_000_000))
    stream = PartStream(node.described, node.greeting, KEY)
    stream.start()
    try:
        wait_until(lambda: node.inlet.connected)
        node.sets.released = -3  # no set is free
        send(stream, 0)
        time.sleep(0.1)
        node.release(-1)
        wait_until(lambda: node.inlet.position > 0)
        assert node.inlet.rejoin(2)
        node.release(1)
        send(stream, 1)
        sent = send(stream, 2)
        wait_until(lambda: node.inlet.whole == 2)
        assert node.part(2) == sent
        assert node.broken == []
    finally:
        stream.close()
        node.inlet.close()
        node.listener.stop()


def test_of_a_holds_streams_the_last_one_to_end_an_iteration_is_news() -> None:
    """Else a node with a thousand of them would look at all a thousand times in each iteration."""
    sets = BucketSets(layout_of(), 0, -1, streams=3)
    assert [sets.note_end(iteration) for iteration in (0, 0, 1, 0, 1, 1)] == [
        *(False, False, False),
        *(True, False, True),
    ]
    sets.release(1)
    assert [sets.note_end(2) for _ in range(3)] == [False, False, True]


def test_a_record_does_not_look_at_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    state = StreamState(PLAN, layout_of().slicing.stream(layout_of().schedule, StreamName(1, 0, 0), 1, RANKS))
    hold = Hold(HoldPlan(0, 0, (), (PLAN,)), [0], [state], 0, 0)

    def look(*arguments: object) -> int:
        looks.append(arguments)
        return 0

    monkeypatch.setattr(logic_hold, "whole_through", look)
    records = Records(RANKS, 0)
    for position in range(RANKS):
        records.add(pb.RecordPart(iteration=0, position=position), 0.0)
        hold.update(records)
    assert len(looks) == 1
    assert hold.in_full == 0
