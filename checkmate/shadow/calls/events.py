"""`Events`: what has happened to this node, and to earlier processes of it that kept their events on disk."""

from __future__ import annotations

import math
import time
from typing import Final

from checkmate.events.event_log import EventLog
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import CallRefused, check_job
from checkmate.shadow.node import Node

ANSWER_BYTES: Final = 4 << 20
"""Bytes of the events in an answer, which has the newest ones."""


def events(node: Node, log: EventLog | None, request: pb.EventsRequest) -> pb.EventsReply:
    """Return the events since a time. Raise `CallRefused` for another job, or a time that is not a number."""
    check_job(node.job, request.job)
    if not math.isfinite(request.since):
        raise CallRefused("`since` is not a time")
    reply = pb.EventsReply(now=time.time())
    if log is None:
        return reply
    contents = log.read()
    lines: list[str] = []
    room = ANSWER_BYTES
    for event in reversed(contents.events):
        if event.time < request.since:
            continue
        line = event.to_line()
        room -= len(line)
        if room < 0:
            reply.older = True
            break
        lines.append(line)
    reply.events.extend(reversed(lines))
    reply.passed_over = sum(contents.passed_over.values())
    return reply
