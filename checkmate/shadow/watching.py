"""Watches for what does not come: gaps, late nodes, reservations that nobody ends; and for lag."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping

from checkmate.shadow import reading
from checkmate.shadow.group import Group
from checkmate.shadow.hold import AHEAD, Hold
from checkmate.shadow.node import Node

log = logging.getLogger("checkmate")

TICK = 0.1
_RATE_SECONDS = 1.0
_LAG_SECONDS = 1.0


class Watcher:
    """A thread beside a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._rated = time.monotonic()
        self._bytes: dict[int, int] = {}
        self._behind: set[int] = set()

    def start(self) -> None:
        """Watch from now on, until the node is closed."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _run(self) -> None:
        node = self._node
        while True:
            with node.changed:
                node.changed.wait_for(lambda: node.stopping, TICK)
                if node.stopping:
                    return
                try:
                    self._tick(time.monotonic())
                except Exception as error:  # our own fault; a thread that ended would look alive
                    log.exception("watching")
                    node.tell(f"watching failed: {error!r}")

    def _tick(self, now: float) -> None:
        node = self._node
        reading.expire(node, now)
        node.forget()
        self._rate(now)
        for group, hold in node.holds:
            if not hold.settled and not node.fenced:
                self._look(group, hold, now)
        node.refresh()
        self._say_behind(node.committee.behind)

    def _look(self, group: Group, hold: Hold, now: float) -> None:
        lost = hold.gap(group.records, now, self._node.grace)
        if lost is not None:
            if not hold.lock.locked():  # else after its step: waiting for that would stop the reading
                self._join_again(group, hold, lost)
        elif hold.live:
            self._lag(group, hold, now)

    def _join_again(self, group: Group, hold: Hold, lost: str) -> None:
        """Give up what was lost, and join some iterations ahead: twice as many where that was too late."""
        level = logging.WARNING if hold.live or hold.ahead == AHEAD else logging.DEBUG
        last = f"iteration {hold.stepped} was its last, " if hold.seeded else ""
        if not hold.live:
            hold.ahead *= 2
        iteration = self._node.join_again(group, hold)
        hold.trouble = f"{lost}; {last}it joins again at iteration {iteration}"
        log.log(level, "%s: %s", hold, hold.trouble)

    def _lag(self, group: Group, hold: Hold, now: float) -> None:
        """Say so where trainers are more than one iteration ahead of a live hold, and when that is over."""
        behind = group.records.newest - hold.stepped
        if behind <= 1:
            hold.lagging = now
            if hold.lag_said:
                hold.lag_said, hold.trouble = False, ""
                log.info("%s: no more than an iteration behind again", hold)
        elif now - hold.lagging > _LAG_SECONDS and not hold.doubtful:
            hold.trouble = f"{behind} iterations behind the trainers: a restart would repeat as many"
            if not hold.lag_said:
                hold.lag_said = True
                log.warning("%s: %s", hold, hold.trouble)

    def _say_behind(self, behind: Mapping[int, int]) -> None:
        """Say which nodes don't count, for others went on without them, and which do again."""
        for node in behind.keys() - self._behind:
            log.warning("shadow node %d is %d iterations behind, and doesn't count", node, behind[node])
        for node in self._behind - behind.keys():
            log.info("shadow node %d is not behind any more", node)
        self._behind = set(behind)

    def _rate(self, now: float) -> None:
        """For how long the fullest socket buffer lasts at the present rate: the patience with silence."""
        if now - self._rated < _RATE_SECONDS:
            return
        passed, self._rated = now - self._rated, now
        lasts, seen = [20.0], {}
        for _, hold in self._node.holds:
            for inlet in hold.inlets:
                seen[id(inlet)] = inlet.received
                rate = (inlet.received - self._bytes.get(id(inlet), inlet.received)) / passed
                if rate > 0:
                    lasts.append((self._node.receive_buffer - inlet.queued()) / rate)
        self._bytes = seen
        committee = self._node.committee
        committee.report(dataclasses.replace(committee.mine, patience=max(0.0, min(lasts))))
