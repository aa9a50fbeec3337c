"""One rank's connections to its group's shadow nodes: a line and a seeder for each."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Final

import torch.distributed as dist

from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.lines.line import Line
from checkmate.training.lines.seeder import Seeder, SeedSource
from checkmate.training.record.windows import Slices
from checkmate.training.start.opening import Opening
from checkmate.training.start.ready import await_ready, await_stepped
from checkmate.training.start.seeds import give_buffers, seed_at_start

_log: Final = logging.getLogger("checkmate")

AWAY_SECONDS: Final = 3.0
"""How long to wait at the end for a node whose connection is broken, because it may come back."""


class Followers:
    """Lines and seeders of all nodes, which handles the nodes' answers. `bring_up` connects them.

    `close` ends all threads. Queued messages are lost.
    """

    def __init__(self, opening: Opening, stubs: Stubs, source: SeedSource, slices: Slices | None) -> None:
        """Create the lines and seeders. `slices`: told about suspects; `None` on all but the first rank."""
        self._opening = opening
        self._slices = slices
        self._place = place = opening.place
        self._stubs = stubs
        self._troubles: dict[int, str] = {}
        begin = opening.begin_request if place.first else None
        with ExitStack() as undo:
            self.lines = [
                Line(node, stubs.to(node.id), begin, self._replied, self._begun, tls=stubs.tls)
                for node in place.nodes
            ]
            for line in self.lines:
                undo.callback(line.close)
            self._seeders: dict[int, Seeder] = {}
            for node in place.nodes:
                self._seeders[node.id] = Seeder(node.id, stubs.to(node.id), source, opening.seed_header)
                undo.callback(self._seeders[node.id].close)
            self._undo = undo.pop_all()

    def bring_up(self, deadline: float) -> None:
        """Connect to the nodes, seed them, and wait for both until the deadline. All ranks call it."""
        place, opening = self._place, self._opening
        for line in self.lines:
            line.start()
        box: list[list[int]] = [[]]
        if place.first:
            for line in self.lines:
                line.begun.wait(max(deadline - time.monotonic(), 0))
            box = [[line.node.id for line in self.lines if line.begun.is_set()]]
        dist.broadcast_object_list(box, src=place.spokesman, group=opening.ddp.process_group)
        seeders = {node: self._seeders[node] for node in box[0]}
        seed_at_start(place, opening.layout, opening.start, seeders)
        if place.first and opening.buffers is not None:
            give_buffers(place, opening.buffers, opening.start, seeders, deadline)
        waiting = [""]
        if place.first:
            waiting = [await_ready(place, self._stubs, opening.start.plan.incarnation, deadline)]
        dist.broadcast_object_list(waiting, src=place.spokesman, group=opening.ddp.process_group)
        if place.first and waiting[0]:
            _log.warning("training begins without all shadow nodes: %s", waiting[0])

    def finish(self, deadline: float) -> None:
        """Wait until the nodes have every record, but not beyond the deadline, and less for nodes away."""
        for line in self.lines:
            line.finish(0)
        away = time.monotonic() + AWAY_SECONDS
        for line in self.lines:
            if line.begun.is_set():
                until = deadline if line.connected else min(away, deadline)
                line.finish(until - time.monotonic())

    def await_stepped(self, iteration: int, deadline: float) -> None:
        """Wait until the nodes have stepped an iteration; log a warning if they have not by the deadline."""
        opening = self._opening
        incarnation = opening.start.plan.incarnation
        if missing := await_stepped(self._place, self._stubs, incarnation, iteration, deadline):
            _log.warning(
                "training ends, but shadow nodes have not stepped iteration %d: %s", iteration, missing
            )

    def close(self) -> None:
        """End all threads."""
        for line in self.lines:
            line.end()
        self._undo.close()

    def _begun(self, request: pb.BeginRequest) -> None:
        """Send buffers again to a node that joined late or came back."""
        buffers = self._opening.buffers
        if buffers is not None and request.next_iteration > request.first_iteration:
            buffers.again()

    def _replied(self, node: int, reply: pb.RecordReply) -> None:
        """Handle a node's answer to a record. This rank seeds only its own share of the shards."""
        for wanted in reply.wanted:
            if wanted.shard % self._place.ranks == self._place.position:
                numbers = wanted.parameters or self._opening.layout.of_shard(wanted.shard)
                self._seeders[node].want(wanted.shard, numbers)
        if self._slices is not None and reply.suspects:
            self._slices.look_first(reply.suspects)
        if reply.buffers and self._opening.buffers is not None:
            self._opening.buffers.again()
        if reply.trouble != self._troubles.get(node, ""):
            self._troubles[node] = reply.trouble
            _log.warning("shadow node %d: %s", node, reply.trouble or "recovered")
