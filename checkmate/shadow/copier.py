"""Seeding of our holds from their other holders, one piece at a time (design, section 7, *Loss*)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import grpc

from checkmate import state
from checkmate.nodes.reader import NotReserved, ShardReading, ShardRequest, read_shard, reserved
from checkmate.nodes.stubs import Stubs
from checkmate.shadow.logic.group import ShadowGroup
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.node import Node
from checkmate.wire.layout import Layout

log = logging.getLogger("checkmate")

PIECE_BYTES = 16 << 20
"""Size of parameters fetched from another holder at a time."""

_FETCH_SECONDS = 60.0
_IDLE_SECONDS = 0.1


class Copier:
    """A thread that copies seeds between `start` and `stop`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stubs = Stubs(node.job, node.access.keys)
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)

    def start(self) -> None:
        """Start the thread, if any hold has another holder."""
        if any(plan.other_holders for plan in self._node.plans):
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close the connections."""
        self._stubs.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._node.stopping:
            with self._node.state_changed:
                holds = [
                    (group, hold)
                    for group, hold in self._node.state.holds
                    if hold.plan.other_holders and hold.wants_seeds
                ]
            helped = [self._help(group, hold) for group, hold in holds]
            if not any(helped):
                time.sleep(_IDLE_SECONDS)

    def _help(self, group: ShadowGroup, hold: Hold) -> bool:
        """Fetch one piece for a hold. Return whether any of its other holders had it."""
        for holder in hold.plan.other_holders:
            try:
                has_piece = self._piece(holder, group, hold)
            except (grpc.RpcError, NotReserved, state.StateError, ValueError) as error:
                log.debug("no seeds of %s from shadow node %d: %s", hold, holder, error)
                has_piece = False
            with self._node.state_changed:
                hold.note_holder(gives=has_piece)
            if has_piece:
                return True
        return False

    def _piece(self, holder: int, group: ShadowGroup, hold: Hold) -> bool:
        """Fetch some wanted parameters from one other holder. Return whether there was anything to fetch."""
        begin = group.begin
        with reserved(self._stubs, [holder], _FETCH_SECONDS, at_least=hold.released) as reservation:
            with self._node.state_changed:
                numbers = first_parameters(hold.wanted_parameters(), group.layout, PIECE_BYTES)
            if not numbers:
                return False  # trainers were faster
            request = ShardRequest(
                self._node.job.job,
                begin.run,
                reservation.iteration,
                *hold.shard,
                begin.incarnation,
                begin.start,
                tuple(numbers),
            )
            piece = read_shard(
                self._stubs.to(holder), request, ShardReading(time.monotonic() + _FETCH_SECONDS)
            )
        self._node.load(hold, reservation.iteration, piece.states)
        with self._node.moving():
            group.records.adopt(piece.header.record)
        return True


def first_parameters(numbers: Sequence[int], layout: Layout, most: int) -> list[int]:
    """Return the first parameters, at least one, until their size reaches `most` bytes."""
    chosen_numbers: list[int] = []
    nbytes = 0
    for number in numbers:
        chosen_numbers.append(number)
        nbytes += layout.parameters[number].nbytes
        if nbytes >= most:
            break
    return chosen_numbers
