"""One of the two ranks of `benchmarks.training.nccl_speed`; rank 1 sends, and prints JSON.

python -m benchmarks.training.nccl_speed_rank --rank 0 --ips 10.0.0.1 10.0.0.2 --interface nic0 --rounds 5
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from ipaddress import IPv4Address
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from checkmate.base.cache import compiled
from checkmate.nccl.building import SOURCES, shared_object
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace, NcclSizes
from checkmate.tagger import Tagger
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.tcp import tune_for_bulk

MODES: Final = ("sockets", "untagged", "tagged", "control")
"""The control is untagged, too, on other connections."""
CONNECTIONS: Final = (1, 4)
NBYTES: Final = 1 << 28
"""Bytes of a bucket. Each of the two ranks sends as many."""
_RANKS, _SENDER, _PORT, _SLOTS = 2, 1, 46100, 16 << 20
_SLICING: Final = NcclSlicing()
_CALLER: Final = Path(__file__).with_name("nccl_caller.c")
_FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_HANDLE_BYTES: Final = 128


class _Slicing(ctypes.Structure):
    """`struct slicing` of the plugin."""

    _fields_ = (
        ("elements", ctypes.c_uint64),
        ("sizes", NcclSizes),
        ("itemsize", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("allowed", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
    )


def _caller() -> ctypes.CDLL:
    files = [_CALLER, SOURCES / "slicing.c"]
    command = ["cc", *_FLAGS, f"-I{SOURCES}", *map(str, files)]
    library = ctypes.CDLL(str(compiled("nccl-caller.so", files, _FLAGS, lambda: command)))
    library.caller_make.restype = ctypes.c_void_p
    return library


def _check(result: int, call: str) -> None:
    if result:
        raise SystemExit(f"{call} failed: {result}")


class PluginFlow:
    """Connections of the plugin from rank 1 to rank 0, with or without tags."""

    def __init__(
        self, path: Path, place: NcclPlace, count: int, tagger: Tagger | None, slots: ctypes.Array[Any]
    ) -> None:
        """Load the plugin from a file of its own, and begin with a job. `slots` are what it sends."""
        self.count, self.slots = count, slots
        self.library = NcclLibrary(path)
        sockets = -1 if tagger is None else tagger.sockets_map
        self.library.begin(place, channels=count, slicing=_SLICING, incarnation=1, sockets_map=sockets)
        self.library.set_buckets([NcclBucket(ctypes.addressof(self.slots), NBYTES // 4, 4, 0)])
        self.c = _caller()
        with self.library.expected():
            self.caller = ctypes.c_void_p(self.c.caller_make(str(path).encode(), 1, _RANKS, place.rank))
        if not self.caller:
            raise SystemExit("the plugin refuses the communicator")
        self.comms = (ctypes.c_void_p * count)()
        parameters = (NcclSizes(**asdict(_SLICING)), 4, count, count, _RANKS, _SENDER)
        self._slicing = ctypes.byref(_Slicing(NBYTES // 4, *parameters))

    def meet(self, control: Connection, *, sends: bool) -> None:
        """Connect all channels."""
        for channel in range(self.count):
            handle, listening = ctypes.create_string_buffer(_HANDLE_BYTES), ctypes.c_void_p()
            if sends:
                handle.raw = control.recv_bytes()
            else:
                _check(self.c.caller_listen(self.caller, handle, ctypes.byref(listening)), "listen")
                control.send_bytes(handle.raw)
            comm = ctypes.c_void_p()
            while not comm:
                if sends:
                    _check(self.c.caller_connect(self.caller, handle, ctypes.byref(comm)), "connect")
                else:
                    _check(self.c.caller_accept(self.caller, listening, ctypes.byref(comm)), "accept")
            self.comms[channel] = comm

    def send(self) -> None:
        """Make all sends of an AllReduce."""
        _check(self.c.caller_send(self.caller, self._slicing, self.comms, self.slots, 0), "send")

    def receive(self) -> None:
        """Receive them."""
        _check(self.c.caller_receive(self.caller, self._slicing, self.comms, self.slots), "receive")


class SocketFlow:
    """Plain connections with writes as large as iperf3's, a thread for each, and the plugin's congestion
    control.
    """

    def __init__(self, local_ip: IPv4Address, peer_ip: IPv4Address, count: int) -> None:
        """Take the addresses."""
        self._local_ip, self._peer_ip = str(local_ip), str(peer_ip)
        self.count, self.c = count, _caller()
        self._room = ctypes.create_string_buffer(128 << 10)
        self._sockets: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(count)

    def meet(self, control: Connection, *, sends: bool) -> None:
        """Connect."""
        if sends:
            port = int(control.recv_bytes())
            self._sockets = [socket.create_connection((self._peer_ip, port)) for _ in range(self.count)]
            for connection in self._sockets:
                tune_for_bulk(connection)
            return
        with socket.create_server((self._local_ip, 0)) as server:
            control.send_bytes(str(server.getsockname()[1]).encode())
            self._sockets = [server.accept()[0] for _ in range(self.count)]

    def send(self) -> None:
        """Send as many bytes as an AllReduce."""
        self._all(self.c.plain_send)

    def receive(self) -> None:
        """Receive them."""
        self._all(self.c.plain_receive)

    def _all(self, function: Any) -> None:
        size = ctypes.c_size_t(NBYTES // self.count)
        for result in self._threads.map(
            lambda connection: function(connection.fileno(), self._room, size), self._sockets
        ):
            _check(result, "plain socket")


Flow = PluginFlow | SocketFlow


@contextmanager
def flows(rank: int, ips: Sequence[IPv4Address], interface: str) -> Iterator[dict[tuple[str, int], Flow]]:
    """Yield a flow for each mode and number of connections; check the tags at the end."""
    flows_by_mode: dict[tuple[str, int], Flow] = {}
    place = NcclPlace(rank, _RANKS, ips[rank], interface, peers=ips)
    slots = ctypes.create_string_buffer(_SLOTS)  # of all, because its pages' place in caches is random
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # Both ranks are in one cgroup, so that a second program would run for each segment.
        tagger = stack.enter_context(Tagger.attach()) if rank == _SENDER else None
        for count in CONNECTIONS:
            flows_by_mode["sockets", count] = SocketFlow(ips[rank], ips[1 - rank], count)
            for mode in MODES[1:]:
                path = Path(shutil.copy(shared_object(), Path(folder, f"{mode}{count}.so")))
                flow = PluginFlow(path, place, count, tagger if mode == "tagged" else None, slots)
                flows_by_mode[mode, count] = flow
                if mode != "tagged":
                    flow.library.stop("measured without tags")
        yield flows_by_mode
        if tagger is not None and any(tagger.faults().values()):
            raise SystemExit(f"the tagger has faults: {tagger.faults()}")


def time_act(act: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of an act, and this process's processor time in it."""
    began, processor_start = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - processor_start


def sends(
    control: Connection, flows_by_mode: dict[tuple[str, int], Flow], rounds: int
) -> list[dict[str, Any]]:
    """Return each turn's seconds and processor time of both ranks, without the first round's."""
    turns = []
    for number in range(rounds + 1):
        order = list(flows_by_mode) if number % 2 else list(flows_by_mode)[::-1]
        for mode, count in order:
            control.send_bytes(json.dumps([mode, count]).encode())
            peer_seconds: list[float] = []

            def act(
                flow: Flow = flows_by_mode[mode, count], peer_seconds: list[float] = peer_seconds
            ) -> None:
                flow.send()
                peer_seconds.append(float(control.recv_bytes()))

            seconds, processor_seconds = time_act(act)
            if number:
                turns.append(
                    {
                        "mode": mode,
                        "count": count,
                        "seconds": seconds,
                        "used": processor_seconds + peer_seconds[0],
                    }
                )
    control.send_bytes(b"null")
    for (mode, count), flow in flows_by_mode.items():
        if isinstance(flow, PluginFlow):
            tagged = sum(flow.library.count(channel, 0)[0] for channel in range(count))
            if tagged != (NBYTES // 2 * (rounds + 1) if mode == "tagged" else 0):
                raise SystemExit(f"{tagged} bytes were tagged: {flow.library.trouble}")
    return turns


def receives(control: Connection, flows_by_mode: dict[tuple[str, int], Flow]) -> None:
    """Receive what rank 1 announces, and report the processor time."""
    while (turn := json.loads(control.recv_bytes())) is not None:
        _, processor_seconds = time_act(flows_by_mode[turn[0], turn[1]].receive)
        control.send_bytes(str(processor_seconds).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ips", type=IPv4Address, nargs=2, required=True)
    parser.add_argument("--interface", required=True, help="interface with this rank's address")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sender = arguments.rank == _SENDER
    at = (str(arguments.ips[0]), _PORT)
    with flows(arguments.rank, arguments.ips, arguments.interface) as flows_by_mode:
        control = _connect(at) if sender else Listener(at).accept()
        for flow in flows_by_mode.values():
            flow.meet(control, sends=sender)
        if sender:
            json.dump(sends(control, flows_by_mode, arguments.rounds), sys.stdout)
        else:
            receives(control, flows_by_mode)
    return 0


def _connect(at: tuple[str, int]) -> Connection:
    """Connect once the other rank listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(at)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
