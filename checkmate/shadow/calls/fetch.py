"""`Reserve`, `Release` and `Fetch`: reading an iteration's state while training continues or is fenced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, check_job
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.node import Node
from checkmate.shadow.replica.replica import Replica


def reserve(node: Node, job: str, iteration: int, seconds: float) -> pb.ReserveReply:
    """Keep the current iteration or a future one readable for the given seconds."""
    check_job(node.job, job)
    with node.changed:
        live = [hold for _, hold in node.state.holds if hold.live]
        stepped = max((hold.stepped for hold in live), default=-1)
        if not live or node.state.fenced or not _reserve_all(node, live, iteration):
            return pb.ReserveReply(granted=False, stepped=stepped)
        node.state.reserved.setdefault(iteration, []).append(node.now() + seconds)
        return pb.ReserveReply(granted=True, stepped=stepped)


def _reserve_all(node: Node, holds: Sequence[HoldState], iteration: int) -> bool:
    """Reserve on all holds or on none. Fails if one has begun the next step or is in doubt."""
    granted: list[Replica] = []
    for hold in holds:
        replica = node.data[hold].replica
        unfit = hold.released > iteration or hold.doubt.covers(iteration)
        if unfit or not replica.reserve(iteration):
            for one in granted:
                one.release(iteration)
            return False
        granted.append(replica)
    return True


def release(node: Node, job: str, iteration: int) -> None:
    """End one reservation of an iteration."""
    check_job(node.job, job)
    with node.moving() as state:
        state.release(iteration)


def fetch(node: Node, request: pb.FetchRequest, timeout: float) -> Iterator[pb.Seeds]:
    """Yield a shard's state after an iteration that is reserved, once it is stepped, or is settled at.

    Raises `CallRefused` if the state is not available within `timeout` seconds.
    """
    check_job(node.job, request.job)
    iteration, reserved = request.iteration, node.state.reserved
    with node.changed:
        group = node.state.groups.get(request.shard.group)
        if group is None:
            raise CallRefused(f"DP group {request.shard.group} has not begun here", precondition=True)
        hold = group.hold(request.shard.shard)
        data = node.data[hold]
        if iteration not in reserved and not (hold.settled and hold.stepped == iteration):
            raise _refused(hold, f"iteration {iteration} is not reserved; it is at {hold.stepped}")
        node.wait_for(lambda: _kept(hold, iteration) or iteration not in reserved, timeout)
        if not _kept(hold, iteration):
            raise _refused(hold, f"iteration {iteration} was not stepped in time")
        if hold.doubtful:
            raise _refused(hold, hold.trouble)
        if hold.doubt.covers(iteration):
            raise _refused(hold, f"its iteration {iteration} was found doubtful later")
        header = _header(node, group, hold, request)
    return state.to_seeds(header, data.read(iteration, request.parameters))


def _kept(hold: HoldState, iteration: int) -> bool:
    """Return whether an iteration is stepped and its record is available."""
    return hold.released >= iteration and hold.stepping != iteration


def _refused(hold: HoldState, message: str) -> CallRefused:
    return CallRefused(f"{hold}: {message}", precondition=True)


def _header(node: Node, group: ShadowGroup, hold: HoldState, request: pb.FetchRequest) -> pb.SeedHeader:
    return pb.SeedHeader(
        job=node.job.job,
        incarnation=group.begin.incarnation,
        shard=request.shard,
        iteration=request.iteration,
        parameters=request.parameters or hold.parameters,
        record=group.records.served(request.iteration),
        layout=group.begin.layout,
        optimizer=group.begin.optimizer,
        run=group.begin.run,
        start=group.begin.start,
        generation=group.begin.generation,
        names=group.begin.names,
        buffers=group.begin.buffers,
    )
