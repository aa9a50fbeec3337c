"""TCP connections between ranks: in a ring, each rank connects to the next one, once per channel.

A connection carries data in one direction. It begins with an untagged greeting that identifies the ring, and
with proofs that both sides have its key (`greetings`). So strangers, and ranks with another configuration or
from an earlier start of training, are rejected before gradients move.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from checkmate.keys.macs import NONCE_BYTES, ConnectionProof, ConnectionSide, new_nonce
from checkmate.ring import greetings
from checkmate.ring.accepting import Acceptor
from checkmate.ring.place import RingError, RingPlace, RingTimeout
from checkmate.tagger import TaggedSocket, Tagger
from checkmate.tagger.sockets import Chunk, send_now
from checkmate.wire import tcp
from checkmate.wire.ring_sockets import BUFFER_BYTES

_RETRY_SECONDS = 0.05
_FIRST_RETRY_SECONDS = 0.005
"""All ranks begin at once, so the next one will listen soon."""
_BACKLOG = 1024
_ANSWER_SECONDS = 5.0  # for the answer to a greeting; then the connection is made again
_TOKEN = b"\x01"


class PlainSocket:
    """Sends chunks without tags, with the interface of `TaggedSocket`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send_chunk(self, buffer: memoryview | bytes, shadow_id: int | None = None) -> None:
        """Send a whole chunk."""
        self.socket.sendall(buffer)

    def plan(self, chunks: Iterable[Chunk]) -> None:
        """Do nothing."""

    def begin_chunk(self, length: int, shadow_id: int | None = None) -> None:
        """Do nothing."""

    def write(self, piece: memoryview | bytes) -> None:
        """Send a chunk's next bytes."""
        self.socket.sendall(piece)

    def write_now(self, piece: memoryview | bytes) -> int:
        """Send as many of a chunk's next bytes as the kernel takes at once, and return their number."""
        return send_now(self.socket, piece)


Sender = TaggedSocket | PlainSocket


class Hop(NamedTuple):
    """A connection to or from another rank, which carries data one way."""

    peer: int
    """The rank at the other end."""
    port: int
    """The number of the port after the first one of the rank that accepts; ends tell it each other."""
    channel: int | None = None
    """The channel in tags; `None` if it carries none."""


class Connections:
    """A rank's connections: `senders` to other ranks, and `receivers` from them. It is a context manager."""

    def __init__(
        self,
        place: RingPlace,
        senders: Sequence[Sender],
        receivers: Sequence[socket.socket],
        tagger: Tagger | None = None,
    ) -> None:
        self.place = place
        self.tagger = tagger
        self.senders = senders
        self.receivers = receivers
        # A weak reference, because handlers can't be unregistered.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))

    def drain(self, timeout: float) -> None:
        """Wait until the other ranks have acknowledged all; raise `TimeoutError` after `timeout` seconds."""
        for sender in self.senders:
            tcp.drain(sender.socket, timeout)

    def retransmitted(self) -> int:
        """Return the number of segments sent again, on all connections."""
        return sum(tcp.retransmitted(sender.socket) for sender in self.senders)

    def abort(self) -> None:
        """Break all connections, to wake threads that are blocked on them."""
        for sock in self._sockets():
            with contextlib.suppress(OSError):  # it is broken already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        for sock in self._sockets():
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sockets(self) -> list[socket.socket]:
        return [*(sender.socket for sender in self.senders), *self.receivers]


def _close_in_child(connections: weakref.ref[Connections]) -> None:
    """Close the connections in a forked child, such as a DataLoader worker.

    Otherwise other ranks would wait for a dead parent whose connections its child keeps open.
    """
    if (here := connections()) is not None:
        here.close()


class Ring(Connections):
    """A rank's connections in a ring: to the next rank and from the one before, by channel."""

    def barrier(self) -> None:
        """Wait until all ranks have called it: an untagged token circulates twice on channel 0."""
        try:
            for _ in range(2):
                if self.place.rank == 0:
                    self.senders[0].send_chunk(_TOKEN)
                token = self.receivers[0].recv(1)
                if token != _TOKEN:
                    raise RingError(
                        f"{self.place.own_name}: the previous rank left, or is not at the barrier"
                    )
                if self.place.rank:
                    self.senders[0].send_chunk(_TOKEN)
        except OSError as error:
            raise RingError(f"{self.place.own_name}: barrier: {error}") from error


def connect_ring(place: RingPlace, tagger: Tagger | None = None, timeout: float = 30) -> Ring:
    """Connect to the next rank and wait for the previous one, on every channel.

    Args:
        place: This rank's place.
        tagger: Tags this rank's segments; `None` for ranks that do not tag.
        timeout: Seconds within which all ranks must start, in any order.

    Raises:
        RingError: A rank is missing or has another configuration.
    """
    if place.ranks < 2:
        raise RingError(f"a ring needs at least 2 ranks, not {place.ranks}")
    following = (place.rank + 1) % place.ranks
    outgoing = [Hop(following, channel, channel) for channel in range(place.channels)]
    incoming = [Hop(place.previous, channel) for channel in range(place.channels)]
    return Ring(place, *connect(place, outgoing, incoming, tagger, timeout), tagger)


def connect(
    place: RingPlace, outgoing: Sequence[Hop], incoming: Sequence[Hop], tagger: Tagger | None, timeout: float
) -> tuple[list[Sender], list[socket.socket]]:
    """Connect to other ranks and wait for others, which begin at about the same time.

    Args:
        place: This rank's place.
        outgoing: The connections that this rank makes.
        incoming: Those that it accepts, each on its own port.
        tagger: Tags segments of outgoing connections that have a channel.
        timeout: Seconds within which all ranks must start, in any order.

    Raises:
        RingError: A rank is missing or has another configuration.
    """
    deadline = time.monotonic() + timeout
    expected = [place.greeting(hop.peer, hop.port) for hop in incoming]
    with contextlib.ExitStack() as starting, contextlib.ExitStack() as undo:
        listeners = [starting.enter_context(_listen(place, hop.port)) for hop in incoming]
        peer_ips = [place.ips[hop.peer] for hop in incoming]
        acceptor = starting.enter_context(Acceptor(listeners, expected, peer_ips, place.key))
        senders: list[Sender] = []
        for hop in outgoing:
            try:
                senders.append(_connect(place, hop, tagger, deadline))
            except RingError as error:
                strangers = "; ".join(filter(None, map(acceptor.strangers, range(len(incoming)))))
                raise type(error)(f"{error}{strangers and f'; meanwhile {strangers}'}") from error
            undo.callback(senders[-1].socket.close)
        receivers = []
        for number, hop in enumerate(incoming):
            connection = acceptor.wait(number, deadline)
            if isinstance(connection, str):
                subject = f"{place.own_name} timed out waiting for {place.name(hop.peer)}"
                raise RingTimeout(f"{subject} on channel {hop.port}: {connection}")
            receivers.append(connection)
            undo.callback(connection.close)
        undo.pop_all()
    return senders, receivers


def _listen(place: RingPlace, port: int) -> socket.socket:
    address = place.address(place.rank, port)
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _enlarge(listener, socket.SO_RCVBUF, tcp.SO_RCVBUFFORCE)
        _keep_to(place.device, listener)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RingError(
            f"{place.own_name} can't listen on {address[0]}:{address[1]}: {error.strerror}"
        ) from error
    return listener


def _connect(place: RingPlace, hop: Hop, tagger: Tagger | None, deadline: float) -> Sender:
    """Connect to another rank, and greet it; retry until it listens and answers."""
    peer = hop.peer
    address = place.address(peer, hop.port)
    pause = _FIRST_RETRY_SECONDS
    while True:
        sock = socket.socket()
        doing = "reach"
        try:
            tcp.tune_for_bulk(sock)
            _enlarge(sock, socket.SO_SNDBUF, tcp.SO_SNDBUFFORCE)
            _keep_to(place.device, sock)
            sock.bind((place.ips[place.rank], 0))
            sender: Sender = PlainSocket(sock)
            if tagger is not None and hop.channel is not None:
                sender = TaggedSocket(tagger, sock, hop.channel, place.incarnation, place.dscp_bit)
            sock.settimeout(max(deadline - time.monotonic(), _RETRY_SECONDS))
            sock.connect(address)
            doing = "join"
            _greet(place, hop.port, sender, deadline)
            sock.settimeout(None)
            return sender
        except OSError as error:
            sock.close()
            if time.monotonic() + _RETRY_SECONDS > deadline:
                where = f"{address[0]}:{address[1]}"
                raise RingTimeout(
                    f"{place.own_name} can't {doing} {place.name(peer)} on {where}: {error.strerror or error}"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS)
        except BaseException:
            sock.close()
            raise


def _greet(place: RingPlace, port: int, sender: Sender, deadline: float) -> None:
    """Greet another rank, and check and send proofs. Raise `ConnectionError` if it is not that rank."""
    sock, greeting, nonce = sender.socket, place.greeting(place.rank, port).pack(), new_nonce()
    now = time.monotonic()
    until = now + max(min(deadline - now, _ANSWER_SECONDS), _RETRY_SECONDS)
    sock.settimeout(until - now)
    receive = functools.partial(_receive_until, sock, until)
    sender.send_chunk(greeting + nonce)
    answer = bytearray(greetings.ANSWER_BYTES)
    try:
        receive_into(receive, memoryview(answer)[: greetings.HEADER_BYTES])
    except ConnectionResetError:
        raise ConnectionError(
            "it refused the greeting; its error names the difference, unless its version of Checkmate is old"
        ) from None
    except TimeoutError:
        raise TimeoutError("it has not answered the greeting") from None
    if fault := greetings.version_fault(answer):
        raise ConnectionError(f"it {fault}")
    rest = memoryview(answer)[greetings.HEADER_BYTES :]
    receive_into(receive, rest)
    proof = ConnectionProof(place.key, greeting, nonce, bytes(rest[:NONCE_BYTES]))
    if not proof.is_authentic(ConnectionSide.ACCEPTS, bytes(rest[NONCE_BYTES:])):
        raise ConnectionError(
            "it has another ring.key: copy the folder of role trainer to all hosts of ranks"
        )
    sender.send_chunk(proof.mac(ConnectionSide.CONNECTS))
    verdict = bytearray(len(greetings.ACCEPTANCE))
    receive_into(receive, memoryview(verdict))


def _receive_until(sock: socket.socket, until: float, view: memoryview, nbytes: int, flags: int) -> int:
    """Receive as `recv_into` does, with one deadline for an answer that comes byte by byte."""
    sock.settimeout(max(until - time.monotonic(), 0.001))
    return sock.recv_into(view, nbytes, flags)


def receive_into(receive: Callable[[memoryview, int, int], int], view: memoryview) -> None:
    """Fill `view` from a socket's `recv_into`; raise `ConnectionResetError` if the connection ends before."""
    filled = 0
    while filled < len(view):
        count = receive(view[filled:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the connection ended")
        filled += count


def _keep_to(device: str | None, sock: socket.socket) -> None:
    """Have a socket use one interface only: the switch drops frames from another one with its address."""
    if device is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())


def _enlarge(sock: socket.socket, option: int, force: int) -> None:
    """Set a socket buffer to `BUFFER_BYTES`, or to the limit for processes without privileges."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
