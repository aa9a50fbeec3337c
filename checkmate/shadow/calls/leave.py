"""`Leave`: an operator takes this node out of its job (design, section 7, *Loss*)."""

from __future__ import annotations

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.calls.begin import locked_status
from checkmate.shadow.logic.bounds import check_protocol
from checkmate.shadow.logic.group import CallRefused, check_job, start_of
from checkmate.shadow.logic.phases import Phase
from checkmate.shadow.node import Node


def leave(node: Node, request: pb.LeaveRequest) -> pb.NodeStatus:
    """Take one of the steps of leaving. Return the status after it.

    Raises `CallRefused` for another job or version, during a restart, or if the second step comes without
    the first one, unless it is forced.
    """
    check_job(node.job, request.job)
    check_protocol(request.protocol)
    with node.moving() as state:
        match request.step:
            case pb.LeaveRequest.ASK:
                state.leaving.check_here()
                if state.phase is not Phase.OPEN:
                    raise CallRefused("training restarts: wait until it trains", precondition=True)
                numbers = {
                    number for number, group in state.groups.items() if start_of(group.begin) == state.start
                }
                if state.groups and not {plan.group for plan in node.plans} <= numbers:
                    raise CallRefused("training has not begun in all DP groups yet", precondition=True)
                if state.former is not None:
                    raise CallRefused(
                        "it keeps the state of former ranks: wait until training goes on with the new ones",
                        precondition=True,
                    )
                state.leaving.ask(node.now(), request.token)
            case pb.LeaveRequest.STAY:
                state.stay("another holder of a shard does not count any more")
            case pb.LeaveRequest.GO:
                if not (state.leaving.may_go(request.token) or request.force):
                    raise CallRefused("it stays: nobody has asked it to leave in time", precondition=True)
                state.leave()
            case _:
                raise CallRefused(f"step {request.step} of leaving: there is none")
    with node.state_changed:
        return locked_status(node)
