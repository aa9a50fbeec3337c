"""Reads a model's state from the shadow nodes, and installs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from checkmate.events.kinds import RESTORE_INSTALLED
from checkmate.events.saying import say, seconds_since
from checkmate.nodes.reader import Asked
from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.state import from_held
from checkmate.training.record.capture import Watched
from checkmate.training.start.fetch import Fetched, FetchError, fetch
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
from checkmate.training.start.plans import RestartPlan
from checkmate.training.start.sharing import Readers, part_of_all


def read(
    place: Membership,
    watched: Watched,
    stubs: Stubs,
    plan: RestartPlan,
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
    installed = RESTORE_INSTALLED(iteration=start.plan.iteration, seconds=seconds_since(began))
    say(logging.DEBUG, installed, "state installed")
    return extra
