"""Reads a model's state from the shadow nodes, and installs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from checkmate.base.wording import counted
from checkmate.events.kinds import RESTORE_INSTALLED
from checkmate.events.process_log import say, seconds_since
from checkmate.nodes.other_ranks import BY_DISK, OtherRanks
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
    install_copied,
    install_frozen,
    install_gradients,
    install_optimizer,
    install_options,
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
    copied = watched.copied
    layouts = lay_out_shares(watched.model, place, slicing_of(place, watched.model), copied)
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
    fetched = fetch(requests, layouts, stubs, place, timeout, copied=copied is not None)
    if survivor is not None:
        fetched = replace(fetched, states=survivor.as_held(own_numbers), survivor=survivor)
    if plan.iteration >= 0 and not fetched.record.parts:
        raise FetchError(f"the record of iteration {plan.iteration} is missing")
    spec = spec_of(watched.optimizer, numbers) if copied is None else copied.spec
    check_optimizer(fetched.optimizer, spec)
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
    recorded = [group.options for group in fetched.optimizer.groups]
    step = part_of(fetched.record, 0).step
    options = step.next_options or recorded
    install_gradients(parameters, set(step.with_gradient))
    if watched.copied is None:
        install_parameters(parameters, states)
        install_optimizer(watched.optimizer, numbers, states, options, fetched.record)
    else:
        tensors = {number: tensor for number, (tensor, _) in states.items()}
        install_copied(watched.copied, tensors, fetched.record, place.position, start.next_iteration)
        install_frozen(watched.optimizer, fetched.record)
        install_options(watched.optimizer, options)
    start.keep, start.copied = fetched.same_buckets, watched.copied
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
    *,
    copied: bool = False,
) -> Fetched:
    """Fetch all shards of a model at once.

    Buffers may come with any shard. Before the first iteration there are none: the script creates them.

    Args:
        requests: The shards and their holders.
        layouts: The layouts of the DP groups that train the model, by group.
        stubs: Stubs of the job's nodes.
        place: This rank's place. Its number rotates the order of the holders.
        timeout: In seconds, for all shards together.
        copied: Whether the script has its optimizer's state copied.

    Raises:
        FetchError: None of a shard's holders returns it, or buffers are missing, or the model differs.
        OtherRanks: The nodes hold other parts of the model.
    """
    how = ShardReading(time.monotonic() + timeout, accept=partial(_check_model, layouts, copied))
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


_WAYS: Final = {True: "copies of the optimizer's state", False: "what they have stepped themselves"}


def check_way(spec: pb.OptimizerSpec, *, copied: bool) -> None:
    """Raise `FetchError` if nodes have the optimizer's state in another way than the script."""
    if spec.copied != copied:
        raise FetchError(
            f"the shadow nodes hold {_WAYS[spec.copied]}, and the script resumes from {_WAYS[copied]}: "
            "construct the optimizer as before, and give checkmate.restore and checkmate.protect the same "
            "follow= as before"
        )


def _check_model(
    layouts: Mapping[int, Layout], copied: bool, header: pb.SeedHeader, held_layout: Layout
) -> None:
    """Raise `FetchError` if the nodes hold another model, and `OtherRanks` if other parts of it."""
    check_way(header.optimizer, copied=copied)
    layout = layouts[header.shard.group]
    difference = different(held_layout, layout)
    if difference and in_other_parts(held_layout, layout):
        raise OtherRanks(
            f"the shadow nodes hold other parts of the model in DP group {header.shard.group}: {difference}. "
            f"{BY_DISK}"
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
    old = {parameter.name: parameter for parameter in held_layout.trained}
    both = [(old[parameter.name], parameter) for parameter in script_layout.trained if parameter.name in old]
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
    of_state = f"{parameter.state} of " if parameter.state else ""
    return f"{of_state}{parameter.name} {list(parameter.shape)}{chunk} {parameter.dtype}"
