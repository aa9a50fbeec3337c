"""A sink: it reads all streams of a shadow node to their ends, and digests them.

The digests are of the bytes that were received, in order. They are independent of the sender's side.
"""

from __future__ import annotations

import hashlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from checkmate.shadow.receive.connect import RECEIVE_BUFFER, connect_stream
from checkmate.wire.tag import CHANNELS_MAX, Hello

READ_BYTES = 4 << 20
_POLL_SECONDS = 0.2
_STOP_SECONDS = 2.0

Whole = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamSpec(_Model):
    """One stream; `boundary` is 2 x group + side. Without `expected_bytes`, it is read until `stop`."""

    boundary: Annotated[int, Field(ge=0, le=0xFFFF)]
    channel: Annotated[int, Field(ge=0, lt=CHANNELS_MAX)]
    shadow_id: Annotated[int, Field(ge=0, le=0xFFFF)]
    nic_ip: str
    stub_ip: str
    stub_port: Annotated[int, Field(ge=1, le=65535)]
    device: str | None = None
    base: Whole = 0
    incarnation: Annotated[int, Field(ge=0, le=255)] = 0
    expected_bytes: Whole | None = None

    def hello(self) -> Hello:
        """Return the hello that opens this stream."""
        return Hello(self.base % (1 << 32), self.boundary, self.shadow_id, self.channel, self.incarnation)


class SinkJob(_Model):
    """Configuration of a sink, which gives up `idle_timeout` seconds after the last byte of any stream.

    It waits for the first byte until it is stopped, because training may begin at any time. Without `digest`,
    for benchmarks, a stream's `sha256` is empty.
    """

    streams: Annotated[list[StreamSpec], Field(min_length=1)]
    receive_buffer: Annotated[int, Field(ge=4096)] = RECEIVE_BUFFER
    connect_timeout: Annotated[float, Field(gt=0)] = 30
    idle_timeout: Annotated[float, Field(gt=0)] = 30
    threads: Annotated[int, Field(ge=1)] = 2
    digest: bool = True


class StreamResult(_Model):
    """The bytes read from a stream; `error` is the reason if it ended before it was complete."""

    boundary: int
    side: int
    channel: int
    shadow_id: int
    nic_ip: str
    base: int
    bytes: int
    expected_bytes: int | None
    sha256: str
    connect_seconds: float
    error: str | None


class SinkResult(_Model):
    """Results of all streams. `seconds` is the time from the first byte to the last."""

    complete: bool
    bytes: int
    seconds: float
    streams: list[StreamResult]


class SinkStream:
    """A connected stream and its bytes so far. One thread reads it."""

    def __init__(
        self, spec: StreamSpec, sock: socket.socket, connect_seconds: float, *, digest: bool = True
    ) -> None:
        self.spec = spec
        self.socket = sock
        self.connect_seconds = connect_seconds
        self.bytes = 0
        self.first = self.last = 0.0
        self.error: str | None = None
        self._hash = hashlib.sha256() if digest else None

    @property
    def complete(self) -> bool:
        """Whether all expected bytes have arrived; without an expectation, it is never complete."""
        return self.spec.expected_bytes is not None and self.bytes >= self.spec.expected_bytes

    def read(self, buffer: memoryview) -> bool:
        """Read the available bytes, up to the buffer's length; return whether more may come."""
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError as error:
            self.error = f"the connection broke: {error.strerror}"
            return False
        if not count:
            self.error = "the switch closed the connection"
            return False
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.bytes += count
        if self._hash is not None:
            self._hash.update(buffer[:count])
        return True

    def result(self) -> StreamResult:
        """Return its result."""
        spec, error = self.spec, self.error
        if self.complete:
            error = None
            if spec.expected_bytes != self.bytes:
                error = f"{self.bytes - (spec.expected_bytes or 0)} bytes more than expected"
        elif spec.expected_bytes is not None and error is None:
            error = f"{spec.expected_bytes - self.bytes} bytes are missing"
        return StreamResult(
            boundary=spec.boundary,
            side=spec.boundary % 2,
            channel=spec.channel,
            shadow_id=spec.shadow_id,
            nic_ip=spec.nic_ip,
            base=spec.base,
            bytes=self.bytes,
            expected_bytes=spec.expected_bytes,
            sha256=self._hash.hexdigest() if self._hash is not None else "",
            connect_seconds=self.connect_seconds,
            error=error,
        )


class Sink:
    """Reader of all streams of a job, until they are complete or idle, or `stop` is called."""

    def __init__(self, job: SinkJob) -> None:
        self._job = job
        self._stopping = threading.Event()
        self.streams: list[SinkStream] = []

    def connect(self) -> None:
        """Connect all streams in turn; raise `StreamError` for the first that fails."""
        deadline = time.monotonic() + self._job.connect_timeout
        for spec in self._job.streams:
            start = time.monotonic()
            sock = connect_stream(
                spec.nic_ip,
                (spec.stub_ip, spec.stub_port),
                spec.hello(),
                device=spec.device,
                receive_buffer=self._job.receive_buffer,
                timeout=max(0.001, deadline - start),
            )
            sock.setblocking(False)
            self.streams.append(SinkStream(spec, sock, time.monotonic() - start, digest=self._job.digest))

    def run(self, tick: Callable[[int], None] = lambda total: None) -> SinkResult:
        """Read to the end; call `tick` with the number of bytes so far, a few times a second."""
        count = min(self._job.threads, len(self.streams))
        threads = [
            threading.Thread(target=self._read, args=(self.streams[number::count],), name=f"sink-{number}")
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(_POLL_SECONDS)
                tick(sum(stream.bytes for stream in self.streams))
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        return self._result()

    def stop(self) -> None:
        """End after the sockets' buffers have been read, for a limited time. Safe in a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """Close all streams."""
        for stream in self.streams:
            stream.socket.close()

    def _read(self, streams: Sequence[SinkStream]) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream.socket, selectors.EVENT_READ, stream)
            stop_at = None
            while selector.get_map() and not all(stream.complete for stream in streams):
                if self._stopping.is_set():
                    stop_at = stop_at or time.monotonic() + _STOP_SECONDS
                    if time.monotonic() > stop_at:
                        return
                ready = selector.select(_POLL_SECONDS)
                for key, _ in ready:
                    if not key.data.read(buffer):
                        selector.unregister(key.fileobj)
                if not ready and (self._stopping.is_set() or self._idle()):
                    return
            for key in list(selector.get_map().values()):
                key.data.read(buffer)  # bytes after the end are an error, and reported

    def _idle(self) -> bool:
        newest = max(stream.last for stream in self.streams)
        return newest > 0 and time.monotonic() - newest > self._job.idle_timeout

    def _result(self) -> SinkResult:
        results = [stream.result() for stream in self.streams]
        starts = [stream.first for stream in self.streams if stream.bytes]
        return SinkResult(
            complete=all(result.error is None for result in results),
            bytes=sum(result.bytes for result in results),
            seconds=max(stream.last for stream in self.streams) - min(starts) if starts else 0.0,
            streams=results,
        )
