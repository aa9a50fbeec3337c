"""Fetches a DP group's shards from their holders, in parallel, and checks that they are what was asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import grpc
import torch

from checkmate import state
from checkmate.layout import Layout, LayoutError, Parameter, from_json
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.client import Stubs, reason
from checkmate.training.target import spread

_log: Final = logging.getLogger("checkmate")

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
    """All shards at once; `FetchError` where one can't be had from any of its holders."""
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(len(wanted.holders), thread_name_prefix="fetch") as threads:
        jobs = [
            threads.submit(_fetch_shard, wanted, shard, spread(holders, rank), layout, stubs, deadline)
            for shard, holders in wanted.holders.items()
        ]
        shards = [job.result() for job in jobs]
    states = {number: values for _, values_of in shards for number, values in values_of.items()}
    headers = [header for header, _ in shards]
    # Parts are the same wherever they come from; a holder of no parameters may not have them.
    best = max(headers, key=lambda header: len(header.record.parts))
    record = pb.IterationRecord()
    record.CopyFrom(best.record)
    for header in headers:  # a node that has come late may lack buffers that another one has
        for name, data in header.record.buffers.items():
            if name not in record.buffers:
                record.buffers[name] = data
    _tell_missing(best, record)
    same = all(from_json(header.layout).fingerprint == layout.fingerprint for header in headers)
    return Fetched(states, record, best.optimizer, same)


def _tell_missing(header: pb.SeedHeader, record: pb.IterationRecord) -> None:
    """Log buffers that no node has got yet: they are sent a few at a time."""
    without = sorted(set(header.buffers) - record.buffers.keys()) if record.parts else []
    if without:
        _log.warning(
            "the shadow nodes lack buffers or frozen parameters, which stay as the script has made them: %s",
            ", ".join(without),
        )


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
            check_header(reader.header, wanted, shard, layout)
            return reader.header, reader.all()
        except grpc.RpcError as error:
            troubles.append(f"shadow node {node}: {reason(error)}")
        except state.StateError as error:
            troubles.append(f"shadow node {node}: {error}")
    raise FetchError(f"shard {shard} of DP group {wanted.group}: {'; '.join(troubles)}")


def check_header(header: pb.SeedHeader, wanted: Wanted, shard: int, layout: Layout) -> None:
    """`StateError` where a stream is of something else; `FetchError` where the model is another one."""
    said = (header.job, header.run, header.iteration, header.shard.group, header.shard.shard)
    asked = (wanted.job, wanted.run, wanted.iteration, wanted.group, shard)
    if said != asked:
        raise state.StateError(f"it sent {said}, not {asked} (job, run, iteration, group, shard)")
    try:
        theirs = from_json(header.layout)
    except LayoutError as error:
        raise state.StateError(str(error)) from None
    difference = different(theirs, layout)
    if difference:
        raise FetchError(f"the shadow nodes hold another model: {difference}; fresh=True starts anew")
    if set(header.parameters) != set(layout.of_shard(shard)):
        raise state.StateError("not all of the shard's parameters are announced")


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
