"""Asks the live shadow nodes for their events, and reads the logs of others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from checkmate.base.wording import counted
from checkmate.events.event import Event
from checkmate.events.reading import parse_event, read_paths
from checkmate.job.schema import Job
from checkmate.nodes.standing import node_name
from checkmate.nodes.stubs import ANSWER_SECONDS, Stubs, reason
from checkmate.report.processes import node_source
from checkmate.report.records import NodeClock
from checkmate.rpc import shadow_pb2 as pb

_AT_ONCE: Final = 32
_OLDER_VERSION: Final = "it has no event log, because it runs an older version of Checkmate"


@dataclass
class Gathered:
    """The events that were found, the processes that have answered, and what could not be had."""

    events: list[Event] = field(default_factory=list)
    live: list[tuple[str, str, int]] = field(default_factory=list)
    silent: dict[int, str] = field(default_factory=dict)
    clocks: list[NodeClock] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, job: Job, node: int, reply: pb.EventsReply, since: float) -> None:
        """Take a node's answer. Only its own events count, so that none can speak for another process."""
        strange, events = 0, []
        for line in reply.events:
            try:
                event = parse_event(line)
            except ValueError:
                strange += 1
                continue
            if (event.source, event.job) == (node_source(node), job.job):
                events.append(event)
            else:
                strange += 1
        self.events += events
        if events:
            self.live.append(max(events, key=lambda event: event.time).process)  # the one that answers
        if strange + reply.passed_over:
            lines = counted(strange + reply.passed_over, "line")
            self.notes.append(f"{node_name(job, node)}: {lines} of its event log could not be read")
        if reply.older and (not events or events[0].time > since):
            self.notes.append(f"{node_name(job, node)} has older events, too many for one answer")


def ask_nodes(job: Job, stubs: Stubs, since: float, gathered: Gathered) -> None:
    """Ask all shadow nodes of a job for their events, at once. `since`: what the report is about."""
    nodes = [node.id for node in job.shadow_nodes]
    with ThreadPoolExecutor(min(len(nodes), _AT_ONCE)) as pool:
        answers = pool.map(lambda node: _ask(job, stubs, node), nodes)
        for node, (reply, clock) in zip(nodes, answers, strict=True):
            if isinstance(reply, str):
                gathered.silent[node] = reply
                continue
            gathered.take(job, node, reply, since)
            if clock is not None:
                gathered.clocks.append(clock)


def _ask(job: Job, stubs: Stubs, node: int) -> tuple[pb.EventsReply | str, NodeClock | None]:
    request = pb.EventsRequest(job=job.job)
    sent_at = time.time()
    try:
        reply: pb.EventsReply = stubs.to(node).Events(request, timeout=ANSWER_SECONDS)
    except grpc.RpcError as error:
        old = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNIMPLEMENTED
        return _OLDER_VERSION if old else reason(error), None
    received_at = time.time()
    if not math.isfinite(reply.now):
        return reply, None
    ahead = reply.now - (sent_at + received_at) / 2
    return reply, NodeClock(node, round(ahead, 4), round((received_at - sent_at) / 2, 4))


def read_logs(paths: Iterable[Path], gathered: Gathered) -> None:
    """Add what was kept in files and folders. Raise `EventsError` if one cannot be read."""
    result = read_paths(paths)
    gathered.events += result.events
    for path, lines in result.passed_over.items():
        gathered.notes.append(
            f"{path}: {counted(lines, 'line')} could not be read, such as one that a crash has torn"
        )
