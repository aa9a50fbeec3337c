"""Reads a model's state from the shadow nodes, and installs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checkmate.base.wording import counted
from checkmate.events.kinds import RESTORE_INSTALLED
from checkmate.events.process_log import say, seconds_since
from checkmate.nodes.other_ranks import RESHARDING, OtherRanks
from checkmate.nodes.reader import ShardReading, ShardRequest, States, most_parts, read_shards, record_of
from checkmate.nodes.standing import Lacking, name
from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import from_held
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import (
    InstallError,
    check_optimizer,
    check_record,
    install_gradients,
    install_optimizer,
    install_parameters,
    install_record,
    part_of,
)
from checkmate.training.start.nccl_runtime import slicing_of
from checkmate.training.start.places import Place, Start, lay_out_shares
from checkmate.training.start.plans import FromNodes
from checkmate.training.start.sharing import Readers, part_of_all
from checkmate.training.start.survivor import Survivor
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import Parameter


def read(
    place: Place,
    watched: Watched,
    stubs: Stubs,
    plan: FromNodes,
    timeout: float,
    readers: Readers | None,
    survivor: Survivor | None = None,
) -> Fetched:
    """Read the planned iteration: this rank's part if it has other readers, else all; check that it fits.

    A `survivor` has the state already, and reads the record alone.

    Raises:
        FetchError: It can't be read, or is not of this model, or its record is missing.
        InstallError: It does not fit the script's optimizer.
        OtherRanks: It is of other ranks, or of other parts of the model.
    """
    layouts = lay_out_shares(watched.model, place, slicing_of(place, watched.model))
    numbers = {parameter: number for number, parameter in enumerate(watched.model.trained().values())}
    requests: dict[ShardRequest, Sequence[int]] = {
        ShardRequest(place.job.job, plan.run, plan.iteration, group, shard): nodes
        for (group, shard), nodes in plan.holders.items()
        if group in layouts
    }
    needed_numbers = frozenset(
        n for request in requests for n in layouts[request.group].of_shard(request.shard)
    )
    own_numbers = needed_numbers
    if readers:
        requests = part_of_all(requests, layouts, readers)
        own_numbers = frozenset(n for request in requests for n in request.parameters or ())
    if survivor is not None:
        requests = {replace(request, parameters=()): nodes for request, nodes in requests.items()}
    fetched = fetch(requests, layouts, stubs, place, timeout)
    if survivor is not None:
        fetched = replace(fetched, states=survivor.as_held(own_numbers), survivor=survivor)
    if plan.iteration >= 0 and not fetched.record.parts:
        raise FetchError(f"the record of iteration {plan.iteration} is missing")
    check_optimizer(fetched.optimizer, spec_of(watched.optimizer, numbers))
    check_record(fetched.record, watched, place)
    return replace(fetched, needed_numbers=needed_numbers)


def install(place: Place, watched: Watched, start: Start, fetched: Fetched) -> Any:
    """Install all of a model's state, once all readers have shared it; return the user's `extra`.

    Raises:
        FetchError: Something is missing, or is not of this model.
        InstallError: It does not fit the script.
    """
    began = time.monotonic()
    if differs := fetched.needed_numbers ^ fetched.states.keys():
        raise FetchError(
            f"the ranks have read {len(fetched.states)} of {len(fetched.needed_numbers)} parameters, and not "
            f"{fetched.parameters[min(differs)].name}"
        )
    parameters = list(watched.model.trained().values())
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    states = {n: from_held(fetched.parameters[n], *values) for n, values in fetched.states.items()}
    if (survivor := fetched.survivor) is not None:
        if (number := survivor.differs(states)) is not None:
            raise InstallError(f"what survivors have kept differs in {fetched.parameters[number].name}")
        states = survivor.values
    install_parameters(parameters, states)
    recorded = [group.options for group in fetched.optimizer.groups]
    options = part_of(fetched.record, 0).step.next_options or recorded
    install_gradients(parameters, set(part_of(fetched.record, 0).step.with_gradient))
    install_optimizer(watched.optimizer, numbers, states, options, fetched.record)
    start.keep = fetched.same_buckets
    start.record = fetched.record
    extra = install_record(watched, fetched.record, place.position)
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
    needed_numbers: frozenset[int] = frozenset()
    """The parameters that this rank needs; other ranks may have read some of them."""
    survivor: Survivor | None = None
    """What this rank has kept of the state, if it has."""


def fetch(
    requests: Mapping[ShardRequest, Sequence[int]],
    layouts: Mapping[int, Layout],
    stubs: Stubs,
    place: Place,
    timeout: float,
) -> Fetched:
    """Fetch all shards of a model at once.

    Buffers may come with any shard. Before the first iteration there are none: the script creates them.

    Args:
        requests: The shards and their holders.
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
        order = {request: spread(holders, place.rank) for request, holders in requests.items()}
        shards_read = read_shards(stubs, order, how)
    except Lacking as error:
        raise FetchError(str(error)) from None
    states = {number: values for shard in shards_read.values() for number, values in shard.states.items()}
    shards = [shard for (group, _), shard in shards_read.items() if group == place.group]
    headers = [shard.header for shard in shards]
    record, without = record_of(headers)
    if without and record.parts:
        shards_named = ", ".join(name(shard) for shard in sorted(shards_read) if shard[0] == place.group)
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


def _check_model(layouts: Mapping[int, Layout], header: pb.SeedHeader, held_layout: Layout) -> None:
    """Raise `FetchError` if the nodes hold another model, and `OtherRanks` if other parts of it."""
    layout = layouts[header.shard.group]
    difference = different(held_layout, layout)
    if difference and in_other_parts(held_layout, layout):
        raise OtherRanks(
            f"the shadow nodes hold other parts of the model in DP group {header.shard.group}: {difference}. "
            f"{RESHARDING}"
        )
    if difference:
        raise FetchError(
            f"the shadow nodes hold another model: {difference}: run the script with the model as it was; or "
            "keep that state with `checkmate consolidate`, and train the new model as another job"
        )


def different(held_layout: Layout, script_layout: Layout) -> str:
    """Return how a stored model differs from ours, in words, or "".

    Buckets, memory order and the types of gradients may differ.
    """
    if held_layout.shards != script_layout.shards:
        held_shards = counted(held_layout.shards, "shard")
        return f"it is divided into {held_shards}, ours into {script_layout.shards}"
    if held_layout.share != script_layout.share:
        count = script_layout.share.count
        return f"{held_layout.share.count} ranks of a host have a share of it, of ours {count}"
    for old, new in zip(held_layout.parameters, script_layout.parameters, strict=False):
        if _compared(old) != _compared(new):
            return f"it has {_in_words(old)} in place of {_in_words(new)}"
    if len(held_layout.parameters) != len(script_layout.parameters):
        return (
            f"it has {len(held_layout.parameters)} trained parameters, ours {len(script_layout.parameters)}"
        )
    return ""


def in_other_parts(held_layout: Layout, script_layout: Layout) -> bool:
    """Return whether a stored model differs from ours because ranks share it out in another way."""
    if held_layout.share != script_layout.share:
        return True
    old = {parameter.name: parameter for parameter in held_layout.parameters}
    both = [
        (old[parameter.name], parameter) for parameter in script_layout.parameters if parameter.name in old
    ]
    same = [
        (before, after)
        for before, after in both
        if (before.whole or before.shape) == (after.whole or after.shape)
    ]
    return any((before.shape, before.offset) != (after.shape, after.offset) for before, after in same)


def _compared(parameter: Parameter) -> Parameter:
    """Return what of a parameter has to stay the same."""
    return replace(parameter, dim_order=(), gradient="")


def _in_words(parameter: Parameter) -> str:
    chunk = f" at {list(parameter.offset)} of {list(parameter.whole)}" if parameter.whole else ""
    return f"{parameter.name} {list(parameter.shape)}{chunk} {parameter.dtype}"
