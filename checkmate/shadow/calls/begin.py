"""`Begin`: a DP group starts, or this node rejoins it (design, section 7, *Start* and *Loss*).

Also `Refused`, by which it ends, and `Status`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from checkmate.base import machine_memory
from checkmate.events.kinds import TRAINING_BEGUN
from checkmate.events.process_log import say
from checkmate.nodes.other_ranks import difference, job_ranks
from checkmate.optim.kernel import Arithmetic, compile_for, is_recorded
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow import memory
from checkmate.shadow.former_state import FormerState
from checkmate.shadow.logic.bounds import check_begin, check_protocol, check_refused
from checkmate.shadow.logic.group import (
    CallRefused,
    Former,
    ShadowGroup,
    check_job,
    reusable,
    start_of,
    warnings,
)
from checkmate.shadow.logic.hold import AHEAD, Hold
from checkmate.shadow.logic.records import Records
from checkmate.shadow.node import Node
from checkmate.shadow.receive.hold_plans import HoldPlan, StreamTooLong
from checkmate.shadow.replica.replica import Replica
from checkmate.shadow.resources import HoldResources
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout


def begin(node: Node, request: pb.BeginRequest, caller: str = "") -> pb.BeginReply:
    """Create the group's holds and connect their streams. `caller`: the caller's address.

    If this start of training has begun already, it only notes how far trainers are. Raises `CallRefused` if
    the request is wrong.
    """
    _take_up(node, request)
    shards = [plan.shard for plan in node.plans if plan.group == request.group]
    layout = check_begin(node.job, request, shards, machine_memory.total())
    if not request.optimizer.copied:
        compile_for({DTYPES[parameter.dtype] for parameter in layout.parameters})  # not while others wait
    with node.moving() as state:
        start = start_of(request)
        state.leaving.check_here()
        state.ended_starts.check(request, state.generation)
        old = state.groups.get(request.group)
        if old and start_of(old.begin) == start and old.layout.fingerprint == layout.fingerprint:
            old.reach(request.next_iteration)
            return pb.BeginReply(protocol=PROTOCOL, warnings=_warnings(node, old))
        # Holders of a shard may have different bits, if a GPU's are repeated by one and not by another: the
        # trainers have read only one of them.
        alike = node.job.replicas == 1 or not (_is_gpu(request))
        reused = {hold.plan.shard: hold for hold in reusable(old, request, layout) if alike}
        records = Records(request.ranks, request.first_iteration, request.buffers)
        if old is not None and reused:
            records.adopt(old.records.served(request.first_iteration - 1))
        holds = {resources.hold: resources for resources in _new_resources(node, request, layout, reused)}
        node.resources.update(holds)
        group = ShadowGroup(request, layout, records, list(holds))
        state.begin_group(group, node.now(), caller)
    number, incarnation, first = request.group, request.incarnation, request.next_iteration
    event = TRAINING_BEGUN(group=number, incarnation=incarnation, iteration=first)
    say(logging.INFO, event, "DP group %d: incarnation %d begins at iteration %d", number, incarnation, first)
    reply = pb.BeginReply(protocol=PROTOCOL, warnings=_warnings(node, group))
    former = state.former
    alike &= former is None or former.job.replicas == 1 or not _is_gpu(request)
    if request.keep and alike and request.next_iteration == request.first_iteration:
        _fill(node, group, reply)
    return reply


def _fill(node: Node, group: ShadowGroup, reply: pb.BeginReply) -> None:
    """Have holds take in the background what the node has of former ranks; note in the reply what that is."""
    last = group.begin.first_iteration - 1
    with node.state_changed:
        begin = group.begin
        former = FormerState.of(
            *(node.state.former, node.resources, last, begin.continues), set(begin.former_groups)
        )
    work = {}
    for hold in group.holds:
        if numbers := former.covered(group.layout, hold.wanted_parameters()):
            work[hold] = numbers
            reply.filled.add(shard=hold.plan.shard, parameters=numbers)

    def fill() -> None:
        for hold, numbers in work.items():
            for lot in former.fill(group.layout, numbers):
                node.load(hold, last, lot)

    if work:
        node.run_beside(fill, f"former state of DP group {group.begin.group}")


def _take_up(node: Node, request: pb.BeginRequest) -> None:
    """Read the job file again if a start of training has other ranks.

    Raise `CallRefused` if this node can't go on with the file as it is now.
    """
    check_protocol(request.protocol)
    check_job(node.job, request.job)
    if node.file is None or difference(request.job_ranks, node.job_ranks) is None:
        return
    node.file.read_again()
    job, why = node.file.job_for(request.job_ranks)
    if why:
        raise CallRefused(why, precondition=True)
    if job is not None:
        with node.state_changed:
            node.state.ended_starts.check(request, node.state.generation)
        node.take_up(job)


def _warnings(node: Node, group: ShadowGroup) -> list[str]:
    replicas = [node.resources[hold].replica for hold in group.holds]
    return warnings(group.begin, exact=all(replica.comparison.exact for replica in replicas))


def _new_resources(
    node: Node, request: pb.BeginRequest, layout: Layout, reused: Mapping[int, Hold]
) -> list[HoldResources]:
    """Return the group's holds on this node, with their resources.

    Holds that a restart has `reused`, by shard, keep their state.
    """
    first, late = request.first_iteration, request.next_iteration > request.first_iteration
    joined = request.next_iteration + AHEAD if late else first
    ranks, channels = request.ranks, node.job.channels
    group = []
    for plan in node.plans:
        if plan.group != request.group:
            continue
        before = reused.get(plan.shard)
        replica = node.resources[before].replica if before is not None else _replica(layout, plan, request)
        try:
            resources = HoldResources(
                *(plan, layout, replica),
                channels=channels,
                ranks=ranks,
                first=first,
                joined=joined,
                repairs=not node.job.lossless,
            )
        except StreamTooLong as error:
            raise CallRefused(f"DP group {plan.group}, shard {plan.shard}: {error}") from None
        if before is not None:
            resources.hold.doubt.continue_from(before.doubt)
        group.append(resources)
    return group


def _is_gpu(request: pb.BeginRequest) -> bool:
    """Return whether the node repeats a GPU's steps."""
    return request.device.startswith("cuda") and not request.optimizer.copied


def _replica(layout: Layout, plan: HoldPlan, request: pb.BeginRequest) -> Replica:
    try:
        gpu = _is_gpu(request)
        exact = not gpu or is_recorded(request.torch, request.device)
        arithmetic: Arithmetic = "gpu" if gpu else "cpu"
        return Replica(layout, plan.shard, request.optimizer, exact=exact, arithmetic=arithmetic)
    except (RuntimeError, TypeError, ValueError) as error:  # torch checks options in its own ways
        raise CallRefused(f"unsupported optimizer: {error}") from None


def keep_refusal(node: Node, request: pb.RefusedRequest) -> None:
    """Keep why a script was refused. Raise `CallRefused` if the request is wrong, or of another start."""
    check_refused(request)
    check_job(node.job, request.job)
    with node.moving() as state:
        state.keep_refusal(request)


def status(node: Node, request: pb.StatusRequest) -> pb.NodeStatus:
    """Return the node's status. Raise `CallRefused` for another job or a caller of another version."""
    check_protocol(request.protocol)
    return node_status(node, request.job)


def node_status(node: Node, job: str) -> pb.NodeStatus:
    """Return the node's status. Raise `CallRefused` for another job."""
    check_job(node.job, job)
    with node.state_changed:
        return locked_status(node)


def locked_status(node: Node) -> pb.NodeStatus:
    """Return the node's status. The caller holds the node's lock."""
    state, all_resources = node.state, [node.resources[hold] for _, hold in node.state.holds]
    for resources in all_resources:
        resources.observe()
    holds, now = list(state.holds), node.now()
    dropped = [why for group in state.groups.values() for why in group.dropped.values()]
    return pb.NodeStatus(
        job=node.job.job,
        protocol=PROTOCOL,
        node=node.id,
        holds_nothing=not (dropped or state.former or any(hold.holds_something for _, hold in holds)),
        fenced=state.fenced,
        incarnation=max(state.committee.incarnation, 0),
        generation=state.generation,
        discarded=state.ended_starts.discarded,
        trainers=node.trainers(),
        job_ranks=node.job_ranks,
        holds=[
            hold_status(
                group,
                hold,
                counts=not state.leaving.undecided,
                now=now,
                left_out=resources.count_left_out(),
            )
            for (group, hold), resources in zip(holds, all_resources, strict=True)
        ],
        waited_seconds=max((group.waited for group in state.groups.values()), default=0.0),
        left=state.leaving.has_left,
        torch=torch.__version__,
        capability=torch.backends.cpu.get_cpu_capability(),
        refusal=state.refusal,
        former=None if state.former is None else _former_state(state.former),
        trouble=[*state.all_troubles, *dropped],
        pull_seconds=max((pull_seconds(resources) for resources in all_resources), default=0.0),
        step_seconds=node.step_seconds,
        memory_bytes=memory.resident(),
        nics=[pb.NicStatus(ip=ip, bytes=nbytes) for ip, nbytes in node.source.received()],
        behind=[pb.Behind(node=n, iterations=i) for n, i in sorted(state.committee.behind.items())],
    )


def _former_state(former: Former) -> pb.FormerState:
    """Return what a node holds of its job with other ranks. The caller holds the node's lock."""
    return pb.FormerState(
        job_ranks=job_ranks(former.job),
        holds=[
            hold_status(group, hold, counts=True) for group in former.groups.values() for hold in group.holds
        ],
    )


def hold_status(
    group: ShadowGroup, hold: Hold, *, counts: bool, now: float = 0.0, left_out: int = 0
) -> pb.HoldStatus:
    """Return the status of a hold on a node that `counts`. The caller holds the node's lock.

    `left_out`: iterations that ranks have left out for it.
    """
    begin, lacks = group.begin, group.records.lacking(hold.stepped)
    live = hold.live and counts
    return pb.HoldStatus(
        shard=pb.Shard(group=hold.plan.group, shard=hold.plan.shard),
        incarnation=begin.incarnation,
        stepped=hold.stepped,
        # Parameters behind what is released have lost gradients: no step leads beyond `stepped`.
        in_full=max(hold.in_full, hold.stepped) if hold.stepped >= hold.released else hold.stepped,
        seeded=hold.seeded,
        live=live,
        offered=live and not hold.doubtful and not lacks,
        trouble=hold.trouble,
        streams=len(hold.streams),
        connected=sum(stream.connected for stream in hold.streams),
        receiving=hold.receiving,
        bytes=sum(stream.received_bytes for stream in hold.streams),
        run=begin.run,
        start=begin.start,
        continues=begin.continues,
        generation=begin.generation,
        first_iteration=begin.first_iteration,
        doubtful=hold.doubtful,
        lacks_buffers=lacks,
        last=hold.final == hold.stepped,
        left_out=left_out,
        trained=group.trained,
        lag_seconds=hold.lag_seconds(group.trained, now),
        repairs=sum(stream.repair.count for stream in hold.streams if stream.repair is not None),
        repair_bytes=sum(stream.repair.requested for stream in hold.streams if stream.repair is not None),
    )


def pull_seconds(resources: HoldResources) -> float:
    """Return the time from first to last byte of the newest complete iteration; 0 if there is none."""
    inlets = [inlet for inlet in resources.inlets if inlet.layout.nbytes]
    times = [{t: (begin, end) for t, begin, end in tuple(inlet.pulls)} for inlet in inlets]
    common = set.intersection(*(set(spans) for spans in times)) if times else set()
    if not common:
        return 0.0
    pulls = [spans[max(common)] for spans in times]
    return max(end for _, end in pulls) - min(begin for begin, _ in pulls)
