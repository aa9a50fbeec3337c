"""`Status`: the status of a node and its holds. Changes nothing."""

from __future__ import annotations

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow import memory
from checkmate.shadow.hold import Hold
from checkmate.shadow.logic.bounds import check_protocol
from checkmate.shadow.logic.group import ShadowGroup, check_job
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.node import Node


def status(node: Node, request: pb.StatusRequest) -> pb.NodeStatus:
    """Return the node's status. Raise `CallRefused` for another job or a caller of another version."""
    check_protocol(request.protocol)
    return node_status(node, request.job)


def node_status(node: Node, job: str) -> pb.NodeStatus:
    """Return the node's status. Raise `CallRefused` for another job."""
    check_job(node.job, job)
    with node.changed:
        return locked_status(node)


def locked_status(node: Node) -> pb.NodeStatus:
    """Return the node's status. The caller holds the node's lock."""
    state, data = node.state, [node.data[hold] for _, hold in node.state.holds]
    for one in data:
        one.look()
    holds = list(state.holds)
    dropped = [why for group in state.groups.values() for why in group.dropped.values()]
    return pb.NodeStatus(
        job=node.job.job,
        protocol=PROTOCOL,
        node=node.id,
        holds_nothing=not (dropped or any(hold.holds_something for _, hold in holds)),
        fenced=state.fenced,
        incarnation=max(state.committee.incarnation, 0),
        generation=max((group.begin.generation for group in state.groups.values()), default=0),
        holds=[hold_status(group, hold) for group, hold in holds],
        torch=torch.__version__,
        capability=torch.backends.cpu.get_cpu_capability(),
        trouble=[*state.troubles, *dropped],
        pull_seconds=max((pull_seconds(hold) for hold in data), default=0.0),
        step_seconds=node.step_seconds,
        memory_bytes=memory.resident(),
        nics=[
            pb.NicStatus(ip=ip, bytes=reader.bytes)
            for ip, reader in zip(node.nics, node.readers, strict=True)
        ],
        behind=[pb.Behind(node=n, iterations=i) for n, i in sorted(state.committee.behind.items())],
    )


def hold_status(group: ShadowGroup, hold: HoldState) -> pb.HoldStatus:
    """Return the status of a hold. The caller holds the node's lock."""
    begin, lacks = group.begin, group.records.lacking(hold.stepped)
    return pb.HoldStatus(
        shard=pb.Shard(group=hold.plan.group, shard=hold.plan.shard),
        incarnation=begin.incarnation,
        stepped=hold.stepped,
        in_full=max(hold.in_full, hold.stepped) if hold.stepped >= hold.released else hold.stepped,
        seeded=hold.seeded,
        live=hold.live,
        offered=hold.live and not hold.doubtful and not lacks,
        trouble=hold.trouble,
        streams=len(hold.plan.streams),
        connected=sum(stream.connected for stream in hold.streams),
        receiving=hold.receiving,
        bytes=sum(stream.received for stream in hold.streams),
        run=begin.run,
        start=begin.start,
        continues=begin.continues,
        generation=begin.generation,
        first_iteration=begin.first_iteration,
        doubtful=hold.doubtful,
        lacks_buffers=lacks,
        last=hold.last == hold.stepped,
    )


def pull_seconds(hold: Hold) -> float:
    """Return the time from first to last byte of the newest complete iteration; 0 if there is none."""
    inlets = [inlet for inlet in hold.inlets if inlet.layout.nbytes]
    times = [{t: (began, ended) for t, began, ended in tuple(inlet.pulls)} for inlet in inlets]
    common = set.intersection(*(set(one) for one in times)) if times else set()
    if not common:
        return 0.0
    spans = [one[max(common)] for one in times]
    return max(ended for _, ended in spans) - min(began for began, _ in spans)
