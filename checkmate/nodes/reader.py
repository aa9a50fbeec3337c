"""Reads and verifies shards from shadow nodes, in parallel, from another holder if one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import grpc
import torch

from checkmate import state
from checkmate.nodes.headers import Asked, check_header
from checkmate.nodes.standing import Lacking, Shard, lacking
from checkmate.nodes.stubs import Stubs, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.wire.layout import Layout

States = dict[int, tuple[torch.Tensor, dict[str, object]]]
"""Parameters by number: the tensor, and the optimizer state."""

Accept = Callable[[pb.SeedHeader, Layout], None]
"""Checks a stream's header. After a `StateError` the next node is tried; other exceptions end the read."""

_LEAST_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ShardState:
    """A shard as a node has sent it: parameters and their optimizer state, and the header."""

    header: pb.SeedHeader
    layout: Layout
    states: States


@dataclass(frozen=True)
class Reading:
    """How shards are read."""

    deadline: float
    """On the monotonic clock."""
    step_seconds: float | None = None
    """How long a node may take to step the iteration; a later one may never be stepped."""
    progress: Callable[[int], None] = lambda nbytes: None
    """Called with numbers of bytes as they arrive, from several threads."""
    accept: Accept = lambda header, layout: None


def read_shard(stub: ShadowStub, asked: Asked, how: Reading) -> ShardState:
    """Read a shard from one node.

    Raises:
        StateError: The node sent another shard, or damaged data.
        grpc.RpcError: The call failed.
    """
    request = pb.FetchRequest(
        job=asked.job,
        shard=pb.Shard(group=asked.group, shard=asked.shard),
        iteration=asked.iteration,
        parameters=asked.parameters,
    )
    stream = stub.Fetch(request, timeout=max(how.deadline - time.monotonic(), _LEAST_SECONDS))
    too_late = threading.Timer(how.step_seconds or 0, stream.cancel)
    try:
        if how.step_seconds is not None:
            too_late.start()
        reader = state.SeedReader(stream)  # the header comes once the iteration is stepped
        too_late.cancel()
        layout = check_header(reader.header, asked)
        how.accept(reader.header, layout)
        states: States = {}
        for number, tensor, values in reader.each(layout.parameters):
            states[number] = (tensor, values)
            how.progress(sum(v.nbytes for v in (tensor, *values.values()) if isinstance(v, torch.Tensor)))
        return ShardState(reader.header, layout, states)
    finally:
        too_late.cancel()
        stream.cancel()  # without effect if it has ended


def read_shards(stubs: Stubs, wanted: Mapping[Asked, Sequence[int]], how: Reading) -> dict[Shard, ShardState]:
    """Read shards in parallel, each from the first of its nodes that provides it.

    Args:
        stubs: Stubs of the job's nodes.
        wanted: The nodes of each shard, in the order in which to try them.
        how: Timeouts and callbacks.

    Raises:
        Lacking: No node provides some shard.
    """
    with ThreadPoolExecutor(max(len(wanted), 1), thread_name_prefix="read") as pool:
        tried = list(pool.map(lambda asked: _from_any(stubs, asked, wanted[asked], how), wanted))
    failed = [one for one in tried if isinstance(one, Lacking)]
    if failed:
        troubles = {shard: found for one in failed for shard, found in one.shards.items()}
        raise Lacking(troubles, frozenset(shard for one in failed for shard in one.wrong))
    found = zip(wanted, tried, strict=True)
    return {(asked.group, asked.shard): one for asked, one in found if isinstance(one, ShardState)}


def _from_any(stubs: Stubs, asked: Asked, nodes: Sequence[int], how: Reading) -> ShardState | Lacking:
    """Return a shard, or why no node provides it."""
    shard = (asked.group, asked.shard)
    troubles: list[tuple[int, str]] = []
    wrong: set[Shard] = set()
    for node in nodes:
        try:
            return read_shard(stubs.to(node), asked, how)
        except state.StateError as error:
            wrong.add(shard)
            troubles.append((node, str(error)))
        except grpc.RpcError as error:
            troubles.append((node, _reason(error, how)))
    return lacking(stubs.job, {shard: troubles}, wrong)


def _reason(error: grpc.RpcError, how: Reading) -> str:
    cancelled = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.CANCELLED
    if cancelled and how.step_seconds is not None:
        return f"the iteration was not stepped within {how.step_seconds:g} s"
    return reason(error)
