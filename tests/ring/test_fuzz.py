"""Any bytes at a ring's port: refused with a reason, and the right rank is accepted afterwards."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from checkmate.keys.macs import MAC_BYTES, NONCE_BYTES, ConnectionProof, ConnectionSide
from checkmate.ring import greetings
from checkmate.ring.accepting import Acceptor
from checkmate.ring.greetings import Greeting
from tests.support.fuzz import damaged, fuzz

HOST = "127.0.0.1"
KEY, NONCE = bytes(range(32)), bytes(range(NONCE_BYTES))
GREETING = Greeting(ranks=4, rank=1, channel=0, incarnation=7, fingerprint=bytes(16))
OPENING = GREETING.pack() + NONCE


class Port(NamedTuple):
    """An acceptor, and where it listens."""

    acceptor: Acceptor
    address: tuple[str, int]


@pytest.fixture
def port() -> Iterator[Port]:
    with (
        socket.create_server((HOST, 0)) as listener,
        Acceptor([listener], [GREETING], [HOST], KEY) as acceptor,
    ):
        open_port = Port(acceptor, listener.getsockname())
        yield open_port
        with socket.create_connection(open_port.address, 5) as sock:
            sock.sendall(OPENING)
            answer = read_up_to(sock, greetings.ANSWER_BYTES)
            proof = ConnectionProof(KEY, GREETING.pack(), NONCE, answer[greetings.HEADER_BYTES : -MAC_BYTES])
            sock.sendall(proof.mac(ConnectionSide.CONNECTS))
            assert read_up_to(sock, 1) == greetings.ACCEPTANCE
        connection = acceptor.wait(0, time.monotonic() + 5)
        assert isinstance(connection, socket.socket)
        connection.close()


def read_up_to(sock: socket.socket, count: int) -> bytes:
    """Return the next bytes, fewer if the connection ends."""
    content = b""
    while len(content) < count and (data := sock.recv(count - len(content))):
        content += data
    return content


@fuzz(100, blob=st.binary(max_size=90), data=st.data())
def test_any_bytes_are_refused(port: Port, blob: bytes, data: st.DataObject) -> None:
    payload = damaged(data, OPENING + bytes(MAC_BYTES)) if data.draw(st.booleans()) else blob
    with socket.create_connection(port.address, 5) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(payload)
        with contextlib.suppress(OSError):  # refused already
            sock.shutdown(socket.SHUT_WR)
        assert len(read_up_to(sock, 1000)) <= greetings.ANSWER_BYTES
    refusal = port.acceptor.wait(0, time.monotonic())
    assert isinstance(refusal, str)
    assert len(refusal) < 300
