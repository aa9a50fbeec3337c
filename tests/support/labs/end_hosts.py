"""Two network namespaces connected by a veth, sockets in them, and a capture."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkmate.wire import tag
from checkmate.wire.tcp import SO_RCVBUFFORCE

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: run as root")
needs_buffers = pytest.mark.skipif(
    os.geteuid() != 0, reason="receive buffers beyond the system's limit (SO_RCVBUFFORCE) need root"
)

CLONE_NEWNET = 0x40000000
ETH_P_ALL = 3
_serial = itertools.count()


def shell(command: str) -> str:
    """Run one command without a shell, and report its own error if it fails."""
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr or result.stdout}"
    return result.stdout


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread to another network namespace; sockets that it creates stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        open("/proc/thread-self/ns/net", "rb") as home,
        open(f"/run/netns/{namespace}", "rb") as there,
    ):
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def lone_namespace() -> Iterator[str]:
    """Yield a network namespace with only its loopback device."""
    name = f"cmlone{os.getpid():x}{next(_serial):x}"
    shell(f"ip netns add {name}")
    try:
        shell(f"nsenter --net=/run/netns/{name} ip link set lo up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(frozen=True)
class HostPair:
    """Namespaces `a` and `b`; the veth's end in each has the same name."""

    a: str
    b: str
    a_ip: str = "10.77.0.1"
    b_ip: str = "10.77.0.2"

    def in_each(self, command: str) -> None:
        """Run a command in both, where `DEV` is the veth's end."""
        for name in (self.a, self.b):
            shell(f"nsenter --net=/run/netns/{name} {command.replace('DEV', name)}")

    def lose(self, per_mille: int, folder: Path) -> None:
        """Drop arriving packets at random in both directions, with short timeouts to save time."""
        compiled = folder / "loss.o"
        include = f"-I/usr/include/{platform.machine()}-linux-gnu"
        source = Path(__file__).with_name("loss.c")
        define = f"-DLOSS_PER_MILLE={per_mille}"
        shell(f"clang -target bpf -g -O2 {include} {define} -c {source} -o {compiled}")
        self.in_each("tc qdisc add dev DEV clsact")
        self.in_each("ip route change 10.77.0.0/24 dev DEV rto_min 5ms")
        self.in_each(f"tc filter add dev DEV ingress bpf da obj {compiled} sec classifier")


@contextlib.contextmanager
def veth_pair(offloads: Sequence[str] = ()) -> Iterator[HostPair]:
    """Yield two connected hosts; `offloads` are arguments of `ethtool -K`, such as "tso off"."""
    base = f"cm{os.getpid():x}{next(_serial):x}"
    pair = HostPair(f"{base}a", f"{base}b")
    try:
        shell(f"ip netns add {pair.a}")
        shell(f"ip netns add {pair.b}")
        shell(f"ip link add {pair.a} netns {pair.a} type veth peer name {pair.b} netns {pair.b}")
        for name, ip in ((pair.a, pair.a_ip), (pair.b, pair.b_ip)):
            shell(f"nsenter --net=/run/netns/{name} ip addr add {ip}/24 dev {name}")
            shell(f"nsenter --net=/run/netns/{name} ip link set {name} up")
            shell(f"nsenter --net=/run/netns/{name} ip link set lo up")
        for offload in offloads:
            pair.in_each(f"ethtool -K DEV {offload}")
        yield pair
    finally:
        for name in (pair.a, pair.b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(frozen=True)
class CapturedSegment:
    """A captured TCP segment; `sequence` as on the wire."""

    source_ip: str
    source_port: int
    dscp: int
    sequence: int
    flags: int
    options: bytes
    payload: bytes

    @property
    def tagged(self) -> bool:
        """Whether it has a tag, whose first bytes may also be part of a timestamp."""
        at = 0
        while at < len(self.options) and (kind := self.options[at]):
            if kind == tag.TAG_KIND:
                return self.options[at + 2 : at + 4] == tag.TAG_EXID.to_bytes(2, "big")
            at += 1 if kind == _PADDING else max(self.options[at + 1], 2)
        return False


_PADDING = 1
"""The one option without a length, beside the last."""


def parse_segment(frame: bytes) -> CapturedSegment | None:
    """Return a frame's TCP segment, or `None` if it is not TCP over IPv4."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    header = 4 * (frame[14] & 15)
    (total,) = struct.unpack_from("!H", frame, 16)
    tcp = frame[14 + header : 14 + total]
    source_port, _, sequence, _, offset, flags = struct.unpack_from("!HHIIBB", tcp)
    end = offset >> 4 << 2
    source_ip = socket.inet_ntoa(frame[26:30])
    return CapturedSegment(source_ip, source_port, frame[15] >> 2, sequence, flags, tcp[20:end], tcp[end:])


class PacketCapture:
    """Capture of all frames that arrive at a namespace's device, by default its end of the veth."""

    def __init__(self, namespace: str, device: str | None = None) -> None:
        with inside(namespace):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 512 << 20)
        self._socket.bind((device or namespace, ETH_P_ALL))
        self._socket.settimeout(0.05)
        self._frames: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                frame, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._stop.is_set():
                    return
                continue
            if address[2] != socket.PACKET_OUTGOING:
                self._frames.append(frame)

    def stop(self) -> list[CapturedSegment]:
        """Return the TCP segments seen so far, in order."""
        self._stop.set()
        self._thread.join()
        self._socket.close()
        return [segment for frame in self._frames if (segment := parse_segment(frame))]


class SocketReader(threading.Thread):
    """Reader that accepts one connection and reads it to its end."""

    def __init__(self, namespace: str, ip: str) -> None:
        super().__init__()
        with inside(namespace):
            self.listener = socket.create_server((ip, 0))
        self.listener.settimeout(30)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.received = bytearray()
        self.start()

    def run(self) -> None:
        with self.listener, self.listener.accept()[0] as connection:
            while piece := connection.recv(1 << 20):
                self.received += piece
