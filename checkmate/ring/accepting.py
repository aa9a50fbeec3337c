"""Accepts the connections that a rank expects, on all of its ports at once, whoever else connects.

A thread reads all greetings concurrently. Each port listens to one rank's address, and a connection from it
has two seconds to prove that it has the ring's key.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from checkmate.base.wording import counted
from checkmate.keys.macs import MAC_BYTES, ConnectionProof, ConnectionSide, new_nonce
from checkmate.ring import greetings
from checkmate.ring.greetings import Greeting
from checkmate.wire import tcp

GREETING_SECONDS: Final = 2.0
"""Seconds that a connection may take for its greeting and its proof."""
MAX_STRANGERS: Final = 256
"""Connections whose greetings are read at one time; the oldest makes room for a new one."""
_LOOK_SECONDS: Final = 0.1
_VANISHED_SECONDS: Final = 120  # longer than a restart of the switch takes


@dataclass(eq=False)
class _Arrival:
    """A connection that has not proved anything yet."""

    sock: socket.socket
    channel: int
    ip: str
    until: float
    data: bytearray = field(default_factory=bytearray)
    proof: ConnectionProof | None = None
    """Set once its greeting is right and the answer is sent."""

    @property
    def lacks(self) -> int:
        """Bytes still to come in this step of the exchange."""
        whole = greetings.OPENING_BYTES + (0 if self.proof is None else MAC_BYTES)
        return whole - len(self.data)


class Acceptor(contextlib.AbstractContextManager["Acceptor"]):
    """Accepts one connection per listener, from one rank. It is a context manager."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        expected: Sequence[Greeting],
        peer_ips: Sequence[str],
        key: bytes,
    ) -> None:
        """Start. `expected` and `peer_ips`: the greeting and the address of each listener's rank."""
        self._listeners = listeners
        self._expected = expected
        self._peer_ips = peer_ips
        self._key = key
        self._arrivals: list[_Arrival] = []
        self._connections: dict[int, socket.socket] = {}
        self._strangers = [""] * len(listeners)
        self._connected = threading.Condition()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        for channel, listener in enumerate(listeners):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, channel)
        self._thread = threading.Thread(target=self._run, name="checkmate ring greetings", daemon=True)
        self._thread.start()

    def wait(self, channel: int, deadline: float) -> socket.socket | str:
        """Return a channel's connection, which is the caller's then, or why there is none in time."""
        with self._connected:
            self._connected.wait_for(
                lambda: channel in self._connections, timeout=max(deadline - time.monotonic(), 0)
            )
            return self._connections.pop(channel, None) or self._strangers[channel] or "it has not connected"

    def strangers(self, channel: int) -> str:
        """Return the last stranger that has connected on a channel, and why it was refused; or ""."""
        return self._strangers[channel]

    def close(self) -> None:
        """End the thread, and close all connections that `wait` has not returned."""
        self._closing.set()
        self._thread.join()
        for sock in [*(arrival.sock for arrival in self._arrivals), *self._connections.values()]:
            sock.close()
        self._selector.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        open_channels = set(range(len(self._listeners)))
        while open_channels and not self._closing.is_set():
            now = time.monotonic()
            for late in [arrival for arrival in self._arrivals if arrival.until <= now]:
                amount = f"only {counted(len(late.data), 'byte')}" if late.data else "nothing"
                self._drop(late, f"{late.ip} connected, but sent {amount} in {GREETING_SECONDS:g} s")
            soonest = min((arrival.until - now for arrival in self._arrivals), default=_LOOK_SECONDS)
            for event, _ in self._selector.select(min(soonest, _LOOK_SECONDS)):
                if isinstance(event.data, int):
                    self._accept(event.data)
                elif event.data in self._arrivals and self._step(event.data):
                    open_channels.remove(event.data.channel)
                    self._finish(event.data)

    def _accept(self, channel: int) -> None:
        """Take a new connection, or close it if it comes from elsewhere."""
        try:
            sock, address = self._listeners[channel].accept()
        except BlockingIOError:
            return  # it was gone already
        except OSError as error:  # no file descriptor is left, for example
            self._strangers[channel] = f"a connection can't be accepted: {error.strerror}"
            if self._arrivals:
                self._drop(self._arrivals[0], self._strangers[channel])
            self._closing.wait(_LOOK_SECONDS)
            return
        peer_ip = self._peer_ips[channel]
        if address[0] != peer_ip:
            sock.close()
            self._strangers[channel] = f"{address[0]} connected, but it has {peer_ip}"
            return
        if len(self._arrivals) >= MAX_STRANGERS:
            oldest = self._arrivals[0]
            self._drop(oldest, f"{MAX_STRANGERS} connections from {oldest.ip} sent nothing")
        sock.setblocking(False)
        arrival = _Arrival(sock, channel, peer_ip, time.monotonic() + GREETING_SECONDS)
        self._arrivals.append(arrival)
        self._selector.register(sock, selectors.EVENT_READ, arrival)

    def _step(self, arrival: _Arrival) -> bool:
        """Read what has come. Return whether the connection has proved itself; drop it if it never will."""
        try:
            data = arrival.sock.recv(arrival.lacks)
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(arrival, f"{arrival.ip} connected, but sent no greeting ({error.strerror})")
            return False
        arrival.data += data
        try:
            fault = self._fault(arrival) if data else _why_closed(arrival)
        except OSError as error:
            fault = f"connected, but took no answer ({error.strerror})"
        if fault:
            self._drop(arrival, f"{arrival.ip} {fault}")
            return False
        return arrival.proof is not None and not arrival.lacks

    def _fault(self, arrival: _Arrival) -> str | None:
        """Answer a whole greeting, or check a whole proof. Return what is wrong so far."""
        versioned = arrival.proof is None and len(arrival.data) >= greetings.HEADER_BYTES
        if versioned and (fault := greetings.version_fault(arrival.data)):
            arrival.sock.send(greetings.header())
            return fault
        if arrival.lacks:
            return None
        if arrival.proof is None:
            opening = bytes(arrival.data)
            greeting, nonce = opening[: greetings.GREETING_BYTES], opening[greetings.GREETING_BYTES :]
            if fault := self._expected[arrival.channel].fault(greeting):
                return fault
            arrival.proof = ConnectionProof(self._key, greeting, nonce, new_nonce())
            mac = arrival.proof.mac(ConnectionSide.ACCEPTS)
            arrival.sock.send(greetings.header() + arrival.proof.accepts_nonce + mac)
            return None
        if not arrival.proof.is_authentic(ConnectionSide.CONNECTS, bytes(arrival.data[-MAC_BYTES:])):
            return greetings.OTHER_KEY
        arrival.sock.send(greetings.ACCEPTANCE)
        return None

    def _finish(self, arrival: _Arrival) -> None:
        """Hand a proved connection over, and stop listening on its channel."""
        self._selector.unregister(arrival.sock)
        self._arrivals.remove(arrival)
        self._selector.unregister(self._listeners[arrival.channel])
        arrival.sock.setblocking(True)
        tcp.notice_vanished(arrival.sock, _VANISHED_SECONDS)
        with self._connected:
            self._connections[arrival.channel] = arrival.sock
            self._connected.notify_all()
        for stranger in [waiting for waiting in self._arrivals if waiting.channel == arrival.channel]:
            self._drop(stranger, "")

    def _drop(self, arrival: _Arrival, why: str) -> None:
        self._strangers[arrival.channel] = why or self._strangers[arrival.channel]
        self._arrivals.remove(arrival)
        self._selector.unregister(arrival.sock)
        with contextlib.suppress(OSError):  # it may be broken already
            arrival.sock.shutdown(socket.SHUT_WR)
        arrival.sock.close()


def _why_closed(arrival: _Arrival) -> str:
    """Return why a connection may have ended: one that saw our proof may not have believed it."""
    if arrival.proof is None:
        return "connected, but ended the connection before its greeting"
    return f"ended the connection instead of a proof, because it {greetings.OTHER_KEY}"
