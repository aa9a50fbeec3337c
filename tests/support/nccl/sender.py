"""One rank's NCCL, which sends through the plugin: a collective's calls, and a sink for its connections."""

from __future__ import annotations

import ctypes
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from checkmate.nccl.building import shared_object
from checkmate.nccl.interfaces import interface_of
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace
from checkmate.wire.nccl_slicing import NcclSend, NcclSlicing
from tests.support.labs.end_hosts import inside
from tests.support.nccl.calls import RELEASES, Caller, Versions
from tests.support.nccl.traces import ITEMSIZES, TracedCollective

LOOPBACK: Final = IPv4Address("127.0.0.1")
OURS: Final = 4711
"""The hash of the gradients' communicator."""
ANOTHER: Final = 12
"""The hash of a communicator that is not ours."""
_ROOM: Final = 2 << 20
_SLICING: Final = NcclSlicing()


def address(number: int) -> int:
    """Return the address of a bucket's tensor, which the plugin does not read."""
    return 0x1000 * (number + 1)


def buffer(data: bytes | bytearray | int) -> ctypes.Array[ctypes.c_char]:
    """Return memory with data, or of a size."""
    if isinstance(data, int):
        return ctypes.create_string_buffer(data)
    return ctypes.create_string_buffer(bytes(data), max(1, len(data)))


def until(made: Callable[[], int | None], seconds: float = 20.0) -> int:
    """Return what is made once it is not `None`."""
    deadline = time.monotonic() + seconds
    while (found := made()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def joined(connect: Callable[[], int | None], accept: Callable[[], int | None]) -> tuple[int, int]:
    """Return both ends of a connection, whose sides wait for each other: NCCL calls both repeatedly."""
    ends: list[int | None] = [None, None]

    def both() -> int | None:
        ends[:] = [ends[0] or connect(), ends[1] or accept()]
        return 1 if all(ends) else None

    until(both)
    sends, receives = ends
    assert sends
    assert receives
    return sends, receives


class KeepingCaller(Caller):
    """Keeps what it sends in memory, because the plugin may read it until it has closed."""

    def __init__(self, path: Path, versions: Versions) -> None:
        """Load the plugin's file."""
        super().__init__(path, versions)
        self._kept: dict[int | None, Any] = {}

    def isend(self, comm: int, data: Any, nbytes: int, step: int | None) -> tuple[int, int | None]:
        """Send, as `Caller` does. Requests are used again."""
        result, request = super().isend(comm, data, nbytes, step)
        self._kept[request] = data
        return result, request


@dataclass(frozen=True)
class Settings:
    """The job of a rank, and where it and the next one are."""

    release: str
    rank: int
    ranks: int
    channels: int
    slicing: NcclSlicing = _SLICING
    own: tuple[str, IPv4Address] = ("", LOOPBACK)
    """Network namespace, "" for this one, and address."""
    other: tuple[str, IPv4Address] = ("", LOOPBACK)
    sockets_map: int = -1
    refused: bool = False
    """Whether another communicator is made before there is a job; the plugin refuses it."""


def _there(namespace: str) -> AbstractContextManager[None]:
    return inside(namespace) if namespace else nullcontext()


def _loaded(
    path: Path, said: Settings, rank: int, where: tuple[str, IPv4Address], sockets_map: int
) -> tuple[NcclLibrary, Caller]:
    """Load a plugin of its own for a rank, begin with a job, and make the gradients' communicator."""
    shutil.copy(shared_object(), path)
    if said.refused:
        assert Caller(path, RELEASES[said.release]).init(ANOTHER, said.ranks, said.ranks, rank) != 0
    library = NcclLibrary(path)
    namespace, address = where
    with _there(namespace):
        interface = interface_of(address)
    library.begin(
        NcclPlace(rank, said.ranks, address, interface, peers=(said.own[1], said.other[1])),
        channels=said.channels,
        slicing=said.slicing,
        incarnation=1,
        sockets_map=sockets_map,
    )
    caller = KeepingCaller(path, RELEASES[said.release])
    with library.expected():
        assert caller.init(OURS, said.ranks, said.ranks, rank) == 0
    return library, caller


class SendingRank:
    """One rank's NCCL, and a sink for its channels' connections."""

    def __init__(self, folder: Path, said: Settings) -> None:
        """Load two plugins in `folder`, and connect a connection for each channel."""
        self.rank, self.ranks, self.slicing = said.rank, said.ranks, said.slicing
        here, there = said.own[0], said.other[0]
        self.library, self.caller = _loaded(folder / "rank.so", said, said.rank, said.own, said.sockets_map)
        after = (said.rank + 1) % said.ranks
        self.sink_library, self._sink = _loaded(folder / "sink.so", said, after, said.other, -1)
        self._ends: list[int] = []
        self._listeners: list[int] = []
        self.connections: list[int] = []
        self.ports: list[int] = []
        for _ in range(said.channels):
            with _there(there):
                handle, listening = self._sink.listen()
            place = buffer(handle)
            self.ports.append(int.from_bytes(handle[2:4], "big"))
            with _there(here):
                connection, end = joined(
                    lambda place=place: self.caller.connect(place),  # type: ignore[misc]
                    lambda to=listening: self._sink.accept(to),  # type: ignore[misc]
                )
            self.connections.append(connection)
            self._ends.append(end)
            self._listeners.append(listening)
        self.received: list[int] = []
        """Sizes of the messages that the sink has received, on all channels."""
        self._stopping = threading.Event()
        self._rooms = [buffer(_ROOM) for _ in self._ends]  # the plugin may write there until it has closed
        self._threads: list[threading.Thread] = []

    def receive(self) -> None:
        """Begin to receive on all connections."""
        self._threads = [
            threading.Thread(target=self._drain, args=pair)
            for pair in zip(self._ends, self._rooms, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _drain(self, comm: int, room: ctypes.Array[ctypes.c_char]) -> None:
        while not self._stopping.is_set():
            result, request = self._sink.irecv(comm, room, _ROOM)
            while request is not None and not self._stopping.is_set():
                result, size = self._sink.test(request)
                if size is not None:
                    self.received.append(size)
                if result or size is not None:
                    break
            if result:
                return

    def send(
        self, channel: int, nbytes: int, step: int | None, data: ctypes.Array[ctypes.c_char] | None = None
    ) -> None:
        """Send, and wait until that is done."""
        self.finish(self.post(channel, nbytes, step, data))

    def post(
        self, channel: int, nbytes: int, step: int | None, data: ctypes.Array[ctypes.c_char] | None = None
    ) -> int:
        """Return the request of a send, once it is accepted."""
        place = data or buffer(nbytes or 1)

        def accepted() -> int | None:
            result, request = self.caller.isend(self.connections[channel], place, nbytes, step)
            assert result == 0
            return request

        return until(accepted)

    def finish(self, request: int) -> None:
        """Wait until a send is done."""
        until(lambda: None if self.caller.test(request)[1] is None else 1)

    def collective(self, number: int, one: TracedCollective, **more: Any) -> list[int | None]:
        """Begin a collective; return the handles of its proxy operations, by channel."""
        coll = self.caller.coll(
            address(number), one.count, one.datatype, one.channels, comm_hash=OURS, **more
        )
        return [
            self.caller.proxy_op(coll, channel, (self.rank + 1) % self.ranks)
            for channel in range(one.channels)
        ]

    def reduce(
        self,
        number: int,
        bucket: NcclBucket,
        contents: Callable[[NcclSend], bytes] | None = None,
        ahead: int = 1,
    ) -> None:
        """Reduce a bucket of floats, with all sends of this rank, of which `ahead` are in progress at a time.

        `contents` are those of a send.
        """
        channels, datatype = len(self.connections), {2: "ncclFloat16", 4: "ncclFloat32", 8: "ncclFloat64"}
        used = self.slicing.used_channels(bucket.elements, bucket.itemsize, channels)
        shown = channels if self.caller.versions.profiler == 3 else used
        one = TracedCollective(bucket.elements, datatype[bucket.itemsize], shown)
        ops = self.collective(number, one)
        for channel in range(used):
            part = self.slicing.part(bucket.elements, bucket.itemsize, channels, channel)
            posted: deque[int] = deque()
            for send in self.slicing.sends(part, bucket.itemsize, self.ranks, self.rank):
                step = self.caller.proxy_step(ops[channel], send.step)
                data = None if contents is None else buffer(contents(send))
                posted.append(self.post(channel, len(send.where) * bucket.itemsize, step, data))
                if len(posted) == ahead:
                    self.finish(posted.popleft())
            for request in posted:
                self.finish(request)

    def stop_receiving(self) -> None:
        """Close the sink's connections."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        while self._ends:
            self._sink.close_receive(self._ends.pop())

    def close(self) -> None:
        """Close all connections."""
        while self.connections:
            self.caller.close_send(self.connections.pop())
        self.stop_receiving()
        while self._listeners:
            self._sink.close_listen(self._listeners.pop())


def buckets_of(alone: dict[int, TracedCollective], shadow_ids: int) -> list[NcclBucket]:
    """Return buckets for recorded collectives, by number."""
    return [
        NcclBucket(address(number), one.count, ITEMSIZES[one.datatype], number % shadow_ids, one.channels)
        for number, one in alone.items()
    ]
