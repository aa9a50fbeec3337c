"""Attacks on a node's port for gradients, and on ranks by what pretends to be a node."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from checkmate.job.schema import ShadowNode
from checkmate.keys.macs import GRADIENTS, ConnectionProof, ConnectionSide
from checkmate.shadow.receive import part_listener
from checkmate.shadow.receive.part_listener import (
    BUDGET_BYTES,
    LEAST_BUFFER,
    MAX_GREETINGS,
    MOST_BUFFER,
    buffer_of,
)
from checkmate.training.gradients import part_stream
from checkmate.training.gradients.part_stream import PartStream
from checkmate.wire import copies, tcp
from checkmate.wire.copies import PartHeader
from tests.shadow.test_part_streams import KEY, Node, node, send
from tests.support.waiting import wait_until

__all__ = ["node"]

NONCE = b"n" * 16


@contextlib.contextmanager
def sending(node: Node, at: str | None = None) -> Iterator[PartStream]:
    described = node.described if at is None else ShadowNode(id=0, mgmt="127.0.0.1:1", gradients=at, nics=())
    stream = PartStream(described, node.greeting, KEY)
    stream.start()
    try:
        yield stream
    finally:
        stream.close()


def check_service(node: Node) -> None:
    """Check that a rank's next iteration arrives."""
    with sending(node) as stream:
        wait_until(lambda: node.inlet.connected)
        first = node.inlet.iteration
        sent = send(stream, first)
        wait_until(lambda: node.inlet.whole == first)
        assert node.part(first) == sent
        node.release(first)


def greeted(node: Node) -> socket.socket:
    """Return a connection that has proved itself."""
    sock = socket.create_connection(("127.0.0.1", node.port), 5)
    greeting = node.greeting._replace(nonce=NONCE).pack()
    sock.sendall(greeting)
    nonce = copies.unpack_challenge(tcp.receive_exactly(sock, copies.CHALLENGE_BYTES))
    sock.sendall(ConnectionProof(KEY, greeting, NONCE, nonce, GRADIENTS).mac(ConnectionSide.CONNECTS))
    assert copies.unpack_answer(tcp.receive_exactly(sock, copies.ANSWER_BYTES))[1] == 0
    return sock


def test_ranks_get_through_while_one_host_floods(node: Node) -> None:
    """Each connection says a little, and another one takes its place when it is displaced."""
    attack_end = threading.Event()
    greeting = node.greeting.pack()

    def flood() -> None:
        connections: list[socket.socket] = []
        while not attack_end.is_set():
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", node.port), 1, ("127.0.0.9", 0))
                sock.send(greeting[: random.randrange(len(greeting))])
                connections.append(sock)
            if len(connections) > MAX_GREETINGS:
                connections.pop(0).close()
        for sock in connections:
            sock.close()

    attackers = [threading.Thread(target=flood) for _ in range(2)]
    threads = threading.active_count()
    for attacker in attackers:
        attacker.start()
    try:
        wait_until(lambda: len(node.listener._greetings._newcomers) > MAX_GREETINGS // 2)
        for _ in range(3):
            check_service(node)
            wait_until(lambda: not node.inlet.connected)
        assert len(node.listener._greetings._newcomers) <= MAX_GREETINGS
        assert threading.active_count() <= threads + len(attackers)
    finally:
        attack_end.set()
        for attacker in attackers:
            attacker.join()


def test_a_slow_greeting_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, but not all of them."""
    monkeypatch.setattr(part_listener, "GREETING_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", node.port), 5) as sock:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in node.greeting.pack():
                sock.send(bytes([byte]))
                time.sleep(0.02)
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    assert time.monotonic() - start < 5
    check_service(node)


@pytest.mark.parametrize(
    "header",
    [
        PartHeader(0, 1 << 63),
        PartHeader(0, 1),
        PartHeader(-1, 1 << 40),
        PartHeader(1 << 62, 1 << 20),
    ],
)
def test_lies_about_lengths_end_the_stream_and_allocate_nothing(node: Node, header: PartHeader) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with greeted(node) as sock:
        sock.sendall(header.pack() + os.urandom(1 << 16))
        wait_until(lambda: bool(node.broken))
    assert f"with {header.nbytes} bytes, and iteration 0 with {node.stream.nbytes} is" in node.broken[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # KiB
    check_service(node)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_rank_is_never_taken_for_gradients(node: Node, seed: int) -> None:
    noise = random.Random(seed)
    with greeted(node) as sock:
        nbytes = noise.choice([0, node.stream.nbytes])
        sock.sendall(PartHeader(noise.choice([0, 1, 7]), nbytes).pack() + noise.randbytes(nbytes + 16))
        wait_until(lambda: bool(node.broken))
    assert "does not fit its authentication code" in node.broken[0]
    assert node.inlet.whole == -1


def test_another_version_is_named_with_the_remedy(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(copies, "check_prefix", check_prefix_of_version(copies.VERSION + 1))
    monkeypatch.setattr(copies, "pack_challenge", lambda nonce: struct.pack(">HH16s", 0xC4EC, 7, nonce))
    with caplog.at_level(logging.INFO, "checkmate"), sending(node):
        wait_until(lambda: "does not take this rank's gradients" in caplog.text)
    assert (
        "the shadow node has version 7 of streams of gradients, and this side 1: install one" in caplog.text
    )


def check_prefix_of_version(version: int) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        raise copies.PartsRefused(f"the rank has version {version}")

    return check


def test_a_rank_that_runs_twice_is_told(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    with sending(node) as stream:
        wait_until(lambda: node.inlet.connected)
        with caplog.at_level(logging.WARNING, "checkmate"), sending(node):
            wait_until(lambda: "another process may be the same rank, which must run once" in caplog.text)
        sent = send(stream, 0)
        wait_until(lambda: node.inlet.whole == 0)
        assert node.part(0) == sent
    assert node.broken == [] or "rank closed" in node.broken[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"\1" + bytes(8) + b"\xff\xff" + bytes(16) + b"x" * 70000,  # a long reason
        os.urandom(60),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 60,
        b"",
    ],
    ids=["long", "noise", "http", "nothing"],
)
def test_what_pretends_to_be_a_node_gets_no_gradients(
    node: Node, answer: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    heard: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(0.2)
                    heard.append(sock.recv(4096))
                    sock.sendall(copies.pack_challenge(bytes(16)) if answer[:1] == b"\1" else b"")
                    sock.sendall(answer)
                    while data := sock.recv(4096):
                        heard.append(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,), daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with caplog.at_level(logging.WARNING, "checkmate"), sending(node, address) as stream:
            send(stream, 0)
            wait_until(lambda: "does not take this rank's gradients" in caplog.text)
        server.shutdown(socket.SHUT_RDWR)
    assert all(len(data) <= copies.GREETING_BYTES for data in heard)
    assert "Traceback" not in caplog.text


def test_the_budget_of_socket_buffers_is_bounded() -> None:
    assert buffer_of(1) == MOST_BUFFER
    assert buffer_of(1 << 16) == LEAST_BUFFER
    for streams in (1, 16, 256, 1024, 4096):
        assert streams * buffer_of(streams) <= BUDGET_BYTES


def test_a_streams_socket_has_its_part_of_the_budget(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_listener, "BUDGET_BYTES", 1 << 18)
    with greeted(node):
        wait_until(lambda: node.inlet.connected)
        assert node.inlet.socket is not None
        assert node.inlet.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 1 << 18


def test_a_bug_in_a_greeting_does_not_end_the_listener(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = [RuntimeError("a bug")]
    unpack = copies.PartGreeting.unpack

    def unpack_or_fail(data: bytes) -> copies.PartGreeting:
        if bugs:
            raise bugs.pop()
        return unpack(data)

    monkeypatch.setattr(copies.PartGreeting, "unpack", unpack_or_fail)
    check_service(node)
    assert bugs == []
    assert "taking a rank's connection" in caplog.text


def test_a_broken_stream_takes_no_connection_before_its_reader_has_dropped_the_old_one(node: Node) -> None:
    """Else the reader would close the new one."""
    with sending(node):
        wait_until(lambda: node.inlet.connected)
        node.inlet.broken = "the connection broke"  # as in a turn of the reader, which drops it then
        _, why = node.listener._find(node.greeting)
        assert "the stream's earlier connection has not ended" in why
