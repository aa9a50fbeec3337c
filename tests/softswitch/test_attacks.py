"""Attacks of strangers on a running switch: connections, calls and messages that do not end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from finsy.proto import U128, p4r, p4r_grpc

from testbed.process_memory import resident
from tests.softswitch.support.client import DEVICE, Client, insert
from tests.softswitch.support.process import descriptors, process

LOOPBACK = ("--no-p4", "--grpc-server-addr", "127.0.0.1:0")
SERVICE = "/p4.v1.P4Runtime/"


@contextmanager
def idle(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Open TCP connections that send nothing."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(stack.enter_context(socket.socket()))
            connections[-1].settimeout(2)
            connections[-1].connect_ex((host, int(port)))
        yield connections


def served(address: str, timeout: float = 5) -> None:
    """Check that a new client gets an answer."""
    with grpc.insecure_channel(address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        assert stub.Capabilities(p4r.CapabilitiesRequest(), timeout=timeout).p4runtime_api_version


@contextmanager
def half_open(address: str, method: str, count: int, connections: int = 1) -> Iterator[None]:
    """Start calls that send headers, and no message."""
    stop = threading.Event()
    with ExitStack() as stack:
        for _ in range(connections):
            channel = stack.enter_context(
                grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            )
            start: Any = channel.stream_stream(SERVICE + method)
            for _ in range(count // connections):
                stack.callback(start(iter(lambda: stop.wait() and None, None)).cancel)
        stack.callback(stop.set)
        time.sleep(0.5)
        yield


def test_idle_connections_take_few_descriptors() -> None:
    with process(*LOOPBACK, files=256) as (running, address):
        client = Client(address)
        client.arbitration()
        with idle(address, 300):
            time.sleep(0.5)
            assert descriptors(running.pid) < 230
            client.set_pipeline()  # a connection that was there before goes on
        client.close()


@pytest.mark.parametrize("method", ["Write", "Read", "StreamChannel", "GetForwardingPipelineConfig"])
def test_half_open_calls_leave_workers(method: str) -> None:
    with process(*LOOPBACK) as (_, address), half_open(address, method, 100, connections=10):
        begin = time.monotonic()
        served(address)
        client = Client(address)
        assert client.arbitration() == (0, 1)
        client.set_pipeline()
        client.write(insert(client.mac_entry(1, 1, "punt")))
        assert len(client.read(client.entry("by_mac"))) == 1
        client.close()
        assert time.monotonic() - begin < 5


def test_corrupt_messages_leave_no_memory() -> None:
    count = 3000
    with process(*LOOPBACK) as (running, address), grpc.insecure_channel(address) as channel:
        calls: list[Any] = [
            channel.unary_unary(SERVICE + method) for method in ("Write", "SetForwardingPipelineConfig")
        ]
        calls.append(channel.unary_unary(SERVICE + "Capabilities"))

        def send(rounds: int) -> None:
            for number in range(rounds):
                with pytest.raises(grpc.RpcError) as failure:
                    calls[number % len(calls)](b"\xff\xff" + bytes(50), timeout=5)
                assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT

        send(300)
        before = resident(running.pid)
        send(count)
        assert (resident(running.pid) - before) / count < 2000


def test_large_write_of_a_stranger_is_not_parsed() -> None:
    """An update of 2 bytes takes 100 and more as an object."""
    with process(*LOOPBACK) as (running, address):
        primary = Client(address)
        primary.arbitration()
        request = p4r.WriteRequest(device_id=DEVICE, election_id=U128.encode(7)).SerializeToString()
        with grpc.insecure_channel(address) as channel:
            write: Any = channel.unary_unary(SERVICE + "Write")
            before = resident(running.pid)
            peak = 0
            call = write.future(request + b"\x22\x00" * (7 << 20), timeout=30)
            while not call.done():
                peak = max(peak, resident(running.pid))
            with pytest.raises(grpc.RpcError) as failure:
                call.result()
            assert failure.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert peak - before < 100 << 20
        primary.close()


def test_replies_to_a_client_that_does_not_read_are_bounded() -> None:
    with process(*LOOPBACK) as (running, address):
        message = p4r.StreamMessageRequest()
        message.arbitration.device_id = DEVICE
        message.arbitration.role.name = "r" * 200
        stop = threading.Event()

        def flood() -> Iterator[bytes]:
            while not stop.is_set():
                message.arbitration.election_id.low += 1
                yield message.SerializeToString()

        before = resident(running.pid)
        with grpc.insecure_channel(address) as channel:
            stream: Any = channel.stream_stream(SERVICE + "StreamChannel")
            call = stream(flood())
            try:
                assert running.stderr is not None
                assert "is cut off: it does not read its messages" in running.stderr.readline()
                assert resident(running.pid) - before < 20 << 20
            finally:
                stop.set()
                call.cancel()
        served(address)
