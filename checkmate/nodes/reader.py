"""Reads shards from shadow nodes, each verified; many at once, from another holder if one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import grpc
import torch

from checkmate import state
from checkmate.nodes.headers import Asked, check_header
from checkmate.nodes.shards import Shard
from checkmate.nodes.standing import lacking
from checkmate.nodes.stubs import Stubs, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.wire.layout import Layout

States = dict[int, tuple[torch.Tensor, dict[str, object]]]
"""Parameters by number: the tensor, and the optimizer state."""

Accept = Callable[[pb.SeedHeader, Layout], None]
"""Looks at what a node is about to send. `StateError` passes the node over, other exceptions end the read."""

_LEAST_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ShardState:
    """A shard as a node gave it: parameters and their optimizer state, and what else its header has."""

    header: pb.SeedHeader
    layout: Layout
    states: States


@dataclass(frozen=True)
class Reading:
    """How shards are read.

    `deadline`: on the monotonic clock. `step_seconds`: for a node to step the iteration; one that isn't
    stepped so soon may never be. `progress` is told of bytes as they come, from several threads.
    """

    deadline: float
    step_seconds: float | None = None
    progress: Callable[[int], None] = lambda nbytes: None
    accept: Accept = lambda header, layout: None


@dataclass
class _Tried:
    """What came of a shard: its state, or what each node that was asked said."""

    shard: Shard
    state: ShardState | None = None
    troubles: list[tuple[int, str]] = field(default_factory=list)
    wrong: bool = False


def read_shard(stub: ShadowStub, asked: Asked, how: Reading) -> ShardState:
    """Read a shard from one node. `StateError` if it is another one, or damaged; `grpc.RpcError`."""
    request = pb.FetchRequest(
        job=asked.job,
        shard=pb.Shard(group=asked.group, shard=asked.shard),
        iteration=asked.iteration,
        parameters=asked.parameters,
    )
    stream = stub.Fetch(request, timeout=max(how.deadline - time.monotonic(), _LEAST_SECONDS))
    try:
        with _cancelled_after(how.step_seconds, stream):
            reader = state.from_seeds(stream)
        layout = check_header(reader.header, asked)
        how.accept(reader.header, layout)
        states: States = {}
        for number, tensor, values in reader:
            states[number] = (tensor, values)
            how.progress(sum(v.nbytes for v in (tensor, *values.values()) if isinstance(v, torch.Tensor)))
        return ShardState(reader.header, layout, states)
    finally:
        stream.cancel()  # of what has ended, nothing


def read_shards(stubs: Stubs, wanted: Mapping[Asked, Sequence[int]], how: Reading) -> dict[Shard, ShardState]:
    """Read shards, all at once, each from the first of its nodes that gives it. `Lacking` if none does."""
    with ThreadPoolExecutor(max(len(wanted), 1), thread_name_prefix="read") as pool:
        tried = list(pool.map(lambda asked: _from_any(stubs, asked, wanted[asked], how), wanted))
    failed = [one for one in tried if one.state is None]
    if failed:
        wrong = [one.shard for one in failed if one.wrong]
        raise lacking(stubs.job, {one.shard: one.troubles for one in failed}, wrong)
    return {one.shard: one.state for one in tried if one.state is not None}


def _from_any(stubs: Stubs, asked: Asked, nodes: Sequence[int], how: Reading) -> _Tried:
    tried = _Tried((asked.group, asked.shard))
    for node in nodes:
        try:
            tried.state = read_shard(stubs.to(node), asked, how)
            return tried
        except state.StateError as error:
            tried.wrong = True
            tried.troubles.append((node, str(error)))
        except grpc.RpcError as error:
            tried.troubles.append((node, _reason(error, how)))
    return tried


def _reason(error: grpc.RpcError, how: Reading) -> str:
    cancelled = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.CANCELLED
    if cancelled and how.step_seconds is not None:
        return f"the iteration was not stepped within {how.step_seconds:g} s"
    return reason(error)


@contextmanager
def _cancelled_after(seconds: float | None, call: grpc.Call) -> Iterator[None]:
    """Cancel a call that is waited for longer than this."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, call.cancel)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
