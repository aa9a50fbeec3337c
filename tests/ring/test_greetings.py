"""Strangers at a ring's ports: they neither delay a start of training nor get into the ring."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from checkmate.keys.macs import NONCE_BYTES, ConnectionProof, ConnectionSide
from checkmate.ring import greetings
from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from testbed.ports import free_port
from tests.support.rings import loopback, on_all_ranks

KEY = bytes(range(32))
PEER_IP = "127.0.0.2"  # strangers may have the previous rank's address


@contextlib.contextmanager
def strangers(
    port: int, count: int, behave: Callable[[socket.socket, threading.Event], None]
) -> Iterator[Callable[[], int]]:
    """Keep `count` connections to rank 0 open while the block runs; yield a count of those made so far."""
    stop, counts = threading.Event(), [0]

    def connect_repeatedly() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.socket() as sock:
                sock.bind((PEER_IP, 0))
                sock.settimeout(5)
                sock.connect(("127.0.0.1", port))
                counts[0] += 1
                behave(sock, stop)
            stop.wait(0.05)

    threads = [threading.Thread(target=connect_repeatedly) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: counts[0]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def silent(sock: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.05) and sock.recv(1):
        pass


def dribbling(sock: socket.socket, stop: threading.Event) -> None:
    for byte in RingPlace(1, loopback(2), 1).greeting(1, 0).pack():
        sock.sendall(bytes([byte]))
        if stop.wait(0.3):
            return


def brief(sock: socket.socket, stop: threading.Event) -> None:
    """Close at once."""


def replaying(sock: socket.socket, stop: threading.Event) -> None:
    """Send a right greeting, but no proof."""
    sock.sendall(RingPlace(1, loopback(2), 1, key=KEY).greeting(1, 0).pack() + bytes(NONCE_BYTES))
    silent(sock, stop)


@pytest.mark.parametrize(
    ("behave", "count"), [(silent, 1), (silent, 200), (dribbling, 100), (brief, 50), (replaying, 200)]
)
def test_strangers_do_not_delay_a_start(behave: Callable[..., None], count: int) -> None:
    port, listening = free_port(), threading.Event()

    def work(rank: int) -> float:
        if rank == 1:
            listening.wait()
        start = time.monotonic()
        place = RingPlace(rank, loopback(2), 1, port=port, key=KEY)
        with connect_ring(place, timeout=20) as ring:
            took = time.monotonic() - start
            ring.barrier()
        return took

    with strangers(port, count, behave) as count_made:

        def when_there() -> None:
            deadline = time.monotonic() + 10
            while count_made() < count and time.monotonic() < deadline:
                time.sleep(0.02)
            listening.set()

        watch = threading.Thread(target=when_there)
        watch.start()
        took = on_all_ranks(2, work)[1]
        watch.join()
        assert count_made() >= count
    assert took < 2


def refusals(place: RingPlace, peer_place: RingPlace) -> list[str]:
    def work(rank: int) -> str:
        with pytest.raises(RingError) as error, connect_ring(peer_place if rank else place, timeout=1):
            pass
        return str(error.value)

    return on_all_ranks(2, work)


def test_a_rank_with_another_key_is_refused_on_both_sides() -> None:
    own_place = RingPlace(0, loopback(2), 1, port=free_port(), key=KEY)
    for words in refusals(own_place, replace(own_place, rank=1, key=bytes(32))):
        assert "it has another ring.key: copy the folder of role trainer" in words


def answer(
    greeting: bytes, port: int, after: Callable[[ConnectionProof, bytes], bytes] | None = None
) -> tuple[bytes, str]:
    """Talk to rank 0 as rank 1 would: return what it answers, and its error."""
    listener = socket.create_server((PEER_IP, port))
    place = RingPlace(0, loopback(2), 1, port=port, key=KEY)
    answered_bytes = b""

    def work(rank: int) -> str:
        nonlocal answered_bytes
        if rank == 0:
            with pytest.raises(RingError) as error, connect_ring(place, timeout=1):
                pass
            return str(error.value)
        with listener, socket.socket() as sock:
            sock.bind((PEER_IP, 0))
            while sock.connect_ex(("127.0.0.1", port)):
                time.sleep(0.01)
            sock.settimeout(5)
            sock.sendall(greeting)
            with contextlib.suppress(OSError):
                while data := sock.recv(100):
                    answered_bytes += data
                    if after is not None and len(answered_bytes) == greetings.ANSWER_BYTES:
                        nonce = answered_bytes[greetings.HEADER_BYTES :][:NONCE_BYTES]
                        proof = ConnectionProof(
                            KEY, greeting[: greetings.GREETING_BYTES], greeting[-NONCE_BYTES:], nonce
                        )
                        sock.sendall(after(proof, answered_bytes))
        return ""

    return answered_bytes, on_all_ranks(2, work)[0] or answered_bytes.decode()


def opening() -> bytes:
    return RingPlace(1, loopback(2), 1, key=KEY).greeting(1, 0).pack() + bytes(NONCE_BYTES)


def test_the_accepting_ranks_own_proof_is_not_accepted_back() -> None:
    _, words = answer(opening(), free_port(), lambda _, reply_bytes: reply_bytes[-16:])
    assert "has another ring.key" in words


def test_a_proof_of_another_greeting_is_not_accepted() -> None:
    def proof_of_another(proof: ConnectionProof, _: bytes) -> bytes:
        return replace(proof, greeting=bytes(len(proof.greeting))).mac(ConnectionSide.CONNECTS)

    assert "has another ring.key" in answer(opening(), free_port(), proof_of_another)[1]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (2, "127.0.0.2 has an older version of Checkmate (of the ring: 2, here 3); all ranks need the same"),
        (4, "127.0.0.2 has a newer version of Checkmate (of the ring: 4, here 3); all ranks need the same"),
    ],
)
def test_a_rank_of_another_version_is_named(version: int, words: str) -> None:
    """Version 2 began with 26 bytes, and awaited nothing."""
    old = struct.pack("!HHHHBB16s", 0xC4EC, version, 2, 1, 0, 0, bytes(16))
    assert len(old) == 26
    assert words in answer(old, free_port())[1]


def test_a_rank_that_answers_with_another_version_is_named() -> None:
    port = free_port()

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(struct.pack("!HH", 0xC4EC, 4))
                connection.recv(1)

    listener = socket.create_server((PEER_IP, port))
    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(RingError, match="can't join rank 1 on .*: it has a newer version of Checkmate"):
        connect_ring(RingPlace(0, loopback(2), 1, port=port), timeout=0)
    thread.join()


def test_an_answer_that_comes_byte_by_byte_has_one_deadline() -> None:
    port, stop = free_port(), threading.Event()

    def serve() -> None:
        connections = []
        listener.settimeout(0.5)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connections.append(listener.accept()[0])
                connections[-1].sendall(greetings.header())
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
        for connection in connections:
            connection.close()

    with socket.create_server((PEER_IP, port)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        with pytest.raises(RingError, match="can't join rank 1"):
            connect_ring(RingPlace(0, loopback(2), 1, port=port), timeout=1)
        assert time.monotonic() - began < 5  # 65 bytes more, 0.5 s each
        stop.set()
        thread.join()


def test_connections_from_elsewhere_are_closed_at_once() -> None:
    port, seconds = free_port(), [9.0]

    def work(rank: int) -> Ring | None:
        if rank == 2:
            with socket.socket() as sock:
                sock.bind(("127.0.0.9", 0))
                while sock.connect_ex(("127.0.0.1", port)):
                    time.sleep(0.01)
                began = time.monotonic()
                assert sock.recv(1) == b""
                seconds[0] = time.monotonic() - began
            return None
        if rank == 1:
            time.sleep(0.5)
        return connect_ring(RingPlace(rank, loopback(2), 1, port=port), timeout=10)

    for ring in on_all_ranks(3, work):
        if ring is not None:
            ring.close()
    assert seconds[0] < 1
