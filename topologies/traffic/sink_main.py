"""`python -m topologies.traffic.sink_main`: the sink of a lab's shadow node.

It prints "ready" once all streams are connected, then "received N" as bytes arrive. Ctrl-C ends it with a
result.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from checkmate.job.files import JobError, read_job
from checkmate.keys.access import access
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, Secret
from checkmate.privileges import keep_only, to_read
from checkmate.shadow.receive.connect import StreamError, tcp_memory_shortfall
from topologies.traffic.config import read_config
from topologies.traffic.sink import Sink, SinkJob


def main() -> int:
    """Return 0 if every stream is complete, 1 if not, 2 for invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.traffic.sink_main",
        description=__doc__,
        epilog="example: python -m topologies.traffic.sink_main --job J.yaml --config S.json --result R.json",
    )
    parser.add_argument("--job", required=True, type=Path, help="the training job, whose keys are used")
    parser.add_argument("--config", required=True, help="the streams, as JSON (see SinkJob)")
    parser.add_argument("--result", required=True, help="where to write the result as JSON")
    arguments = parser.parse_args()
    job = read_config(arguments.config, SinkJob)
    if job is None:
        return 2
    if shortfall := tcp_memory_shortfall(len(job.streams), job.receive_buffer):
        print(f"warning: {shortfall}", file=sys.stderr)
    try:
        key = access(read_job(arguments.job), Role.SHADOW).secret(Secret.HELLO)
    except (JobError, KeysError) as error:
        print(error, file=sys.stderr)
        return 2
    sink = Sink(job, key)
    try:
        return _run(sink, Path(arguments.result))
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
    shown = 0

    def tick(total: int) -> None:
        nonlocal shown
        if total != shown:
            shown = total
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
