"""Streams of parts in TLS, and what a killed rank's kernel still has."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkmate.job import host_copies
from checkmate.job.schema import Job, Sending, ShadowNode
from checkmate.keys.access import INSECURE, access
from checkmate.keys.callers import GRADIENT_STREAM
from checkmate.keys.roles import Role, Secret
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.admission import CallerGate
from checkmate.shadow.receive import part_listener
from checkmate.shadow.receive.hold_plans import StreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.part_listener import PartListener
from checkmate.shadow.receive.part_streams import PartInlet
from checkmate.state import bytes_of
from checkmate.training.gradients import part_stream
from checkmate.training.gradients.part_route import Channel, Route
from checkmate.training.gradients.part_stream import PartStream
from checkmate.wire import copies, tcp
from checkmate.wire.copies import PartGreeting
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import Piece, StreamLayout
from tests.support.keys import secured
from tests.support.waiting import wait_until

START = b"s" * 16
PLAN = StreamPlan(0, 0, 0, 0)
NBYTES = 1_500_000


def job_of(folder: Path, **changes: object) -> Job:
    nodes = [{"id": 0, "mgmt": "127.0.0.1:1"}]
    job, faults = host_copies.read(
        {"job": "mine", "copies": "host", "ranks": 1, "shadow_nodes": nodes, **changes}
    )
    assert job is not None, faults
    return secured(job, folder) if not folder.exists() else replace(job, keys=folder)


class Receiver:
    """A node with one stream of one rank, whose part is all of a model of one parameter."""

    def __init__(self, job: Job) -> None:
        layout = make_layout([Parameter("p", (NBYTES // 4,), "float32")], 1, NBYTES, PartSlicing())
        self.stream = StreamLayout((Piece(0, 0, range(NBYTES // 4)),), (4,), NBYTES)
        self.sets = BucketSets(layout, 0, -1)
        self.broken: list[str] = []
        server = socket.create_server(("127.0.0.1", 0))
        self.port = server.getsockname()[1]
        allowed = access(job, Role.SHADOW)
        assert allowed.keys is not None
        gate = CallerGate(job, allowed.keys, GRADIENT_STREAM) if job.encrypt else None
        key = allowed.secret(Secret.GRADIENTS)
        self.listener = PartListener(job, server, key, gate, lambda: None, self._note)
        self.inlet = PartInlet(PLAN, self.stream, self.sets, first=0, joined=0)
        self.listener.connect(self.inlet, pb.BeginRequest(start=START))

    def _note(self, inlet: Inlet) -> None:
        self.broken.append(inlet.broken or "")

    def release(self, iteration: int) -> None:
        self.sets.release(iteration)
        for reader in self.listener.readers:
            reader.wake()

    def close(self) -> None:
        self.inlet.close()
        self.listener.stop()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(INSECURE, raising=False)
    return tmp_path / "keys"


@contextlib.contextmanager
def received(job: Job) -> Iterator[Receiver]:
    receiver = Receiver(job)
    try:
        yield receiver
    finally:
        receiver.close()


def stream_of(job: Job, port: int, route: Route | None = None, nbytes: int = NBYTES) -> PartStream:
    allowed = access(job, Role.TRAINER)
    node = ShadowNode(id=0, mgmt="127.0.0.1:1", gradients=f"127.0.0.1:{port}", nics=())
    greeting = PartGreeting(0, 0, 0, 7, nbytes, copies.job_digest("mine"), START, bytes(16))
    route = Route.of(job, allowed) if route is None else route
    return PartStream(node, greeting, allowed.secret(Secret.GRADIENTS), route=route)


def send(stream: PartStream, iteration: int) -> bytes:
    room = stream.room()
    assert room is not None
    generator = torch.Generator().manual_seed(iteration)
    room.copy_(torch.randint(0, 256, (stream.nbytes,), dtype=torch.uint8, generator=generator))
    sent = bytes(bytes_of(room))
    stream.put(iteration, room)
    return sent


def test_encrypted_iterations_arrive_and_are_acknowledged(keys: Path) -> None:
    job = job_of(keys, encrypt=True)
    with received(job) as node:
        stream = stream_of(job, node.port)
        stream.start()
        for iteration in range(5):
            sent = send(stream, iteration)
            wait_until(lambda now=iteration: node.inlet.whole == now)  # type: ignore[misc]
            assert bytes(bytes_of(node.sets.gradients(iteration)[0])) == sent
            wait_until(lambda now=iteration: stream._acknowledged == now)  # type: ignore[misc]
            node.release(iteration)
        stream.close()
    assert not [line for line in node.broken if "rank closed" not in line]


@pytest.mark.parametrize("trainers_encrypt", [True, False])
def test_one_side_that_encrypts_alone_is_told_what_to_do(
    keys: Path, trainers_encrypt: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_stream, "PATIENCE_SECONDS", 0.1)
    with received(job_of(keys, encrypt=not trainers_encrypt)) as node, caplog.at_level(logging.INFO):
        stream = stream_of(job_of(keys, encrypt=trainers_encrypt), node.port)
        stream.start()
        wait_until(lambda: "does not take this rank's gradients" in caplog.text)
        stream.close()
    (line,) = [line for line in caplog.messages if "does not take this rank's gradients" in line]
    assert "nodes must read the same job file" in line
    assert "encrypt" in line
    assert not node.inlet.connected


def test_a_certificate_of_another_role_is_refused(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(keys, encrypt=True)
    with received(job) as node, caplog.at_level(logging.INFO, "checkmate"):
        stream = stream_of(job, node.port, Route.of(job, access(job, Role.READER)))
        stream.start()
        wait_until(lambda: "role reader may not call gradients" in caplog.text)
        stream.close()
    assert not node.inlet.connected


_SENDER = """
import sys, time
from pathlib import Path
import tests.shadow.test_encrypted_streams as module
from checkmate.wire import tcp

keys, port, encrypt = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
stream = module.roomy_stream(module.job_of(keys, encrypt=encrypt), port)
stream.start()
module.send(stream, 0)
while not stream._sent:
    time.sleep(0.001)
print(module.last_channel[-1].sock and tcp.unacknowledged(module.last_channel[-1].sock), flush=True)
time.sleep(60)
"""
last_channel: list[Channel] = []


class RoomyRoute(Route):
    """A way whose sockets take a whole part."""

    def prepare(self, sock: socket.socket) -> None:
        """Set up a socket before it connects."""
        super().prepare(sock)
        sock.setsockopt(socket.SOL_SOCKET, tcp.SO_SNDBUFFORCE, 2 * NBYTES)

    def channel(self, sock: socket.socket, host: str) -> Channel:
        """Return the connection, and remember it."""
        last_channel.append(super().channel(sock, host))
        return last_channel[-1]


def roomy_stream(job: Job, port: int) -> PartStream:
    route = Route.of(job, access(job, Role.TRAINER))
    return stream_of(job, port, RoomyRoute(route.sending, route.tls))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a larger socket buffer than any user may have")
@pytest.mark.parametrize("encrypt", [False, True])
def test_what_a_killed_ranks_kernel_has_arrives(
    keys: Path, encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the node, as of a session ticket, would have that kernel drop it."""
    monkeypatch.setattr(part_listener, "MOST_BUFFER", 64 << 10)
    job = job_of(keys, encrypt=encrypt)
    with received(job) as node:
        node.sets.released = -3  # no set is free: the node does not read
        command = [sys.executable, "-c", _SENDER, str(keys), str(node.port), str(encrypt)]
        sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert sender.stdout is not None
            unacknowledged = int(sender.stdout.readline())
            assert unacknowledged > NBYTES // 2
        finally:
            sender.kill()
            sender.wait()
        assert node.inlet.whole == -1
        node.release(-1)
        wait_until(lambda: node.inlet.whole == 0)
        generator = torch.Generator().manual_seed(0)
        sent = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator)
        assert bytes(bytes_of(node.sets.gradients(0)[0])) == bytes(bytes_of(sent))


def test_a_paced_stream_keeps_to_its_share_of_the_limit(keys: Path) -> None:
    job = replace(job_of(keys), sending=Sending(source="127.0.0.0/8", limit="96M", dscp=8))
    with received(job) as node:
        route = Route.of(job, access(job, Role.TRAINER)).share(NBYTES, 2 * NBYTES)
        assert route.rate == 6_000_000
        stream = stream_of(job, node.port, route)
        stream.start()
        for iteration in range(2):
            send(stream, iteration)
        wait_until(lambda: node.inlet.whole == 1)
        (_, first, _), (_, _, last) = node.inlet.pulls
        assert last - first > 0.75 * 2 * NBYTES / 6e6
        stream.close()


def test_a_host_without_the_source_says_so(keys: Path) -> None:
    for source, words in (("203.0.113.0/24", "no address in 203.0.113.0/24"), ("nosuch0", "nosuch0")):
        with socket.socket() as sock, pytest.raises(OSError, match=words):
            Route(Sending(source=source)).prepare(sock)
    with socket.socket() as sock:
        Route(Sending(source="lo", dscp=46)).prepare(sock)
        assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 46 << 2
    with socket.socket(socket.AF_INET6) as sock:
        Route(Sending(dscp=46)).prepare(sock)
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 46 << 2
