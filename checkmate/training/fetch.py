"""Fetches a DP group's shards from their holders, in parallel, and checks that they are what was asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import torch

from checkmate import state
from checkmate.consolidate.headers import Asked, check_header, most_parts, record_of
from checkmate.layout import Layout, Parameter, from_json
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.client import Stubs, reason
from checkmate.training.target import names, spread

States = dict[int, tuple[torch.Tensor, dict[str, object]]]
"""Parameters by number: the tensor, and the optimizer state."""


class FetchError(RuntimeError):
    """A shard can't be had, or isn't what was asked for."""


@dataclass(frozen=True)
class Wanted:
    """What to fetch: all shards of a DP group at an iteration of a run, and who holds each."""

    job: str
    group: int
    run: str
    iteration: int
    holders: Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Fetched:
    """A DP group's whole state, the record of its iteration, and the optimizer that it is of."""

    states: States
    record: pb.IterationRecord
    optimizer: pb.OptimizerSpec
    same_buckets: bool
    """Whether the buckets were the same too, so that the nodes may go on with what they have."""


def fetch(wanted: Wanted, layout: Layout, stubs: Stubs, rank: int, timeout: float) -> Fetched:
    """All shards at once; `FetchError` where one can't be had from any of its holders, or lacks buffers.

    Buffers may come with any shard. Before the first iteration they are what the script makes.
    """
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(len(wanted.holders), thread_name_prefix="fetch") as threads:
        jobs = [
            threads.submit(_fetch_shard, wanted, shard, spread(holders, rank), layout, stubs, deadline)
            for shard, holders in wanted.holders.items()
        ]
        shards = [job.result() for job in jobs]
    states = {number: values for _, values_of in shards for number, values in values_of.items()}
    headers = [header for header, _ in shards]
    record, without = record_of(headers)
    if without and record.parts:
        shards_named = names((wanted.group, shard) for shard in sorted(wanted.holders))
        raise FetchError(
            f"no holder of {shards_named} has {len(without)} of the model's buffers and frozen parameters: "
            f"{', '.join(without)}"
        )
    same = all(from_json(header.layout).fingerprint == layout.fingerprint for header in headers)
    return Fetched(states, record, most_parts(headers).optimizer, same)


def _fetch_shard(
    wanted: Wanted, shard: int, holders: Sequence[int], layout: Layout, stubs: Stubs, deadline: float
) -> tuple[pb.SeedHeader, States]:
    """One shard, from the first of its holders that gives it."""
    request = pb.FetchRequest(
        job=wanted.job, shard=pb.Shard(group=wanted.group, shard=shard), iteration=wanted.iteration
    )
    troubles = []
    for node in holders:
        try:
            stream = stubs.to(node).Fetch(request, timeout=max(deadline - time.monotonic(), 0.1))
            reader = state.from_seeds(stream)
            _check(reader.header, wanted, shard, layout)
            return reader.header, reader.all()
        except grpc.RpcError as error:
            troubles.append(f"shadow node {node}: {reason(error)}")
        except state.StateError as error:
            troubles.append(f"shadow node {node}: {error}")
    raise FetchError(f"shard {shard} of DP group {wanted.group}: {'; '.join(troubles)}")


def _check(header: pb.SeedHeader, wanted: Wanted, shard: int, layout: Layout) -> None:
    """`StateError` where a stream is of something else; `FetchError` where the model is another one."""
    theirs = check_header(header, Asked(wanted.job, wanted.run, wanted.iteration, wanted.group, shard))
    difference = different(theirs, layout)
    if difference:
        raise FetchError(f"the shadow nodes hold another model: {difference}; fresh=True starts anew")


def different(theirs: Layout, ours: Layout) -> str:
    """How a stored model differs from ours, in words; empty where it doesn't. Buckets may differ."""
    if theirs.shards != ours.shards:
        return f"it is cut into {theirs.shards} shards, ours into {ours.shards}"
    for old, new in zip(theirs.parameters, ours.parameters, strict=False):
        if old != new:
            return f"{_shown(old)} stands where ours has {_shown(new)}"
    if len(theirs.parameters) != len(ours.parameters):
        return f"it has {len(theirs.parameters)} trained parameters, ours {len(ours.parameters)}"
    return ""


def _shown(parameter: Parameter) -> str:
    return f"{parameter.name} {list(parameter.shape)} {parameter.dtype}"
