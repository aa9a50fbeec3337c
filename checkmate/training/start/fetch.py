"""Fetches a DP group's shards from their holders in parallel, and checks that they fit the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from checkmate.nodes.reader import Asked, Reading, States, most_parts, read_shards, record_of
from checkmate.nodes.standing import Lacking, name
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.layout import Layout, Parameter
from checkmate.wording import counted


class FetchError(RuntimeError):
    """A shard is not available, or is not the requested one."""


@dataclass(frozen=True)
class Fetched:
    """A DP group's complete state, the record of its iteration, and its optimizer."""

    layout: Layout
    """The nodes' layout: the state is in its memory order, which may differ from ours."""
    states: States
    record: pb.IterationRecord
    optimizer: pb.OptimizerSpec
    same_buckets: bool
    """Whether buckets and memory order are the same, so that the nodes can continue with their own state."""


def fetch(
    wanted: Mapping[Asked, Sequence[int]], layout: Layout, stubs: Stubs, rank: int, timeout: float
) -> Fetched:
    """Fetch all shards of a DP group at once.

    Buffers may come with any shard. Before the first iteration there are none: the script creates them.

    Args:
        wanted: The shards and their holders.
        layout: This rank's layout.
        stubs: Stubs of the job's nodes.
        rank: This rank's number, which rotates the order of the holders.
        timeout: In seconds, for all shards together.

    Raises:
        FetchError: None of a shard's holders returns it, or buffers are missing, or the model differs.
    """
    how = Reading(time.monotonic() + timeout, accept=partial(_check_model, layout))
    try:
        order = {asked: spread(holders, rank) for asked, holders in wanted.items()}
        shards = list(read_shards(stubs, order, how).values())
    except Lacking as error:
        raise FetchError(str(error)) from None
    states = {number: values for shard in shards for number, values in shard.states.items()}
    headers = [shard.header for shard in shards]
    record, without = record_of(headers)
    if without and record.parts:
        shards_named = ", ".join(name(shard) for shard in sorted((one.group, one.shard) for one in wanted))
        raise FetchError(
            f"no holder of {shards_named} has {len(without)} of the model's buffers and frozen parameters: "
            f"{', '.join(without)}"
        )
    same = all(shard.layout.fingerprint == layout.fingerprint for shard in shards)
    return Fetched(shards[0].layout, states, record, most_parts(headers).optimizer, same)


def spread(holders: Sequence[int], rank: int) -> list[int]:
    """Return a shard's holders in the order in which a rank tries them, so that the load is even."""
    start = rank % len(holders) if holders else 0
    return [*holders[start:], *holders[:start]]


def _check_model(ours: Layout, _: pb.SeedHeader, theirs: Layout) -> None:
    """Raise `FetchError` if the nodes hold another model."""
    difference = different(theirs, ours)
    if difference:
        raise FetchError(
            f"the shadow nodes hold another model: {difference}; `checkmate reset JOB` discards it"
        )


def different(theirs: Layout, ours: Layout) -> str:
    """Return how a stored model differs from ours, in words, or "".

    Buckets, memory order and the types of gradients may differ.
    """
    if theirs.shards != ours.shards:
        return f"it is divided into {counted(theirs.shards, 'shard')}, ours into {ours.shards}"
    for old, new in zip(theirs.parameters, ours.parameters, strict=False):
        if _compared(old) != _compared(new):
            return f"it has {_shown(old)} in place of {_shown(new)}"
    if len(theirs.parameters) != len(ours.parameters):
        return f"it has {len(theirs.parameters)} trained parameters, ours {len(ours.parameters)}"
    return ""


def _compared(parameter: Parameter) -> Parameter:
    """Return what of a parameter has to stay the same."""
    return replace(parameter, dim_order=(), gradient="")


def _shown(parameter: Parameter) -> str:
    chunk = f" at {list(parameter.offset)} of {list(parameter.whole)}" if parameter.whole else ""
    return f"{parameter.name} {list(parameter.shape)}{chunk} {parameter.dtype}"
