"""Reads a model's state from the shadow nodes, and installs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checkmate.events.kinds import RESTORE_INSTALLED
from checkmate.events.saying import say, seconds_since
from checkmate.nodes.other_ranks import RESHARDING, OtherRanks
from checkmate.nodes.reader import Asked, ShardReading, States, most_parts, read_shards, record_of
from checkmate.nodes.standing import Lacking, name
from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import from_held
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import (
    check_optimizer,
    check_record,
    install_gradients,
    install_optimizer,
    install_parameters,
    install_record,
    part_of,
)
from checkmate.training.start.membership import Membership, Start, lay_out_shares
from checkmate.training.start.nccl_runtime import slicing_of
from checkmate.training.start.plans import FromNodes
from checkmate.training.start.sharing import Readers, part_of_all
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import Parameter
from checkmate.wording import counted


def read(
    place: Membership,
    watched: Watched,
    stubs: Stubs,
    plan: FromNodes,
    timeout: float,
    readers: Readers | None,
) -> Fetched:
    """Read the planned iteration: this rank's part if it has other readers, else all; check that it fits.

    Raises:
        FetchError: It can't be read, or is not of this model, or its record is missing.
        InstallError: It does not fit the script's optimizer.
        OtherRanks: It is of other ranks, or of other parts of the model.
    """
    layouts = lay_out_shares(watched.model, place, slicing_of(place, watched.model))
    numbers = {parameter: number for number, parameter in enumerate(watched.model.trained().values())}
    wanted: dict[Asked, Sequence[int]] = {
        Asked(place.job.job, plan.run, plan.iteration, group, shard): nodes
        for (group, shard), nodes in plan.holders.items()
        if group in layouts
    }
    needed = frozenset(n for one in wanted for n in layouts[one.group].of_shard(one.shard))
    if readers:
        wanted = part_of_all(wanted, layouts, readers)
    got = fetch(wanted, layouts, stubs, place, timeout)
    if plan.iteration >= 0 and not got.record.parts:
        raise FetchError(f"the record of iteration {plan.iteration} is missing")
    check_optimizer(got.optimizer, spec_of(watched.optimizer, numbers))
    check_record(got.record, watched, place)
    return replace(got, needed=needed)


def install(place: Membership, watched: Watched, start: Start, got: Fetched) -> Any:
    """Install all of a model's state, once all readers have shared it; return the user's `extra`.

    Raises:
        FetchError: Something is missing, or is not of this model.
        InstallError: It does not fit the script.
    """
    began = time.monotonic()
    if differs := got.needed ^ got.states.keys():
        raise FetchError(
            f"the ranks have read {len(got.states)} of {len(got.needed)} parameters, and not "
            f"{got.parameters[min(differs)].name}"
        )
    parameters = list(watched.model.trained().values())
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    states = {n: from_held(got.parameters[n], *values) for n, values in got.states.items()}
    install_parameters(parameters, states)
    given = [group.options for group in got.optimizer.groups]
    options = part_of(got.record, 0).step.next_options or given
    install_gradients(parameters, set(part_of(got.record, 0).step.with_gradient))
    install_optimizer(watched.optimizer, numbers, states, options, got.record)
    start.keep = got.same_buckets
    start.record = got.record
    extra = install_record(watched, got.record, place.position)
    installed = RESTORE_INSTALLED(iteration=start.next_iteration - 1, seconds=seconds_since(began))
    say(logging.DEBUG, installed, "state installed")
    return extra


class FetchError(RuntimeError):
    """A shard is not available, or is not the requested one."""


@dataclass(frozen=True)
class Fetched:
    """A model's complete state, and the record and the optimizer of this rank's DP group."""

    parameters: Sequence[Parameter]
    """The nodes' parameters: the state is in their memory order, which may differ from ours."""
    states: States
    record: pb.IterationRecord
    optimizer: pb.OptimizerSpec
    same_buckets: bool
    """Whether buckets and memory order are the same, so that the nodes can continue with their own state."""
    needed: frozenset[int] = frozenset()
    """The parameters that this rank needs; other ranks may have read some of them."""


def fetch(
    wanted: Mapping[Asked, Sequence[int]],
    layouts: Mapping[int, Layout],
    stubs: Stubs,
    place: Membership,
    timeout: float,
) -> Fetched:
    """Fetch all shards of a model at once.

    Buffers may come with any shard. Before the first iteration there are none: the script creates them.

    Args:
        wanted: The shards and their holders.
        layouts: The layouts of the DP groups that train the model, by group.
        stubs: Stubs of the job's nodes.
        place: This rank's place. Its number rotates the order of the holders.
        timeout: In seconds, for all shards together.

    Raises:
        FetchError: None of a shard's holders returns it, or buffers are missing, or the model differs.
        OtherRanks: The nodes hold other parts of the model.
    """
    how = ShardReading(time.monotonic() + timeout, accept=partial(_check_model, layouts))
    try:
        order = {asked: spread(holders, place.rank) for asked, holders in wanted.items()}
        found = read_shards(stubs, order, how)
    except Lacking as error:
        raise FetchError(str(error)) from None
    states = {number: values for shard in found.values() for number, values in shard.states.items()}
    shards = [shard for (group, _), shard in found.items() if group == place.group]
    headers = [shard.header for shard in shards]
    record, without = record_of(headers)
    if without and record.parts:
        shards_named = ", ".join(name(shard) for shard in sorted(found) if shard[0] == place.group)
        raise FetchError(
            f"no holder of {shards_named} has {len(without)} of the model's buffers and frozen parameters: "
            f"{', '.join(without)}"
        )
    same = all(shard.layout.fingerprint == layouts[place.group].fingerprint for shard in shards)
    return Fetched(shards[0].layout.parameters, states, record, most_parts(headers).optimizer, same)


def spread(holders: Sequence[int], rank: int) -> list[int]:
    """Return a shard's holders in the order in which a rank tries them, so that the load is even."""
    start = rank % len(holders) if holders else 0
    return [*holders[start:], *holders[:start]]


def _check_model(ours: Mapping[int, Layout], header: pb.SeedHeader, theirs: Layout) -> None:
    """Raise `FetchError` if the nodes hold another model, and `OtherRanks` if other parts of it."""
    own = ours[header.shard.group]
    difference = different(theirs, own)
    if difference and in_other_parts(theirs, own):
        raise OtherRanks(
            f"the shadow nodes hold other parts of the model in DP group {header.shard.group}: {difference}. "
            f"{RESHARDING}"
        )
    if difference:
        raise FetchError(
            f"the shadow nodes hold another model: {difference}: run the script with the model as it was; or "
            "keep that state with `checkmate consolidate`, and train the new model as another job"
        )


def different(theirs: Layout, ours: Layout) -> str:
    """Return how a stored model differs from ours, in words, or "".

    Buckets, memory order and the types of gradients may differ.
    """
    if theirs.shards != ours.shards:
        return f"it is divided into {counted(theirs.shards, 'shard')}, ours into {ours.shards}"
    if theirs.share != ours.share:
        return f"{theirs.share.count} ranks of a host have a share of it, of ours {ours.share.count}"
    for old, new in zip(theirs.parameters, ours.parameters, strict=False):
        if _compared(old) != _compared(new):
            return f"it has {_shown(old)} in place of {_shown(new)}"
    if len(theirs.parameters) != len(ours.parameters):
        return f"it has {len(theirs.parameters)} trained parameters, ours {len(ours.parameters)}"
    return ""


def in_other_parts(theirs: Layout, ours: Layout) -> bool:
    """Return whether a stored model differs from ours because ranks share it out in another way."""
    if theirs.share != ours.share:
        return True
    old = {known.name: known for known in theirs.parameters}
    both = [(old[known.name], known) for known in ours.parameters if known.name in old]
    same = [(one, other) for one, other in both if (one.whole or one.shape) == (other.whole or other.shape)]
    return any((one.shape, one.offset) != (other.shape, other.offset) for one, other in same)


def _compared(parameter: Parameter) -> Parameter:
    """Return what of a parameter has to stay the same."""
    return replace(parameter, dim_order=(), gradient="")


def _shown(parameter: Parameter) -> str:
    chunk = f" at {list(parameter.offset)} of {list(parameter.whole)}" if parameter.whole else ""
    return f"{parameter.name} {list(parameter.shape)}{chunk} {parameter.dtype}"
