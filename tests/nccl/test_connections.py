"""The plugin's connections, as NCCL uses them: sizes, order, back pressure, errors and strangers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclLibrary, NcclPlace, meeting_key
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl.calls import RELEASES, REMOTE_ERROR, Caller
from tests.support.nccl.sender import LOOPBACK, KeepingCaller, buffer, joined, until
from tests.support.waiting import wait_until

DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Pair:
    """Two ranks, each with the plugin loaded from a file of its own, and a connection from 0 to 1."""

    def __init__(
        self, folder: Path, release: str, keys: tuple[bytes, bytes] = (bytes(32), bytes(32))
    ) -> None:
        self.callers, self.libraries = [], []
        for rank in range(2):
            path = folder / f"plugin{rank}.so"
            shutil.copy(shared_object(), path)
            library = NcclLibrary(path)
            library.begin(
                NcclPlace(rank, 2, LOOPBACK, "lo", key=keys[rank]),
                channels=2,
                slicing=NcclSlicing(),
                incarnation=3,
            )
            caller = KeepingCaller(path, RELEASES[release])
            with library.expected():
                assert caller.init(77, 2, 2, rank) == 0
            self.callers.append(caller)
            self.libraries.append(library)
        self.sender, self.receiver = self.callers
        self.handle, self.listening = self.receiver.listen()
        self.send_comm, self.receive_comm = self.join(buffer(self.handle))

    def join(self, place: ctypes.Array[ctypes.c_char]) -> tuple[int, int]:
        """Return both ends of a new connection. `place` has the handle."""
        return joined(
            lambda: self.sender.connect(place),
            lambda: self.receiver.accept(self.listening),
        )

    def finish(self, caller: Caller, request: int) -> int:
        def size_when_finished() -> int | None:
            result, size = caller.test(request)
            assert result == 0
            return size

        return until(size_when_finished)

    def close(self) -> None:
        self.sender.close_send(self.send_comm)
        self.receiver.close_receive(self.receive_comm)
        self.receiver.close_listen(self.listening)


class Peer:
    """A connection to the rank that accepts, by a program of our own."""

    def __init__(self, pair: Pair, source: str = "127.0.0.1") -> None:
        port = int.from_bytes(pair.handle[2:4], "big")
        self.sock = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
        self.sock.settimeout(5)
        self._pair = pair
        self._nonce = os.urandom(16)
        self.key = xor(meeting_key(bytes(32)), pair.handle[16:32])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def greet(self) -> None:
        self.sock.sendall(self._nonce)

    def answer(self) -> bytes:
        """Return the other side's nonce. It has proved itself."""
        until(lambda: self._pair.receiver.accept(self._pair.listening) or 1)
        answer = self.sock.recv(32, socket.MSG_WAITALL)
        assert answer[16:] == self.mac(b"\1", answer[:16])
        return answer[:16]

    def prove(self) -> int:
        """Return the other side's end, once both have proved themselves."""
        self.greet()
        self.sock.sendall(self.mac(b"\0", self.answer()))
        return until(lambda: self._pair.receiver.accept(self._pair.listening))

    def mac(self, side: bytes, nonce: bytes) -> bytes:
        return mac(self._pair.receiver.library, self.key, side + self._nonce + nonce)

    def is_closed(self) -> bool:
        """Return whether the other side has closed it, after it was called once more."""
        assert self._pair.receiver.accept(self._pair.listening) is None
        try:
            return not self.sock.recv(1)
        except ConnectionResetError:
            return True


def xor(first: bytes, second: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(first, second, strict=True))


def mac(library: ctypes.CDLL, key: bytes, message: bytes) -> bytes:
    digest = ctypes.create_string_buffer(16)
    library.checkmate_nccl_mac(key, message, ctypes.c_size_t(len(message)), digest)
    return digest.raw


@pytest.fixture(params=RELEASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    connected_pair = Pair(tmp_path, request.param)
    yield connected_pair
    connected_pair.close()


@pytest.fixture
def newest(tmp_path: Path) -> Iterator[Pair]:
    connected_pair = Pair(tmp_path, "2.30")
    yield connected_pair
    connected_pair.close()


def test_messages_arrive_in_order_with_their_true_sizes(pair: Pair) -> None:
    sizes = [0, 1, 1000, 0, 1 << 20]
    messages = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    rooms = [buffer(2 << 20) for _ in messages]
    receives = [pair.receiver.irecv(pair.receive_comm, room, 2 << 20)[1] for room in rooms]
    buffers = [buffer(message) for message in messages]
    sends = [
        pair.sender.isend(pair.send_comm, data, len(message), None)[1]
        for data, message in zip(buffers, messages, strict=True)
    ]
    for request, receive, room, message in zip(sends, receives, rooms, messages, strict=True):
        assert request is not None
        assert receive is not None
        assert pair.finish(pair.sender, request) == len(message)
        assert pair.finish(pair.receiver, receive) == len(message)
        assert room.raw[: len(message)] == message


def socket_to(port: int) -> socket.socket:
    """Return a duplicate of this process's socket that is connected to a port of this machine."""
    for file in Path("/proc/self/fd").iterdir():
        if not os.path.realpath(file).rpartition("/")[2].startswith("socket:"):
            continue
        with contextlib.suppress(OSError):  # not connected
            copy = socket.socket(fileno=os.dup(int(file.name)))
            if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                return copy
            copy.close()
    raise AssertionError(f"no socket is connected to port {port}")


def test_a_sender_does_not_pace(newest: Pair) -> None:
    """The machine's default may be BBR, with which tags cost half as much processor time again."""
    with socket_to(int.from_bytes(newest.handle[2:4], "big")) as sender:
        algorithm = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    assert algorithm in ("cubic", "reno"), f"the default is {DEFAULT.read_text()}"


def test_too_many_sends_are_refused_until_some_are_done(newest: Pair) -> None:
    data = buffer(8 << 20)
    requests = []
    while True:
        result, request = newest.sender.isend(newest.send_comm, data, len(data), None)
        assert result == 0
        if request is None:
            break
        requests.append(request)
    assert len(requests) == 32
    room = buffer(8 << 20)
    for request in requests:
        receive = newest.receiver.irecv(newest.receive_comm, room, len(room))[1]
        assert receive is not None
        newest.finish(newest.sender, request)
        newest.finish(newest.receiver, receive)
    assert newest.sender.isend(newest.send_comm, data, 1, None)[1] is not None


def test_a_message_that_exceeds_its_room_breaks_the_connection(newest: Pair) -> None:
    room, data = buffer(10), buffer(b"x" * 11)
    receive = newest.receiver.irecv(newest.receive_comm, room, 10)[1]
    assert receive is not None
    newest.sender.isend(newest.send_comm, data, 11, None)
    until(lambda: newest.receiver.test(receive)[0] or None)
    assert newest.receiver.test(receive) == (REMOTE_ERROR, None)
    assert newest.receiver.irecv(newest.receive_comm, room, 10) == (REMOTE_ERROR, None)


@pytest.mark.parametrize("count", [0, 8, 1 << 63])
def test_a_frame_with_a_wrong_number_of_messages_breaks_the_connection(newest: Pair, count: int) -> None:
    with Peer(newest) as peer:
        receiver = peer.prove()
        peer.sock.sendall(struct.pack(">8Q", count, *[1] * 7) + b"x" * 7)
        room = buffer(10)
        receive = newest.receiver.irecv(receiver, room, 10)[1]
        assert receive is not None
        until(lambda: newest.receiver.test(receive)[0] or None)
        until(lambda: len(newest.libraries[1].broken) or None)
        assert newest.libraries[1].broken.endswith("Protocol error")
        newest.receiver.close_receive(receiver)


def test_a_peer_that_closes_is_an_error_of_the_next_calls(newest: Pair) -> None:
    room = buffer(10)
    receive = newest.receiver.irecv(newest.receive_comm, room, 10)[1]
    assert receive is not None
    newest.sender.close_send(newest.send_comm)
    until(lambda: newest.receiver.test(receive)[0] or None)
    assert newest.receiver.irecv(newest.receive_comm, room, 10)[0] == REMOTE_ERROR
    newest.receiver.close_receive(newest.receive_comm)
    newest.send_comm, newest.receive_comm = newest.join(buffer(newest.handle))


def test_a_blocked_send_ends_when_its_connection_is_closed(newest: Pair) -> None:
    data = buffer(64 << 20)
    assert newest.sender.isend(newest.send_comm, data, len(data), None)[1] is not None
    time.sleep(0.1)
    start = time.monotonic()
    newest.sender.close_send(newest.send_comm)
    assert time.monotonic() - start < 2
    newest.receiver.close_receive(newest.receive_comm)
    newest.send_comm, newest.receive_comm = newest.join(buffer(newest.handle))


def test_strangers_neither_connect_nor_delay_others(newest: Pair) -> None:
    port = int.from_bytes(newest.handle[2:4], "big")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    strangers[0].sendall(b"x" * 16)
    sender, receiver = newest.join(buffer(newest.handle))
    room, data = buffer(5), buffer(b"hello")
    receive = newest.receiver.irecv(receiver, room, 5)[1]
    request = newest.sender.isend(sender, data, 5, None)[1]
    assert receive is not None
    assert request is not None
    assert newest.finish(newest.receiver, receive) == 5
    assert room.raw == b"hello"
    for stranger in strangers:
        stranger.close()
    newest.sender.close_send(sender)
    newest.receiver.close_receive(receiver)


def test_the_mac_is_siphash(newest: Pair) -> None:
    """Vectors of the reference implementation, as OpenSSL computes them: key and message count from 0."""
    key, library = bytes(range(16)), newest.sender.library
    assert mac(library, key, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert mac(library, key, b"\0").hex() == "da87c1d86b99af44347659119b22fc45"
    assert mac(library, key, bytes(range(15))).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"


def test_newcomers_are_heard_before_they_make_room_for_others(newest: Pair) -> None:
    """Strangers that queued behind a real peer had it closed, although what it had sent was there."""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(Peer(newest))
        peer.greet()
        nonce = peer.answer()
        peer.sock.sendall(peer.mac(b"\0", nonce))
        for _ in range(60):
            stack.enter_context(Peer(newest))
        newest.receiver.close_receive(until(lambda: newest.receiver.accept(newest.listening)))


def test_the_strangers_of_one_address_take_no_place_of_another(newest: Pair) -> None:
    newest.libraries[1].begin(
        NcclPlace(1, 2, LOOPBACK, "lo", peers=[IPv4Address("127.0.0.2")]),
        channels=2,
        slicing=NcclSlicing(),
        incarnation=4,
    )
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(Peer(newest, "127.0.0.2"))
        assert newest.receiver.accept(newest.listening) is None
        for _ in range(3):
            for _ in range(60):
                stack.enter_context(Peer(newest))
            for _ in range(5):
                assert newest.receiver.accept(newest.listening) is None
        newest.receiver.close_receive(peer.prove())


def test_nobody_from_elsewhere_is_heard(newest: Pair) -> None:
    with Peer(newest, "127.0.0.9") as stranger:
        assert stranger.is_closed()
    with Peer(newest) as peer:
        newest.receiver.close_receive(peer.prove())


def test_the_key_of_another_job_is_no_proof(newest: Pair) -> None:
    """Nor are the handle's bytes, which NCCL carries in clear, nor what the other side has sent."""
    for key in (newest.handle[16:32], bytes(16)):
        with Peer(newest) as peer:
            peer.greet()
            nonce = peer.answer()
            peer.key = key
            peer.sock.sendall(peer.mac(b"\0", nonce))
            assert peer.is_closed()
    with Peer(newest) as peer:
        peer.greet()
        peer.sock.sendall(peer.mac(b"\1", peer.answer()))
        assert peer.is_closed()


def test_a_rank_with_another_key_does_not_connect(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="2"):  # ncclSystemError
        Pair(tmp_path, "2.30", keys=(bytes(32), b"x" * 32))


def test_a_process_without_a_job_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "plugin.so"
    shutil.copy(shared_object(), path)
    caller = Caller(path, RELEASES["2.30"])
    assert caller.init(5, 2, 2, 0) != 0
    assert caller.mask == 0


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/task"))
    Pair(tmp_path, "2.30").close()
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= before, "the plugin's threads to end")
