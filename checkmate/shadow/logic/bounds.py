"""Limits of requests, step records, seeds and messages between nodes. Pure.

They are checked before anything is allocated, kept or repeated. Each check raises `CallRefused`, which names
the field, its value and its limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from checkmate.base.wording import counted, size
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import difference, job_ranks
from checkmate.nodes.standing import holders_of
from checkmate.optim.options import OptionsError, parse_options
from checkmate.optim.supported import FROZEN, kind_of, why_unknown
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import (
    INCARNATIONS,
    ITERATIONS_MAX,
    REFUSAL_MAX,
    START_BYTES,
    TEXT_MAX,
    mismatch,
)
from checkmate.shadow.logic.commit import NEVER, PATIENCE
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, check_job
from checkmate.shadow.replica.blocks import check_scalings
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout, from_json
from checkmate.wire.parameter import LayoutError
from checkmate.wire.repair import COMPARED_BYTES, DIGEST_BYTES
from checkmate.wire.repair import MAX_BYTES as REPAIR_BYTES
from checkmate.wire.tree import TreeSlicing

WINDOW: Final = 1 << 20
"""Iterations by which a message may be ahead of the newest iteration that is known here."""
MAX_FENCE_SECONDS: Final = 3600.0
MAX_RESERVE_SECONDS: Final = 86_400.0
MAX_WAITED_SECONDS: Final = 1e9
MAX_RESERVATIONS: Final = 64
"""Reservations of a node at a time."""
SPARE_FETCHES: Final = 8
"""Calls that may wait for an iteration beside one for each rank."""
MAX_RANGES: Final = 1 << 16
MAX_LAYOUT: Final = 32 << 20
"""Characters of a layout: two hundred thousand parameters."""
MAX_OPTIONS: Final = 1 << 20
"""Characters of one parameter group's options."""
MAX_NAME: Final = 4096
MAX_FORMER_GROUPS: Final = 1 << 16
MAX_THREADS: Final = 4096
MIN_COPIES: Final = 3
"""A shard's bytes are held this often at least: parameters, and two sets of gradients."""
MAX_SLICES: Final = 128
"""Slices of each shard; trainers send about 64."""
MAX_REPEATS: Final = 64
"""Number of times that the scalings of a step may list each parameter; without a list, one lists all."""
UNSTEPPED_BYTES: Final = 1 << 30
"""Bytes of parts that wait for their step, beyond which only the next iterations' parts are taken."""
NEXT: Final = 2
_STATE_ITEMSIZE: Final = 8


def check_protocol(protocol: int) -> None:
    """Refuse a caller of another version."""
    if different := mismatch(protocol, "the caller", "this shadow node"):
        raise CallRefused(different, precondition=True)


def check_number(label: str, value: int, most: int, least: int = 0) -> None:
    """Refuse a number outside of `least` to `most`, both included."""
    if not least <= value <= most:
        raise CallRefused(f"{label} {value}: must be a number from {least} to {most}")


def check_ahead(label: str, iteration: int, newest: int) -> None:
    """Refuse an iteration that is far beyond the newest known one."""
    check_number(label, iteration, ITERATIONS_MAX, NEVER)
    if iteration > newest + WINDOW:
        raise CallRefused(
            f"{label} {iteration}: more than {WINDOW} beyond iteration {newest}, the newest one here"
        )


def check_seconds(label: str, seconds: float, most: float) -> None:
    """Refuse a time that is negative, too long, or not a number."""
    if not (math.isfinite(seconds) and 0 <= seconds <= most):
        raise CallRefused(f"{label} {seconds:g}: must be a number of seconds from 0 to {most:g}")


def check_text(label: str, text: str, most: int = TEXT_MAX) -> None:
    """Refuse a text that is too long."""
    if len(text) > most:
        raise CallRefused(f"{label} has {len(text)} characters, and may have {most}")


def check_start(label: str, start: bytes) -> None:
    """Refuse bytes that cannot name a start of training."""
    if len(start) != START_BYTES:
        raise CallRefused(f"{label} has {len(start)} bytes; a start of training is named by {START_BYTES}")


def check_group(job: Job, group: int) -> None:
    """Refuse a DP group that the job does not have."""
    if group >= len(job.dp_groups):
        raise CallRefused(f"no DP group {group}: job {job.job} has {len(job.dp_groups)}")


def check_numbers(label: str, numbers: Sequence[int], parameters: Collection[int]) -> None:
    """Refuse parameters that are not among `parameters`, or come twice."""
    if len(numbers) > len(parameters) or len(set(numbers)) < len(numbers):
        raise CallRefused(
            f"{label} lists {counted(len(numbers), 'parameter')} of {len(parameters)}, or one of them twice"
        )
    if unknown := set(numbers).difference(parameters):
        raise CallRefused(f"{label} lists parameter {min(unknown)}, which the shard does not have")


def check_fence(request: pb.FenceRequest) -> None:
    """Check a `Fence`."""
    check_protocol(request.protocol)
    check_seconds("timeout", request.timeout, MAX_FENCE_SECONDS)


def check_settle(request: pb.SettleRequest) -> None:
    """Check a `Settle`."""
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_text("the run", request.run)


def check_refused(request: pb.RefusedRequest) -> None:
    """Check a `Refused`."""
    check_protocol(request.protocol)
    check_start("start", request.start)
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_text("rank", request.rank)
    check_text("text", request.text, REFUSAL_MAX)


def check_reserve(request: pb.ReserveRequest, newest: int, reserved: int) -> None:
    """Check a `Reserve`, given the newest iteration known here and the number of reservations."""
    check_number("iteration", request.iteration, ITERATIONS_MAX, -1)
    check_ahead("iteration", request.iteration, newest)
    check_seconds("a hold time of", request.seconds, MAX_RESERVE_SECONDS)
    if reserved >= MAX_RESERVATIONS:
        raise CallRefused(
            f"this node has {reserved} reservations, the most that it keeps: release one, or wait",
            precondition=True,
        )


def check_copies(iterations: int, nbytes: int, memory: int) -> None:
    """Refuse a reservation if copies of the state after all reserved iterations do not fit.

    Args:
        iterations: how many are reserved, the new one included. One is always granted.
        nbytes: bytes of the state.
        memory: bytes of this machine that are free.
    """
    if iterations > 1 and iterations * nbytes > memory:
        raise CallRefused(
            f"{iterations} iterations at a time may take {size(iterations * nbytes)}, and this machine has "
            f"{size(memory)} left: release one, or wait",
            precondition=True,
        )


def check_waiting(job: Job, waiting: int) -> None:
    """Refuse a `Fetch` that would wait, if many do, because each occupies a worker."""
    most = job.rank_count + SPARE_FETCHES
    if waiting >= most:
        raise CallRefused(
            f"{counted(waiting, 'call waits', 'calls wait')} for iterations, the most possible: wait",
            precondition=True,
        )


def check_parts(job: Job, parts: pb.PartsHeld) -> None:
    """Check ranges of parts: ordered, without overlap, and of ranks of the group."""
    check_group(job, parts.group)
    ranks = len(job.dp_groups[parts.group].ranks)
    if len(parts.ranges) > MAX_RANGES:
        raise CallRefused(f"{len(parts.ranges)} ranges of parts; a call may have {MAX_RANGES}")
    before = (-1, -1)
    for part in parts.ranges:
        check_number("position", part.position, ranks - 1)
        check_number("iteration", part.first, ITERATIONS_MAX)
        check_number("iteration", part.last, ITERATIONS_MAX)
        if part.first > part.last or (part.position, part.first) <= before:
            raise CallRefused(
                f"parts {part.first} to {part.last} of position {part.position}: ranges must be in order, "
                "and must not overlap"
            )
        before = (part.position, part.last)


def check_copy(job: Job, me: int, request: pb.CopyRequest) -> None:
    """Check a `Copy`: from other nodes of the job, and not more often than once for each node and group."""
    most = len(job.shadow_nodes) * len(job.dp_groups)
    if len(request.wanted) > most:
        raise CallRefused(f"parts of {len(request.wanted)} nodes and groups; job {job.job} has {most}")
    for source in request.wanted:
        check_node(job, source.node)
        if source.node == me:
            raise CallRefused(f"parts of shadow node {me}: this is that node")
        check_parts(job, source.parts)


def check_node(job: Job, node: int) -> None:
    """Refuse a shadow node that the job does not have."""
    if node not in {shadow_node.id for shadow_node in job.shadow_nodes}:
        raise CallRefused(f"no shadow node {node} in job {job.job}")


def check_progress(job: Job, me: int, report: pb.Progress, start: bytes, newest: int) -> None:
    """Check a report of another node. `newest` is the newest known iteration of the start `start`."""
    check_protocol(report.protocol)
    check_node(job, report.node)
    if report.node <= me:
        raise CallRefused(
            f"progress of shadow node {report.node}: nodes report to lower ids, and this is node {me}"
        )
    check_number("incarnation", report.incarnation, INCARNATIONS - 1)
    limit = newest if report.start == start else ITERATIONS_MAX
    for label, iteration in (("in full:", report.in_full), ("stepped:", report.stepped)):
        check_ahead(label, iteration, limit)
    check_seconds("patience", report.patience, PATIENCE)
    if report.start == start:  # else it may be of other ranks, and is not used
        _check_shards(job, report.shards, report.kept, limit)


def check_decision(job: Job, decision: pb.Decision, start: bytes, newest: int) -> None:
    """Check another node's answer to our reports, like `check_progress`."""
    if different := mismatch(decision.protocol, "the other node", "this one"):
        raise CallRefused(different, precondition=True)
    check_number("incarnation", decision.incarnation, INCARNATIONS - 1)
    limit = newest if decision.start == start else ITERATIONS_MAX
    check_ahead("step to:", decision.step_to, limit)
    check_seconds("patience", decision.patience, PATIENCE)
    if decision.start == start:  # else it may be of other ranks, and is not used
        _check_shards(job, decision.shards, decision.kept, limit)


def _check_shards(job: Job, shards: Iterable[pb.Shard], kept_shards: Iterable[pb.Kept], newest: int) -> None:
    holders, kept_shards = holders_of(job), list(kept_shards)
    live_shards = [(shard.group, shard.shard) for shard in shards]
    for numbers in (live_shards, [(report.shard.group, report.shard.shard) for report in kept_shards]):
        if len(set(numbers)) < len(numbers) or not holders.keys() >= set(numbers):
            raise CallRefused(f"shards that job {job.job} does not have, or one of them twice")
    for report in kept_shards:
        check_ahead("kept:", report.stepped, newest)


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
    if differences := difference(request.job_ranks, job_ranks(job)):
        raise CallRefused(
            f"the trainers' job file has {differences[0]}, but this node's has {differences[1]}; trainers "
            "and shadow nodes must read the same job file"
        )
    check_group(job, request.group)
    check_number("incarnation", request.incarnation, INCARNATIONS - 1)
    if not 0 <= request.first_iteration <= request.next_iteration <= ITERATIONS_MAX:
        raise CallRefused(
            f"first iteration {request.first_iteration}, next {request.next_iteration}: neither may be "
            f"negative or above {ITERATIONS_MAX}, nor the next below the first"
        )
    check_start("start", request.start)
    check_start("continues", request.continues)
    for field in ("run", "torch", "capability", "device"):
        check_text(field, getattr(request, field))
    check_number("the number of former groups", len(request.former_groups), MAX_FORMER_GROUPS)
    ranks = len(job.dp_groups[request.group].ranks)
    if request.ranks != ranks:
        raise CallRefused(
            f"{counted(request.ranks, 'rank')}: DP group {request.group} of job {job.job} has {ranks}"
        )
    layout = _layout(job, request)
    if wrong := [p.owner[0] for p in layout.parameters if p.owner and p.owner[0] >= ranks]:
        raise CallRefused(f"state of the rank at position {max(wrong)}: the DP group has {ranks}")
    if len(layout.trained) < len(layout.parameters) and not request.optimizer.copied:
        raise CallRefused("the layout has optimizer state, which an optimizer that is repeated has itself")
    _check_optimizer(request.optimizer, len(layout.parameters))
    _check_names(request)
    _check_memory(layout, set(shards), memory)
    return layout


def _layout(job: Job, request: pb.BeginRequest) -> Layout:
    check_text("the layout", request.layout, MAX_LAYOUT)
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
    has_trees = isinstance(layout.slicing, TreeSlicing)
    if has_trees != job.has_trees(request.group):
        with_trees, present = ("with trees", "none") if has_trees else ("without trees", "some")
        raise CallRefused(
            f"a layout {with_trees}: here, DP group {request.group} of job {job.job} has {present} "
            "(collective, tree_bytes); trainers and shadow nodes must read the same job file, and a node "
            "that runs does not follow such a change alone: start it again"
        )
    return layout


def _check_optimizer(spec: pb.OptimizerSpec, parameters: int) -> None:
    """Refuse an unknown optimizer, or parameters that the layout does not have or that come twice."""
    for name in {kind_of(spec, group) for group in spec.groups} or {spec.name}:
        check_text("an optimizer's name", name, MAX_NAME)
        if not spec.copied and (why := why_unknown(name)):
            raise CallRefused(f"unsupported optimizer: {why}")
    if spec.threads > MAX_THREADS:
        raise CallRefused(f"{spec.threads} threads in training; at most {MAX_THREADS} are supported")
    check_text("default_dtype", spec.default_dtype)
    earlier: set[int] = set()
    for index, group in enumerate(spec.groups):
        check_text(f"parameter group {index}: its options", group.options, MAX_OPTIONS)
        numbers = [number for number in group.parameters if number != FROZEN]
        if numbers and (wrong := max(numbers)) >= parameters:
            raise CallRefused(f"parameter group {index} has parameter {wrong}; the layout has {parameters}")
        if len(set(numbers)) < len(numbers) or not earlier.isdisjoint(numbers):
            raise CallRefused(f"parameter group {index} has a parameter that comes twice")
        earlier.update(numbers)
        if group.names and len(group.names) != len(group.parameters):
            raise CallRefused(
                f"parameter group {index} has {len(group.names)} names, but not for each parameter"
            )


def _check_names(request: pb.BeginRequest) -> None:
    for name in (*request.names.keys(), *request.names.values(), *request.buffers):
        check_text("a tensor's name", name, MAX_NAME)
    if len(set(request.buffers)) < len(request.buffers):
        raise CallRefused("a buffer's name comes twice")


def _check_memory(layout: Layout, shards: set[int], memory: int) -> None:
    nbytes = sum(layout.parameters[number].nbytes for shard in shards for number in layout.of_shard(shard))
    if MIN_COPIES * nbytes > memory:
        raise CallRefused(
            f"its shards have {size(nbytes)} of parameters, of which this node needs at least "
            f"{MIN_COPIES} times as much; this machine has {size(memory)} of memory: use more shadow nodes"
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
    if part.HasField("progress"):
        check_ahead("progress up to iteration", part.progress.trained, group.newest)
        check_seconds("waited_seconds", part.progress.waited_seconds, MAX_WAITED_SECONDS)
        if part.progress.HasField("repairs_from"):
            check_ahead("repairs from iteration", part.progress.repairs_from, group.newest)
    if part.position == 0:
        _check_step(group, part.step)
    _check_room(group, part)


def check_repair(group: ShadowGroup, part: pb.RecordPart) -> None:
    """Check what a rank says of bytes that it has sent again. Raise `CallRefused` if it can't be true."""
    check_number("position", part.position, group.begin.ranks - 1)
    if not group.layout.slicing.is_sender(part.position, group.begin.ranks):
        raise CallRefused(f"a repair from position {part.position}, which sends no streams")
    streams = [(repaired.channel, repaired.shard) for repaired in part.repair.repaired]
    if len(set(streams)) < len(streams):
        raise CallRefused("a repair of the same stream twice in a message")
    for repaired in part.repair.repaired:
        if (
            not 0 < repaired.stop - repaired.start <= REPAIR_BYTES + COMPARED_BYTES
            or len(repaired.digest) != DIGEST_BYTES
        ):
            raise CallRefused(
                f"a repair of bytes {repaired.start} to {repaired.stop}, with a digest of "
                f"{counted(len(repaired.digest), 'byte')}"
            )


def _check_ends(job: Job, group: ShadowGroup, part: pb.RecordPart) -> None:
    """Refuse ends of streams that this rank does not send, or beyond what the iteration can have sent."""
    if not part.ends:
        return
    if not group.layout.slicing.is_sender(part.position, group.begin.ranks):
        raise CallRefused(f"ends of streams from position {part.position}, which sends none")
    channels = job.stream_channels(group.begin.group)
    if len(part.ends) > channels * group.layout.shards:
        raise CallRefused(f"{len(part.ends)} ends of streams; a rank has {channels * group.layout.shards}")
    nbytes = {
        (s.plan.channel, s.plan.shard): s.layout.nbytes
        for hold in group.holds
        for s in hold.streams
        if s.plan.sender == part.position
    }
    iterations = part.iteration - group.begin.first_iteration + 1
    for end in part.ends:
        check_number("an end of channel", end.channel, channels - 1)
        check_number("an end of shard", end.shard, group.layout.shards - 1)
        most = nbytes.get((end.channel, end.shard), end.end) * iterations
        if end.end > most:
            raise CallRefused(
                f"an end at byte {end.end} of shard {end.shard}, channel {end.channel}: after iteration "
                f"{part.iteration} the stream has {counted(most, 'byte')}"
            )


def _check_step(group: ShadowGroup, step: pb.Step) -> None:
    """Refuse a step that does not fit the group's layout and optimizer."""
    parameters, groups = len(group.layout.parameters), len(group.begin.optimizer.groups)
    for label, options in (("options", step.options), ("next_options", step.next_options)):
        if len(options) not in (0, groups):
            raise CallRefused(f"{label} of {len(options)} parameter groups; the optimizer has {groups}")
        for text in options:
            _check_options(label, text)
    check_numbers("without_gradient", step.without_gradient, range(parameters))
    check_numbers("with_gradient", step.with_gradient, range(parameters))
    total = sum(len(scaling.parameters) or parameters for scaling in step.scalings)
    most = MAX_REPEATS * parameters
    if total > most:
        raise CallRefused(f"{len(step.scalings)} scalings list {total} parameters; a step may have {most}")
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
            raise CallRefused(f"a beginning of type {beginning.dtype[:MAX_NAME]}; known: {', '.join(DTYPES)}")
    check_text("scheduler_class", step.scheduler_class, MAX_NAME)
    _check_slices(group, step.slices)


def _check_options(label: str, text: str) -> None:
    check_text(label, text, MAX_OPTIONS)
    try:
        parse_options(text)
    except OptionsError as error:
        raise CallRefused(f"{label}: {error}") from None


def _check_slices(group: ShadowGroup, slices: Iterable[pb.Slice]) -> None:
    """Refuse slices that are not inside a parameter or an entry of its state."""
    slices, most = list(slices), MAX_SLICES * group.layout.shards
    if len(slices) > most:
        raise CallRefused(f"{len(slices)} slices; a record may have {most}")
    _check_known("a slice", [part.parameter for part in slices], len(group.layout.parameters))
    for part in slices:
        parameter = group.layout.parameters[part.parameter]
        check_text("the name of a slice's state", part.state)
        room = max(parameter.elements, 1) * _STATE_ITEMSIZE if part.state else parameter.nbytes
        if part.offset + len(part.data) > room:
            raise CallRefused(
                f"a slice of bytes {part.offset} to {part.offset + len(part.data)} of {parameter.name}, "
                f"which has at most {room}"
            )


def _check_known(label: str, numbers: Sequence[int], parameters: int) -> None:
    if numbers and max(numbers) >= parameters:
        raise CallRefused(f"{label} has parameter {max(numbers)}; the layout has {parameters}")


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
