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
JOB_COMM_HASH: Final = 4711
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


def until(attempt: Callable[[], int | None], seconds: float = 20.0) -> int:
    """Return what is made once it is not `None`."""
    deadline = time.monotonic() + seconds
    while (handle := attempt()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return handle


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
        self._data: dict[int | None, Any] = {}

    def isend(self, comm: int, data: Any, nbytes: int, step: int | None) -> tuple[int, int | None]:
        """Send, as `Caller` does. Requests are used again."""
        result, request = super().isend(comm, data, nbytes, step)
        self._data[request] = data
        return result, request


@dataclass(frozen=True)
class Settings:
    """The job of a rank, and where it and the next one are."""

    release: str
    rank: int
    ranks: int
    channels: int
    slicing: NcclSlicing = _SLICING
    here: tuple[str, IPv4Address] = ("", LOOPBACK)
    """Network namespace, "" for this one, and address."""
    peer: tuple[str, IPv4Address] = ("", LOOPBACK)
    sockets_map: int = -1
    has_second_communicator: bool = False
    """Whether another communicator is made before there is a job; the plugin refuses it."""


def _there(namespace: str) -> AbstractContextManager[None]:
    return inside(namespace) if namespace else nullcontext()


def _loaded(
    path: Path, settings: Settings, rank: int, where: tuple[str, IPv4Address], sockets_map: int
) -> tuple[NcclLibrary, Caller]:
    """Load a plugin of its own for a rank, begin with a job, and make the gradients' communicator."""
    shutil.copy(shared_object(), path)
    if settings.has_second_communicator:
        assert (
            Caller(path, RELEASES[settings.release]).init(ANOTHER, settings.ranks, settings.ranks, rank) != 0
        )
    library = NcclLibrary(path)
    namespace, address = where
    with _there(namespace):
        interface = interface_of(address)
    library.begin(
        NcclPlace(rank, settings.ranks, address, interface, peers=(settings.here[1], settings.peer[1])),
        channels=settings.channels,
        slicing=settings.slicing,
        incarnation=1,
        sockets_map=sockets_map,
    )
    caller = KeepingCaller(path, RELEASES[settings.release])
    with library.expected():
        assert caller.init(JOB_COMM_HASH, settings.ranks, settings.ranks, rank) == 0
    return library, caller


class SendingRank:
    """One rank's NCCL, and a sink for its channels' connections."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Load two plugins in `folder`, and connect a connection for each channel."""
        self.rank, self.ranks, self.slicing = settings.rank, settings.ranks, settings.slicing
        here, there = settings.here[0], settings.peer[0]
        self.library, self.caller = _loaded(
            folder / "rank.so", settings, settings.rank, settings.here, settings.sockets_map
        )
        after = (settings.rank + 1) % settings.ranks
        self.sink_library, self._sink = _loaded(folder / "sink.so", settings, after, settings.peer, -1)
        self._ends: list[int] = []
        self._listeners: list[int] = []
        self.connections: list[int] = []
        self.ports: list[int] = []
        for _ in range(settings.channels):
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
        self.received_sizes: list[int] = []
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
                    self.received_sizes.append(size)
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

        def request_of_send() -> int | None:
            result, request = self.caller.isend(self.connections[channel], place, nbytes, step)
            assert result == 0
            return request

        return until(request_of_send)

    def finish(self, request: int) -> None:
        """Wait until a send is done."""
        until(lambda: None if self.caller.test(request)[1] is None else 1)

    def collective(self, number: int, collective: TracedCollective, **more: Any) -> list[int | None]:
        """Begin a collective; return the handles of its proxy operations, by channel."""
        coll = self.caller.coll(
            address(number),
            collective.count,
            collective.datatype,
            collective.channels,
            comm_hash=JOB_COMM_HASH,
            **more,
        )
        return [
            self.caller.proxy_op(coll, channel, (self.rank + 1) % self.ranks)
            for channel in range(collective.channels)
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
        used_channels = self.slicing.used_channels(bucket.elements, bucket.itemsize, channels)
        shown_channels = channels if self.caller.versions.profiler == 3 else used_channels
        collective = TracedCollective(bucket.elements, datatype[bucket.itemsize], shown_channels)
        ops = self.collective(number, collective)
        for channel in range(used_channels):
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
        NcclBucket(
            address(number),
            collective.count,
            ITEMSIZES[collective.datatype],
            number % shadow_ids,
            collective.channels,
        )
        for number, collective in alone.items()
    ]
