"""State that comes and goes: step records, `Seed`, `Reserve`, `Release` and `Fetch` (design, section 7).

Seeds and records come from trainers. An iteration's state is read while training continues or is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkmate import state
from checkmate.base import machine_memory
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.bounds import (
    check_copies,
    check_numbers,
    check_part,
    check_repair,
    check_reserve,
    check_seed_header,
    check_waiting,
)
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, check_job
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.node import Node
from checkmate.shadow.replica.replica import Replica

ASKED_SECONDS = 5.0
"""Interval between requests for seeds."""


def seed(node: Node, seeds: state.SeedReader) -> list[int]:
    """Load seeds. Return late parameters, which must be sent again. Raise `StateError` or `CallRefused`."""
    header = seeds.header
    with node.state_changed:
        group = node.state.group(header.shard.group, header)
        check_seed_header(group, header)
        hold = group.hold(header.shard.shard)
    late = node.load(hold, header.iteration, seeds.read_all(group.layout.parameters))
    with node.moving() as node_state:
        node_state.tally.count_seeds()
        group.records.adopt(header.record)
    return late


def take(node: Node, part: pb.RecordPart, answer: bool, host: str) -> pb.RecordReply | None:
    """Add a part that a trainer has sent from the address `host`, and return the reply, like `record`.

    A start that another one has superseded is told so. Once it shows that it goes on, its parts are not
    added, because no restart needs them.
    """
    check_job(node.job, part.job)
    if part.HasField("repair"):
        return repair(node, part) if answer else None
    with node.state_changed:
        start = node.state.superseded(part, host, node.now())
        group = node.state.groups.get(part.group)
        replaced = group is None or node.state.older_starts.find(group.begin) is not start
    if start is not None and (start.goes_on or replaced):
        return pb.RecordReply(iteration=part.iteration, superseded=True, by=start.by) if answer else None
    reply = record(node, part, answer)
    if reply is not None and start is not None:
        reply.superseded, reply.by = True, start.by
    return reply


def record(node: Node, part: pb.RecordPart, answer: bool) -> pb.RecordReply | None:
    """Add a rank's part of a step record. Return the reply, with requests for seeds, if one is wanted."""
    with node.moving(observe=False) as node_state:  # there may be a thousand ranks, with as many streams
        group = node_state.group(part.group, part)
        check_part(node.job, group, part)
        group.note(part)
        group.records.add(part, node.now())
    if not answer:
        return None
    with node.state_changed:
        reply = _reply(group, part, node.now())
        if part.position == 0:
            reply.also_training.extend(node_state.older_starts.hosts)
        return reply


def repair(node: Node, part: pb.RecordPart) -> pb.RecordReply:
    """Take a rank's digests of what it has sent again, and return what is missing of its streams."""
    reply = pb.RecordReply(iteration=-1)
    with node.state_changed:
        group = node.state.repaired_group(part.group, part)
        if group is None:
            return reply
        check_repair(group, part)
        _observe(node, group, part.position)
        due = [
            (repaired, hold)
            for repaired in part.repair.repaired
            for hold in group.holds
            if hold.awaits_digest(part.position, repaired)
        ]
        resources = {hold: node.resources[hold] for _, hold in due}
    # Without the lock: it takes 1 ms for 1 MB. Nothing overwrites these bytes, which do not count yet.
    are_equal = [resources[hold].digest(part.position, repaired) == repaired.digest for repaired, hold in due]
    with node.state_changed:
        for (repaired, hold), is_equal in zip(due, are_equal, strict=True):
            hold.note_repaired(part.position, repaired, is_equal=is_equal)
        _observe(node, group, part.position)
        for hold in group.holds:
            reply.missing.extend(hold.missing_ranges(group.records, part.position, node.now()))
            reply.awaits_copies |= not hold.settled and hold.awaits(group.records, part.position)
    if due:
        node.touch()  # an iteration may be there now
    return reply


def _observe(node: Node, group: ShadowGroup, sender: int) -> None:
    """Update what streams of a rank have received, for questions that come 20 times a second."""
    for hold in group.holds:
        if any(stream.plan.sender == sender for stream in hold.streams):
            node.resources[hold].observe()


def _reply(group: ShadowGroup, part: pb.RecordPart, now: float) -> pb.RecordReply:
    requests = [
        pb.SeedWanted(shard=hold.plan.shard, parameters=numbers)
        for hold in group.holds
        if hold.plan.shard % group.begin.ranks == part.position and (numbers := _to_ask(hold, now))
    ]
    reply = pb.RecordReply(iteration=part.iteration, wanted=requests)
    if part.position == 0:  # it reports to the user
        troubled = [hold for hold in group.holds if hold.doubtful or (hold.trouble and not hold.live)]
        words = "; ".join(f"{hold}: {hold.trouble}" for hold in troubled)
        suspects = [suspect for hold in group.holds for suspect in hold.suspects]
        buffers = group.records.take_wants_buffers()
        reply.MergeFrom(pb.RecordReply(trouble=words, buffers=buffers, suspects=suspects))
    return reply


def _to_ask(hold: Hold, now: float) -> list[int]:
    """Return the parameters to request from trainers, unless another holder provides them."""
    if not hold.wants_seeds or hold.from_holder or now - hold.seeds_asked_at < ASKED_SECONDS:
        return []
    hold.note_seeds_asked(now)
    return hold.wanted_parameters()


def reserve(node: Node, request: pb.ReserveRequest) -> pb.ReserveReply:
    """Keep the current iteration or a future one readable for the given seconds."""
    check_job(node.job, request.job)
    iteration, seconds = request.iteration, request.seconds
    with node.state_changed:
        check_reserve(request, node.state.newest, sum(map(len, node.state.reserved.values())))
        live = [hold for _, hold in node.state.holds if hold.live]
        if iteration not in node.state.reserved and node.state.reserved:
            nbytes = sum(node.resources[hold].replica.nbytes for hold in live)
            check_copies(len(node.state.reserved) + 1, nbytes, machine_memory.available())
        stepped = max((hold.stepped for hold in live), default=-1)
        if not live or node.state.fenced or not _reserve_all(node, live, iteration):
            return pb.ReserveReply(granted=False, stepped=stepped)
        node.state.reserve(iteration, node.now() + seconds)
        return pb.ReserveReply(granted=True, stepped=stepped)


def _reserve_all(node: Node, holds: Sequence[Hold], iteration: int) -> bool:
    """Reserve on all holds or on none. Fails if one has begun the next step or is in doubt."""
    granted: list[Replica] = []
    for hold in holds:
        replica = node.resources[hold].replica
        unfit = hold.released > iteration or hold.doubt.covers(iteration)
        if unfit or not replica.reserve(iteration):
            for earlier in granted:
                earlier.release(iteration)
            return False
        granted.append(replica)
    return True


def release(node: Node, job: str, iteration: int) -> None:
    """End one reservation of an iteration."""
    check_job(node.job, job)
    with node.moving() as node_state:
        node_state.release(iteration)


def fetch(node: Node, request: pb.FetchRequest, timeout: float) -> Iterator[pb.Seeds]:
    """Yield a shard's state after an iteration that is reserved, once it is stepped, or is settled at.

    Raises `CallRefused` if the state is not available within `timeout` seconds.
    """
    check_job(node.job, request.job)
    iteration, reserved = request.iteration, node.state.reserved
    with node.state_changed:
        group = node.state.groups_of(request.ranks_digest).get(request.shard.group)
        if group is None:
            raise CallRefused(f"DP group {request.shard.group} has not begun here", precondition=True)
        hold = group.hold(request.shard.shard)
        check_numbers("the request", request.parameters, hold.parameters)
        replica = node.resources[hold].replica
        if iteration not in reserved and not (hold.settled and hold.stepped == iteration):
            raise _refusal(hold, f"iteration {iteration} is not reserved; it is at {hold.stepped}")
        if iteration in reserved and not _is_served(hold, iteration):
            check_waiting(node.job, node.waiting_fetches)
            node.wait_for_fetch(
                lambda: (
                    _is_served(hold, iteration) or iteration not in reserved or hold not in node.resources
                ),
                timeout,
            )
        if hold not in node.resources:
            raise CallRefused("it does not hold this shard any more", precondition=True)
        if not _is_served(hold, iteration):
            raise _refusal(hold, f"iteration {iteration} was not stepped in time")
        if hold.doubtful:
            raise _refusal(hold, hold.trouble)
        if hold.doubt.covers(iteration):
            raise _refusal(hold, f"its iteration {iteration} was found doubtful later")
        header = _header(node, group, hold, request)
    return state.to_seeds(header, replica.read(iteration, header.parameters) if header.parameters else ())


def _is_served(hold: Hold, iteration: int) -> bool:
    """Return whether an iteration is stepped and its record is available."""
    return hold.released >= iteration and hold.stepping != iteration


def _refusal(hold: Hold, message: str) -> CallRefused:
    return CallRefused(f"{hold}: {message}", precondition=True)


def _header(node: Node, group: ShadowGroup, hold: Hold, request: pb.FetchRequest) -> pb.SeedHeader:
    return pb.SeedHeader(
        job=node.job.job,
        incarnation=group.begin.incarnation,
        shard=request.shard,
        iteration=request.iteration,
        parameters=() if request.header_only else request.parameters or hold.parameters,
        record=group.records.served(request.iteration),
        layout=group.begin.layout,
        optimizer=group.begin.optimizer,
        run=group.begin.run,
        start=group.begin.start,
        generation=group.begin.generation,
        names=group.begin.names,
        buffers=group.begin.buffers,
    )
