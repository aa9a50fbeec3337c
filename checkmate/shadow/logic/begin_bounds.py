"""Limits of a `Begin`, checked before the layout is read and before anything is allocated. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from checkmate.job.schema import Job
from checkmate.optim.supported import FROZEN, SUPPORTED
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.bounds import (
    INCARNATIONS,
    ITERATIONS_MAX,
    check_group,
    check_protocol,
    check_start,
    check_text,
)
from checkmate.shadow.logic.group import CallRefused, check_job
from checkmate.wire.layout import Layout, LayoutError, from_json
from checkmate.wording import size

LAYOUT_MAX: Final = 32 << 20
"""Characters of a layout: two hundred thousand parameters."""
OPTIONS_MAX: Final = 1 << 20
"""Characters of one parameter group's options."""
NAME_MAX: Final = 4096
THREADS_MAX: Final = 4096
SETS: Final = 3
"""A shard's bytes are held this often at least: parameters, and two sets of gradients."""


def check_begin(job: Job, request: pb.BeginRequest, shards: Iterable[int], memory: int) -> Layout:
    """Return the layout of a `Begin`. Raise `CallRefused` if it does not fit the job or this machine.

    Args:
        job: the node's job.
        request: the request.
        shards: those of the group that this node holds.
        memory: bytes of this machine.
    """
    check_protocol(request.protocol)
    check_job(job, request.job)
    check_group(job, request.group)
    if request.incarnation >= INCARNATIONS:
        raise CallRefused(f"incarnation {request.incarnation}: must be a number from 0 to 255")
    if not 0 <= request.first_iteration <= request.next_iteration <= ITERATIONS_MAX:
        raise CallRefused(
            f"first iteration {request.first_iteration}, next {request.next_iteration}: neither may be "
            f"negative or above {ITERATIONS_MAX}, nor the next below the first"
        )
    check_start("start", request.start)
    check_start("continues", request.continues)
    for what in ("run", "torch", "capability", "device"):
        check_text(what, getattr(request, what))
    ranks = len(job.dp_groups[request.group].ranks)
    if request.ranks != ranks:
        raise CallRefused(f"{request.ranks} ranks: DP group {request.group} of job {job.job} has {ranks}")
    layout = _layout(job, request)
    _check_optimizer(request.optimizer, len(layout.parameters))
    _check_names(request)
    _check_memory(layout, set(shards), memory)
    return layout


def _layout(job: Job, request: pb.BeginRequest) -> Layout:
    check_text("the layout", request.layout, LAYOUT_MAX)
    try:
        layout = from_json(request.layout)
    except LayoutError as error:
        raise CallRefused(str(error)) from None
    shards = job.shards(request.group)
    if layout.shards != shards:
        raise CallRefused(
            f"a layout of {layout.shards} shards: DP group {request.group} of job {job.job} has {shards}; "
            "trainers and shadow nodes must read the same job file"
        )
    return layout


def _check_optimizer(spec: pb.OptimizerSpec, parameters: int) -> None:
    """Refuse an unknown optimizer, or parameters that the layout does not have or that come twice."""
    if spec.name not in SUPPORTED:
        raise CallRefused(f"unsupported optimizer: {spec.name[:NAME_MAX] or '(unnamed)'}")
    if spec.threads > THREADS_MAX:
        raise CallRefused(f"{spec.threads} threads in training; at most {THREADS_MAX} are supported")
    check_text("default_dtype", spec.default_dtype)
    seen: set[int] = set()
    for index, group in enumerate(spec.groups):
        check_text(f"parameter group {index}: its options", group.options, OPTIONS_MAX)
        numbers = [number for number in group.parameters if number != FROZEN]
        if numbers and (wrong := max(numbers)) >= parameters:
            raise CallRefused(f"parameter group {index} has parameter {wrong}; the layout has {parameters}")
        if len(set(numbers)) < len(numbers) or not seen.isdisjoint(numbers):
            raise CallRefused(f"parameter group {index} has a parameter that comes twice")
        seen.update(numbers)
        if group.names and len(group.names) != len(group.parameters):
            raise CallRefused(
                f"parameter group {index} has {len(group.names)} names, but not for each parameter"
            )


def _check_names(request: pb.BeginRequest) -> None:
    for name in (*request.names.keys(), *request.names.values(), *request.buffers):
        check_text("a tensor's name", name, NAME_MAX)
    if len(set(request.buffers)) < len(request.buffers):
        raise CallRefused("a buffer's name comes twice")


def _check_memory(layout: Layout, shards: set[int], memory: int) -> None:
    nbytes = sum(layout.parameters[number].nbytes for shard in shards for number in layout.of_shard(shard))
    if SETS * nbytes > memory:
        raise CallRefused(
            f"its shards have {size(nbytes)} of parameters, of which this node needs at least {SETS} times "
            f"as much; this machine has {size(memory)} of memory: use more shadow nodes"
        )
