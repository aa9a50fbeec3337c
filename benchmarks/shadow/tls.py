"""The cost of TLS on step records and on reading a shard: a node with keys against one without, in turns."""

from __future__ import annotations

import datetime as dt
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, Result, number, ratios
from checkmate.job.schema import Job
from checkmate.keys.making import make_keys
from checkmate.keys.roles import Role
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.admission import CallerGate
from checkmate.shadow.inbox import Inbox
from testbed.copies import Copies, local_job
from testbed.jobs import keys_of
from testbed.measured_node import SHAPES, Forgetful, node
from testbed.record_line import RecordLine
from testbed.small_training import RUN, START
from topologies.training.record import interval

TITLE = "TLS: time with keys / without, pair by pair"
PAIRS: Final = 30
RECORDS: Final = 40
RECORD_BYTES: Final = 130_000
"""As large as a record of the demo's model."""

Timed = Callable[[], float]


def measure() -> list[Result]:
    """Return every figure of this module."""
    with tempfile.TemporaryDirectory() as folder:
        return [_records(Path(folder, "records")), _fetch(Path(folder, "fetch"))]


def _jobs(folder: Path) -> tuple[Job, Job]:
    """Return a job with keys, and one without."""
    secure = local_job(nodes=1, ranks=2)
    make_keys([(secure, folder)], dt.datetime.now(dt.UTC))
    return replace(secure, keys=folder), local_job(nodes=1, ranks=2)


def _records(folder: Path) -> Result:
    folder.mkdir()
    with ExitStack() as stack:
        secure, plain = (_sender(job, stack) for job in _jobs(folder))
        return _compare(f"{RECORDS} step records of 130 kB, each answered", secure, plain)


def _sender(job: Job, stack: ExitStack) -> Timed:
    """Return a function that sends step records to an inbox, and returns the seconds to the last answer."""
    keys = keys_of(job, Role.SHADOW)
    gate = CallerGate(job, keys) if keys is not None else None
    listener = socket.create_server(job.node(0).records_at)
    inbox = Inbox(listener, lambda part, *_: pb.RecordReply(iteration=part.iteration), gate)
    stack.callback(inbox.stop)
    inbox.start()
    line = RecordLine(job, 0, keys_of(job, Role.TRAINER))
    stack.callback(line.close)
    part = pb.RecordPart(job=job.job, rng=bytes(RECORD_BYTES))

    def send() -> float:
        start, total = time.perf_counter(), len(line.replies) + RECORDS
        for part.iteration in range(RECORDS):
            line.send(part)
        while len(line.replies) < total:
            time.sleep(0.0005)
        return time.perf_counter() - start

    return send


def _fetch(folder: Path) -> Result:
    folder.mkdir()
    nbytes = sum(4 * rows * columns for rows, columns in SHAPES)
    with ExitStack() as stack:
        secure, plain = (_fetcher(job, stack) for job in _jobs(folder))
        return _compare(f"Fetch of {nbytes / 1e6:.0f} MB of parameters", secure, plain)


def _fetcher(job: Job, stack: ExitStack) -> Timed:
    """Return a function that reads all of a shard from a node's process, and returns the seconds."""
    stack.enter_context(node(job))
    copies = Copies(job)
    stack.callback(copies.close)
    training = Forgetful(job, copies, shapes=SHAPES)
    stack.callback(training.close)
    training.begin([0])
    training.seed_all()
    iteration = training.iterate()
    stub = training.stubs[0]
    stub.Fence(pb.FenceRequest(protocol=PROTOCOL, job=job.job, timeout=30), timeout=40)
    settle = pb.SettleRequest(job=job.job, iteration=iteration, run=RUN, continues=START)
    stub.Settle(settle, timeout=30)
    request = pb.FetchRequest(job=job.job, shard=pb.Shard(), iteration=iteration)

    def fetch() -> float:
        start = time.perf_counter()
        for _ in stub.Fetch(request, timeout=60):
            pass
        return time.perf_counter() - start

    return fetch


def _compare(name: str, secure: Timed, plain: Timed) -> Figure:
    for warm in (secure, plain):
        warm()
    with_keys: list[float] = []
    without: list[float] = []
    for pair in range(PAIRS):
        for act, times in ((secure, with_keys), (plain, without))[:: -1 if pair % 2 else 1]:
            times.append(act())
    pair_ratios = ratios(with_keys, without)
    mean = interval(list(pair_ratios))
    absolute = " and ".join(number(1000 * statistics.median(times)) for times in (with_keys, without))
    note = f"mean {number(mean.mean)}, 95% interval {number(mean.low)} to {number(mean.high)}; {absolute} ms"
    return Figure(name, pair_ratios, "", smaller=True, note=note)
