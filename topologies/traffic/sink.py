"""The sink of a lab's shadow node: it reads all streams until it is stopped, and digests them.

It prints "ready" once all streams are connected, then "received N" as bytes arrive. Ctrl-C ends it with a
result.

The digests are of the bytes that were received, in order. They are independent of the sender's side.
"""

from __future__ import annotations

import argparse
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from checkmate.base.privileges import keep_only, to_read
from checkmate.job.files import JobError, read_job
from checkmate.keys.access import access
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, Secret
from checkmate.shadow.receive.connect import (
    RECEIVE_BUFFER,
    StreamError,
    connect_stream,
    node_time,
    tcp_memory_shortfall,
)
from checkmate.wire.tag import CHANNELS_MAX, Hello
from topologies.describe.topology import BadDescription
from topologies.traffic.digests import StreamDigest, StreamResult, StrictModel, Whole, read_config

READ_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_STOP_SECONDS = 2.0


class StreamSpec(StrictModel):
    """One stream; `boundary` is 2 x group + side."""

    boundary: Annotated[int, Field(ge=0, le=0xFFFF)]
    channel: Annotated[int, Field(ge=0, lt=CHANNELS_MAX)]
    shadow_id: Annotated[int, Field(ge=0, le=0xFFFF)]
    nic_ip: str
    stub_ip: str
    stub_port: Annotated[int, Field(ge=1, le=65535)]
    device: str | None = None
    base: Whole = 0
    incarnation: Annotated[int, Field(ge=0, le=255)] = 0


class SinkJob(StrictModel):
    """Configuration of a sink, which gives up `idle_timeout` seconds after the last byte of any stream.

    It waits for the first byte until it is stopped, because training may begin at any time. Without `digest`,
    for benchmarks, a stream's `sha256` is empty.
    """

    streams: Annotated[list[StreamSpec], Field(min_length=1)]
    receive_buffer: Annotated[int, Field(ge=4096)] = RECEIVE_BUFFER
    connect_timeout: Annotated[float, Field(gt=0)] = 30
    idle_timeout: Annotated[float, Field(gt=0)] = 30
    digest: bool = True


class ReadStream(StreamResult):
    """The bytes read from a stream from `base` on; `error` is the reason if it ended before the sink did."""

    base: int
    error: str | None


class SinkResult(StrictModel):
    """Results of all streams; `complete` if none ended before the sink did."""

    complete: bool
    bytes: int
    streams: list[ReadStream]


@dataclass
class SinkStream:
    """A connected stream and its bytes so far. One thread reads it."""

    spec: StreamSpec
    socket: socket.socket
    digest: StreamDigest
    last: float = 0.0
    error: str | None = None

    def result(self) -> ReadStream:
        """Return its result."""
        return ReadStream(
            boundary=self.spec.boundary,
            side=self.spec.boundary % 2,
            channel=self.spec.channel,
            shadow_id=self.spec.shadow_id,
            base=self.spec.base,
            bytes=self.digest.bytes,
            sha256=self.digest.sha256,
            error=self.error,
        )


class Sink:
    """Reader of all streams of a job, until they have ended or are idle, or `stop` is called."""

    def __init__(self, job: SinkJob, hello_key: bytes) -> None:
        """Prepare. `hello_key`: the training job's secret `hello.key`."""
        self._job, self._hello_key = job, hello_key
        self._stop_at = math.inf
        self.streams: list[SinkStream] = []

    def connect(self) -> None:
        """Connect all streams in turn; raise `StreamError` for the first that fails."""
        deadline = time.monotonic() + self._job.connect_timeout
        for spec in self._job.streams:
            base = spec.base % (1 << 32)
            sock = connect_stream(
                spec.nic_ip,
                (spec.stub_ip, spec.stub_port),
                Hello(base, spec.boundary, spec.shadow_id, spec.channel, spec.incarnation, node_time()),
                self._hello_key,
                device=spec.device,
                receive_buffer=self._job.receive_buffer,
                timeout=max(0.001, deadline - time.monotonic()),
            )
            sock.settimeout(_POLL_SECONDS)
            self.streams.append(SinkStream(spec, sock, StreamDigest(self._job.digest)))

    def run(self, tick: Callable[[int], None] = lambda total: None) -> SinkResult:
        """Read to the end; call `tick` with the number of bytes so far, a few times a second."""
        threads = [threading.Thread(target=self._read, args=(stream,)) for stream in self.streams]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    tick(self._bytes())
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        tick(self._bytes())
        results = [stream.result() for stream in self.streams]
        complete = all(result.error is None for result in results)
        return SinkResult(complete=complete, bytes=self._bytes(), streams=results)

    def stop(self) -> None:
        """End after the sockets' buffers have been read, for a limited time. Safe in a signal handler."""
        self._stop_at = min(self._stop_at, time.monotonic() + _STOP_SECONDS)

    def close(self) -> None:
        """Close all streams."""
        for stream in self.streams:
            stream.socket.close()

    def _bytes(self) -> int:
        return sum(stream.digest.bytes for stream in self.streams)

    def _read(self, stream: SinkStream) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while time.monotonic() < self._stop_at:
            try:
                count = stream.socket.recv_into(buffer)
            except TimeoutError:
                if self._stop_at < math.inf or self._idle():
                    return
                continue
            except OSError as error:
                stream.error = f"the connection broke: {error.strerror}"
                return
            if not count:
                stream.error = "the switch closed the connection"
                return
            stream.last = time.monotonic()
            stream.digest.update(stream.digest.bytes, buffer[:count])

    def _idle(self) -> bool:
        newest = max(stream.last for stream in self.streams)
        return newest > 0 and time.monotonic() - newest > self._job.idle_timeout


def main() -> int:
    """Return 0 if every stream is complete, 1 if not, 2 for invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.traffic.sink",
        description=__doc__,
        epilog="example: python -m topologies.traffic.sink --job J.yaml --config S.json --result R.json",
    )
    parser.add_argument("--job", required=True, type=Path, help="the training job, whose keys are used")
    parser.add_argument("--config", required=True, type=Path, help="the streams, as JSON (see SinkJob)")
    parser.add_argument("--result", required=True, type=Path, help="where to write the result as JSON")
    arguments = parser.parse_args()
    try:
        job = read_config(arguments.config, SinkJob)
        if shortfall := tcp_memory_shortfall(len(job.streams), job.receive_buffer):
            print(f"warning: {shortfall}", file=sys.stderr)
        sink = Sink(job, access(read_job(arguments.job), Role.SHADOW).secret(Secret.HELLO))
    except (BadDescription, JobError, KeysError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return _run(sink, arguments.result)
    except (StreamError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        sink.close()


def _run(sink: Sink, result_file: Path) -> int:
    start = time.monotonic()
    sink.connect()
    keep_only(*to_read([]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sink.stop())
    print(f"ready: {len(sink.streams)} streams connected in {time.monotonic() - start:.1f} s", flush=True)
    reported = 0

    def tick(total: int) -> None:
        nonlocal reported
        if total != reported:
            reported = total
            print(f"received {total}", flush=True)

    result = sink.run(tick)
    result_file.write_text(result.model_dump_json(indent=1) + "\n")
    for stream in result.streams:
        if stream.error:
            name = f"boundary {stream.boundary}, channel {stream.channel}, shadow id {stream.shadow_id}"
            print(f"{name}: {stream.error}", file=sys.stderr)
    return 0 if result.complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
