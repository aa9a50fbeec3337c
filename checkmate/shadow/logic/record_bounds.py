"""Limits of `Begin`, of step records and of the headers of seeds, checked before they are kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import difference, job_ranks
from checkmate.optim.options import OptionsError, parse_options
from checkmate.optim.supported import FROZEN, kind_of, why_unknown
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import INCARNATIONS, ITERATIONS_MAX
from checkmate.shadow.logic.bounds import (
    check_ahead,
    check_group,
    check_number,
    check_numbers,
    check_protocol,
    check_start,
    check_text,
)
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, check_job
from checkmate.shadow.replica.blocks import check_scalings
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout, from_json
from checkmate.wire.parameter import LayoutError
from checkmate.wire.schedule import FIRST, LAST
from checkmate.wording import counted, size

LAYOUT_MAX: Final = 32 << 20
"""Characters of a layout: two hundred thousand parameters."""
OPTIONS_MAX: Final = 1 << 20
"""Characters of one parameter group's options."""
NAME_MAX: Final = 4096
THREADS_MAX: Final = 4096
SETS: Final = 3
"""A shard's bytes are held this often at least: parameters, and two sets of gradients."""
SLICES_MAX: Final = 128
"""Slices of each shard; trainers send about 64."""
REPEATS_MAX: Final = 64
"""How often the scalings of a step may list each parameter; without a list, one lists all."""
UNSTEPPED_BYTES: Final = 1 << 30
"""Bytes of parts that wait for their step, beyond which only the next iterations' parts are taken."""
NEXT: Final = 2
_STATE_ITEMSIZE: Final = 8


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
    check_number("incarnation", request.incarnation, INCARNATIONS - 1)
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
        raise CallRefused(
            f"{counted(request.ranks, 'rank')}: DP group {request.group} of job {job.job} has {ranks}"
        )
    if found := difference(request.job_ranks, job_ranks(job)):
        raise CallRefused(
            f"the trainers' job file has {found[0]}, but this node's has {found[1]}; trainers and shadow "
            "nodes must read the same job file"
        )
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
            f"a layout of {counted(layout.shards, 'shard')}: DP group {request.group} of job {job.job} has "
            f"{shards}; trainers and shadow nodes must read the same job file"
        )
    return layout


def _check_optimizer(spec: pb.OptimizerSpec, parameters: int) -> None:
    """Refuse an unknown optimizer, or parameters that the layout does not have or that come twice."""
    for name in {kind_of(spec, group) for group in spec.groups} or {spec.name}:
        if why := why_unknown(name[:NAME_MAX]):
            raise CallRefused(f"unsupported optimizer: {why}")
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


def check_part(job: Job, group: ShadowGroup, part: pb.RecordPart) -> None:
    """Check a rank's part of a step record. Raise `CallRefused` if it cannot be of this start of training."""
    first, ranks = group.begin.first_iteration, group.begin.ranks
    check_number("a record of iteration", part.iteration, ITERATIONS_MAX)
    if part.iteration < first:
        raise CallRefused(f"a record of iteration {part.iteration}: training began at iteration {first}")
    check_ahead("a record of iteration", part.iteration, group.newest)
    check_number("position", part.position, ranks - 1)
    if part.HasField("step") and part.position != 0:
        raise CallRefused(f"a step from position {part.position}; only the group's first rank describes it")
    _check_ends(job, group, part)
    if part.position == 0:
        _check_step(group, part.step)
    _check_room(group, part)


def _check_ends(job: Job, group: ShadowGroup, part: pb.RecordPart) -> None:
    """Refuse ends of streams that this rank does not tag, or beyond what the iteration can have sent."""
    if not part.ends:
        return
    side = {0: FIRST, group.begin.ranks - 1: LAST}.get(part.position)
    if side is None:
        raise CallRefused(f"ends of streams from position {part.position}, which does not tag")
    if len(part.ends) > job.channels * group.layout.shards:
        raise CallRefused(
            f"{len(part.ends)} ends of streams; a rank has {job.channels * group.layout.shards}"
        )
    nbytes = {
        (s.plan.side, s.plan.channel, s.plan.shard): s.layout.nbytes
        for hold in group.holds
        for s in hold.streams
    }
    iterations = part.iteration - group.begin.first_iteration + 1
    for end in part.ends:
        check_number("an end of channel", end.channel, job.channels - 1)
        check_number("an end of shard", end.shard, group.layout.shards - 1)
        if end.side != side:
            raise CallRefused(
                f"an end of side {end.side} from position {part.position}, which tags side {side}"
            )
        most = nbytes.get((end.side, end.channel, end.shard), end.end) * iterations
        if end.end > most:
            raise CallRefused(
                f"an end at byte {end.end} of shard {end.shard}, channel {end.channel}: after iteration "
                f"{part.iteration} the stream has {counted(most, 'byte')}"
            )


def _check_step(group: ShadowGroup, step: pb.Step) -> None:
    """Refuse a step that does not fit the group's layout and optimizer."""
    parameters, groups = len(group.layout.parameters), len(group.begin.optimizer.groups)
    for what, options in (("options", step.options), ("next_options", step.next_options)):
        if len(options) not in (0, groups):
            raise CallRefused(f"{what} of {len(options)} parameter groups; the optimizer has {groups}")
        for text in options:
            _check_options(what, text)
    check_numbers("without_gradient", step.without_gradient, range(parameters))
    check_numbers("with_gradient", step.with_gradient, range(parameters))
    listed = sum(len(one.parameters) or parameters for one in step.scalings)
    most = REPEATS_MAX * parameters
    if listed > most:
        raise CallRefused(f"{len(step.scalings)} scalings list {listed} parameters; a step may have {most}")
    for scaling in step.scalings:
        _check_known("a scaling", scaling.parameters, parameters)
    try:
        check_scalings(step.scalings)
    except ValueError as error:
        raise CallRefused(str(error)) from None
    if len(step.beginnings) > groups * len(DTYPES):
        raise CallRefused(f"{len(step.beginnings)} beginnings; the optimizer has {groups} parameter groups")
    for beginning in step.beginnings:
        check_number("a beginning of parameter group", beginning.group, groups - 1)
        if beginning.dtype not in DTYPES:
            raise CallRefused(f"a beginning of type {beginning.dtype[:NAME_MAX]}; known: {', '.join(DTYPES)}")
    check_text("scheduler_class", step.scheduler_class, NAME_MAX)
    _check_slices(group, step.slices)


def _check_options(what: str, text: str) -> None:
    check_text(what, text, OPTIONS_MAX)
    try:
        parse_options(text)
    except OptionsError as error:
        raise CallRefused(f"{what}: {error}") from None


def _check_slices(group: ShadowGroup, slices: Iterable[pb.Slice]) -> None:
    """Refuse slices that are not inside a parameter or an entry of its state."""
    slices, most = list(slices), SLICES_MAX * group.layout.shards
    if len(slices) > most:
        raise CallRefused(f"{len(slices)} slices; a record may have {most}")
    _check_known("a slice", [one.parameter for one in slices], len(group.layout.parameters))
    for one in slices:
        known = group.layout.parameters[one.parameter]
        check_text("the name of a slice's state", one.state)
        room = max(known.elements, 1) * _STATE_ITEMSIZE if one.state else known.nbytes
        if one.offset + len(one.data) > room:
            raise CallRefused(
                f"a slice of bytes {one.offset} to {one.offset + len(one.data)} of {known.name}, which has "
                f"at most {room}"
            )


def _check_known(what: str, numbers: Sequence[int], parameters: int) -> None:
    if numbers and max(numbers) >= parameters:
        raise CallRefused(f"{what} has parameter {max(numbers)}; the layout has {parameters}")


def _check_room(group: ShadowGroup, part: pb.RecordPart) -> None:
    """Refuse a part of a later iteration if parts that wait for their step fill their room."""
    following = min((hold.released for hold in group.holds), default=group.records.newest) + NEXT
    if part.iteration > following and group.records.nbytes > UNSTEPPED_BYTES:
        raise CallRefused(
            f"a record of iteration {part.iteration}: {UNSTEPPED_BYTES >> 20} MiB of records wait already, "
            f"and iterations up to {following} come first",
            precondition=True,
        )


def check_seed_header(group: ShadowGroup, header: pb.SeedHeader) -> None:
    """Check the header of seeds: a hold of this node, some of its parameters, and a fitting record."""
    hold = group.hold(header.shard.shard)
    check_number("the state after iteration", header.iteration, ITERATIONS_MAX, -1)
    check_ahead("the state after iteration", header.iteration, group.newest)
    check_numbers("the stream of seeds", header.parameters, hold.parameters)
    if not header.HasField("record"):
        return
    record, ranks = header.record, group.begin.ranks
    if record.iteration != header.iteration and (record.parts or record.buffers):
        raise CallRefused(f"a record of iteration {record.iteration} with the state after {header.iteration}")
    positions = [part.position for part in record.parts]
    if positions != sorted({*positions} & {*range(ranks)}):
        raise CallRefused(
            f"the seeds' record has parts of positions {positions[:ranks]}; the group has {ranks}"
        )
    if any(part.iteration != record.iteration for part in record.parts):
        raise CallRefused(f"the seeds' record has parts of other iterations than {record.iteration}")
