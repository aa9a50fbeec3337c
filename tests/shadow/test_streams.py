"""The shadow node's streams: connecting to a stub, reading its data, and error messages."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.shadow.receive import connect
from checkmate.shadow.receive.connect import StreamError, connect_stream, tcp_memory_shortfall
from checkmate.wire import tcp
from checkmate.wire.tag import HELLO_LENGTH, Hello
from testbed.jobs import job_data
from tests.support.controlplane.hellos import ends_of, signed
from tests.support.labs.end_hosts import HostPair, inside, needs_root, veth_pair
from tests.support.shadow.fake_stub import FakeStub
from topologies.traffic.sink import Sink, SinkJob, SinkResult

pytestmark = needs_root  # SO_RCVBUFFORCE

HELLO = Hello(base=5, boundary=6, shadow_id=1, channel=2, incarnation=9, time=1_234_567)
KEY = bytes(range(32))
STUB = ("10.77.0.254", 4791)


@pytest.fixture(scope="module")
def pair() -> Iterator[HostPair]:
    with veth_pair(("tx off",)) as cable:
        cable.in_each("ip link set dev DEV mtu 9000")
        yield cable


def connected(pair: HostPair, mode: str, timeout: float = 5) -> tuple[FakeStub, Callable[[], socket.socket]]:
    """Start a stub on `b`; return the call that connects to it from `a`."""
    stub = FakeStub(pair.b, *STUB, mode=mode)

    def call() -> socket.socket:
        with inside(pair.a):
            return connect_stream(pair.a_ip, STUB, HELLO, KEY, device=pair.a, timeout=timeout)

    return stub, call


def test_a_stream_is_read_to_the_last_byte(pair: HostPair) -> None:
    """Data that is late, out of order, duplicate, or from before the start: TCP handles all of it."""
    stub, call = connected(pair, "accept")
    data = random.Random(1).randbytes(4_000_000)
    size = 8000
    try:
        with call() as sock:
            assert stub.hellos == [signed(HELLO, ends_of(sock), KEY)]
            assert "WScale" in stub.syn_options
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 128 << 20
            stub.send((1 << 32) - size, bytes(size))
            starts = list(range(0, len(data), size))
            for at in (0, *starts[4:], *starts[1:4], *starts[2:9]):
                stub.send(at, data[at : at + size])
            read_bytes = bytearray()
            sock.settimeout(10)
            while len(read_bytes) < len(data):
                read_bytes += sock.recv(1 << 20)
            assert read_bytes == data
            assert stub.window > 50 << 20
    finally:
        stub.stop()


def test_a_refused_hello_is_explained(pair: HostPair) -> None:
    stub, call = connected(pair, "refuse_hello")
    try:
        with pytest.raises(StreamError, match=r"boundary 6, channel 2, shadow id 1.*refused the hello"):
            call()
    finally:
        stub.stop()


def test_a_hello_without_an_answer_is_explained(pair: HostPair) -> None:
    stub, call = connected(pair, "mute_hello", timeout=0.5)
    try:
        with pytest.raises(StreamError, match=r"not acknowledge the hello within 0\.5 s"):
            call()
    finally:
        stub.stop()


def test_a_mute_stub_is_explained(pair: HostPair) -> None:
    stub, call = connected(pair, "mute", timeout=0.5)
    try:
        with pytest.raises(StreamError, match=r"no answer from 10\.77\.0\.1 to the stub 10\.77\.0\.254:4791"):
            call()
    finally:
        stub.stop()


def test_a_stub_that_resets_before_the_hello_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like a switch that restarts at that moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        really_open = connect._open

        def reset(sock: socket.socket, *arguments: Any) -> None:
            really_open(sock, *arguments)
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        monkeypatch.setattr(connect, "_open", reset)
        with pytest.raises(StreamError, match="boundary 6.*the controller refused the hello"):
            connect_stream("127.0.0.1", listener.getsockname(), HELLO, KEY)


def test_a_closed_port_an_unknown_address_and_an_unknown_device_are_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StreamError, match="refused from"):
        connect_stream("127.0.0.1", ("127.0.0.1", port), HELLO, KEY)
    with pytest.raises(StreamError, match=r"192\.0\.2\.1 is not an address of this machine"):
        connect_stream("192.0.2.1", ("127.0.0.1", port), HELLO, KEY)
    with pytest.raises(StreamError, match="device none0: No such device"):
        connect_stream("127.0.0.1", ("127.0.0.1", port), HELLO, KEY, device="none0")


def test_memory_for_all_streams_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = tmp_path / "tcp_mem"
    monkeypatch.setattr(connect, "_TCP_MEM", values)
    assert "was not checked" in (tcp_memory_shortfall(4) or "")
    pages = 2 * 4 * (64 << 20) // resource.getpagesize()
    values.write_text(f"1\t{pages}\t{pages}\n")
    assert tcp_memory_shortfall(4) is None
    assert "5 streams may hold 640 MB" in (tcp_memory_shortfall(5) or "")
    pressure = pages * 5 // 4
    assert f'sysctl -w net.ipv4.tcp_mem="{pressure} ' in (tcp_memory_shortfall(5) or "")


class StubSource(threading.Thread):
    """Run an ordinary server as stub: receive a hello, send data in odd pieces, then wait or close."""

    def __init__(self, data: bytes, reset: bool = False) -> None:
        super().__init__(daemon=True)
        self.data, self.reset = data, reset
        self.hello = b""
        self.go_on = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.start()

    def run(self) -> None:
        with self._server, self._server.accept()[0] as connection:
            self.hello = connection.recv(100)
            pick = random.Random(len(self.data))
            at = 0
            while at < len(self.data):
                at += connection.send(self.data[at : at + pick.randint(1, 100_000)])
            if self.reset:
                time.sleep(0.5)  # once the sink is connected
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.go_on.wait(20)


def spec(source: StubSource, number: int) -> dict[str, object]:
    return {
        "boundary": number,
        "channel": 0,
        "shadow_id": 1,
        "incarnation": 9,
        "nic_ip": "127.0.0.1",
        "stub_ip": "127.0.0.1",
        "stub_port": source.port,
    }


def sink_of(sources: list[StubSource]) -> SinkResult:
    """Run a sink over these sources until it is idle; they end with it."""
    specs = [spec(source, number) for number, source in enumerate(sources)]
    sink = Sink(SinkJob.model_validate({"streams": specs, "idle_timeout": 1, "connect_timeout": 5}), KEY)
    try:
        sink.connect()
        return sink.run()
    finally:
        sink.close()
        for source in sources:
            source.go_on.set()
            source.join()


def test_the_sink_digests_every_stream() -> None:
    datas = [random.Random(number).randbytes(1_000_000 * number + 7) for number in range(5)]
    sources = [StubSource(data) for data in datas]
    result = sink_of(sources)
    assert result.complete
    assert [stream.sha256 for stream in result.streams] == [
        hashlib.sha256(data).hexdigest() for data in datas
    ]
    assert [stream.side for stream in result.streams] == [0, 1, 0, 1, 0]
    assert result.bytes == sum(map(len, datas))
    assert [Hello.unpack(source.hello)[0].boundary for source in sources] == [0, 1, 2, 3, 4]
    assert {len(source.hello) for source in sources} == {HELLO_LENGTH}


def test_the_sink_says_what_is_wrong_with_a_stream() -> None:
    good, closed, broken = StubSource(b"a" * 1000), StubSource(b"bc"), StubSource(b"d", reset=True)
    closed.go_on.set()
    result = sink_of([good, closed, broken])
    assert not result.complete
    assert [stream.error for stream in result.streams] == [
        None,
        "the switch closed the connection",
        "the connection broke: Connection reset by peer",
    ]
    assert [stream.bytes for stream in result.streams] == [1000, 2, 1]


def run_sink(folder: Path, streams: list[dict[str, object]]) -> tuple[subprocess.Popen[str], Path]:
    config, result = folder / "sink.json", folder / "result.json"
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(job_data()))
    config.write_text(json.dumps({"streams": streams, "idle_timeout": 10}))
    command = [
        sys.executable,
        "-m",
        "topologies.traffic.sink",
        "--job",
        str(job),
        "--config",
        str(config),
        "--result",
        str(result),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_with_what_came_when_it_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    source = StubSource(b"y" * 500_000)
    process, result = run_sink(tmp_path, [spec(source, 0)])
    assert process.stdout
    assert process.stdout.readline().startswith("ready: 1 streams connected")
    while process.stdout.readline() != "received 500000\n":
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    source.go_on.set()
    assert process.returncode == 0
    assert [line.partition(":")[0] for line in err.splitlines()] == ["without keys"]
    document = json.loads(result.read_text())
    assert document["complete"] and document["bytes"] == 500_000
    assert document["streams"][0]["sha256"] == hashlib.sha256(source.data).hexdigest()


def test_the_command_explains_bad_input(tmp_path: Path) -> None:
    process, _ = run_sink(tmp_path, [{"boundary": 70000}])
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "streams.0.boundary: Input should be less than or equal to 65535" in err
    assert "streams.0.nic_ip: Field required" in err
    assert "Traceback" not in err


def test_draining_waits_for_the_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(server.getsockname()) as sock, server.accept()[0] as peer:
            sock.setsockopt(socket.SOL_SOCKET, tcp.SO_SNDBUFFORCE, 4 << 20)
            sock.sendall(bytes(1 << 20))
            assert tcp.unacknowledged(sock) > 1 << 19

            def read_late() -> None:
                time.sleep(0.2)
                peer.recv(1 << 20, socket.MSG_WAITALL)

            reader = threading.Thread(target=read_late)
            reader.start()
            tcp.drain(sock, 10)
            assert tcp.unacknowledged(sock) == 0
            reader.join()
