"""Any bytes at a ring's port: refused with a reason, and the right rank is accepted afterwards."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from checkmate.keys.macs import MAC_BYTES, NONCE_BYTES, RingProof, RingSide
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
    with socket.create_server((HOST, 0)) as listener, Acceptor([listener], [GREETING], HOST, KEY) as acceptor:
        made = Port(acceptor, listener.getsockname())
        yield made
        with socket.create_connection(made.address, 5) as sock:
            sock.sendall(OPENING)
            answer = received(sock, greetings.ANSWER_BYTES)
            proof = RingProof(KEY, GREETING.pack(), NONCE, answer[greetings.HEADER_BYTES : -MAC_BYTES])
            sock.sendall(proof.mac(RingSide.CONNECTS))
            assert received(sock, 1) == greetings.ACCEPTANCE
        accepted = acceptor.wait(0, time.monotonic() + 5)
        assert isinstance(accepted, socket.socket)
        accepted.close()


def received(sock: socket.socket, count: int) -> bytes:
    """Return the next bytes, fewer if the connection ends."""
    found = b""
    while len(found) < count and (data := sock.recv(count - len(found))):
        found += data
    return found


@fuzz(100, blob=st.binary(max_size=90), data=st.data())
def test_any_bytes_are_refused(port: Port, blob: bytes, data: st.DataObject) -> None:
    sent = damaged(data, OPENING + bytes(MAC_BYTES)) if data.draw(st.booleans()) else blob
    with socket.create_connection(port.address, 5) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(sent)
        with contextlib.suppress(OSError):  # refused already
            sock.shutdown(socket.SHUT_WR)
        assert len(received(sock, 1000)) <= greetings.ANSWER_BYTES
    refused = port.acceptor.wait(0, time.monotonic())
    assert isinstance(refused, str)
    assert len(refused) < 300
