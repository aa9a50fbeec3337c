"""Lines of the log that a node's state requests, each with its event. Pure."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Set

from checkmate.base.wording import at_iteration, counted, shortened
from checkmate.events.kinds import (
    COMPARISON_MISMATCH,
    HOLD_BEHIND,
    HOLD_CHANGED,
    NODE_RESET,
    NODE_TROUBLE,
    PEER_BACK,
    PEER_BEHIND,
    PEER_LOST,
    RANKS_CHANGED,
    RANKS_WHOLE,
    SHARD_SEEDED,
    STREAM_GAP,
    TRAINING_OVERLAPS,
    TRAINING_REFUSED,
)
from checkmate.nodes.standing import overlap_words, refusal_words
from checkmate.output.log_lines import left_out_words
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import REFUSAL_MAX
from checkmate.shadow.logic.commit import Committee
from checkmate.shadow.logic.effects import Log
from checkmate.shadow.logic.hold import Hold

LAG_SECONDS = 60.0
"""Least time between two events about a hold that is behind."""


def hold_changed(level: int, hold: Hold, state: str, message: str, why: str = "") -> Log:
    """Return the line about a hold that is in another state."""
    group, shard = hold.shard
    event = HOLD_CHANGED(group=group, shard=shard, state=state, iteration=hold.stepped, why=why)
    return Log(level, message, event)


def hold_live(hold: Hold) -> Log:
    """Return the line about a hold that is live from now on."""
    return hold_changed(logging.INFO, hold, "live", f"{hold}: live {at_iteration(hold.stepped)}")


def hold_seeded(hold: Hold) -> Log:
    """Return the line about a hold all of whose parameters have arrived."""
    group, shard = hold.shard
    event = SHARD_SEEDED(group=group, shard=shard, iteration=hold.stepped)
    return Log(logging.DEBUG, f"{hold}: seeded {at_iteration(hold.stepped)}", event)


def stream_gap(level: int, hold: Hold, stepped: int, joins: int, why: str) -> Log:
    """Return the line about lost gradients. `stepped`: the last iteration before."""
    group, shard = hold.shard
    event = STREAM_GAP(group=group, shard=shard, iteration=stepped, joins=joins, why=why)
    return Log(level, f"{hold}: {hold.trouble}", event)


def comparison_mismatch(hold: Hold, iteration: int, left_out: int) -> Log:
    """Return the line about a hold that differs from the trainers' state after an iteration.

    `left_out`: how many differences before this one were not said.
    """
    group, shard = hold.shard
    event = COMPARISON_MISMATCH(group=group, shard=shard, iteration=iteration, why=hold.trouble)
    return Log(logging.ERROR, f"{hold}: {hold.trouble}{left_out_words(left_out)}", event)


def training_refused(refusal: pb.Refusal) -> Log:
    """Return the line about a script that was refused."""
    event = TRAINING_REFUSED(
        incarnation=refusal.incarnation,
        iteration=refusal.iteration,
        rank=shortened(refusal.rank),
        why=shortened(refusal.text, REFUSAL_MAX),
    )
    return Log(logging.WARNING, f"training was refused {refusal_words(refusal)}", event)


def training_overlaps(hosts: Collection[str], seconds: float) -> Log:
    """Return the line for the moment when an older start shows that it goes on. `seconds`: since it ended."""
    why = overlap_words(hosts)
    return Log(logging.WARNING, f"{why} (it was superseded {seconds:.0f} s ago)", TRAINING_OVERLAPS(why=why))


def node_trouble(why: str) -> Log:
    """Return the line about a problem of the node."""
    return Log(logging.ERROR, why, NODE_TROUBLE(why=why))


def node_reset(generation: int) -> Log:
    """Return the line about runs that are discarded."""
    message = f"reset: what it held up to generation {generation} is discarded"
    return Log(logging.WARNING, message, NODE_RESET(generation=generation))


def took_up(stays: bool) -> Log:
    """Return the line about a job file with other ranks. `stays`: whether the former ones' state does."""
    message = "training restarts with other ranks than before, which this node follows"
    state = "; it keeps the state of the former ones until its job has all shards again" if stays else ""
    return Log(logging.INFO, message + state, RANKS_CHANGED())


def former_dropped() -> Log:
    """Return the line about state of former ranks that nobody needs any more."""
    message = "the job has all shards again: the state of its former ranks is dropped"
    return Log(logging.INFO, message, RANKS_WHOLE())


class LagWatch:
    """The lines about holds that are behind: at most one a minute for each, because slow nodes repeat it."""

    def __init__(self) -> None:
        self._announced: dict[tuple[int, int], float] = {}
        self._late: set[tuple[int, int]] = set()
        """Shards of which a line says that they are behind."""

    def announce(self, hold: Hold, level: int, message: str, now: float) -> Log:
        """Return the line about a hold that is behind, or has caught up."""
        before = self._announced.get(hold.shard)
        if level < logging.WARNING:
            worth = hold.shard in self._late
            self._late.discard(hold.shard)
            return Log(level if worth else logging.DEBUG, message)
        if before is not None and now - before < LAG_SECONDS:
            return Log(logging.DEBUG, message)
        self._announced[hold.shard] = now
        self._late.add(hold.shard)
        group, shard = hold.shard
        event = HOLD_BEHIND(group=group, shard=shard, iteration=hold.stepped, why=hold.trouble)
        return Log(level, message, event)


class PeerWatch:
    """The lines about other nodes that are lost or left behind, and about their return."""

    def __init__(self) -> None:
        self._lost_nodes: set[int] = set()
        self._late: Set[int] = frozenset()

    def announce_lost(self, committee: Committee) -> Iterator[Log]:
        """Yield the lines about nodes whose processes have ended, and about those that are back."""
        ended_nodes, present = committee.reporters()
        for node in sorted(ended_nodes - self._lost_nodes):
            why = "its process has ended, or has begun again"
            yield Log(logging.DEBUG, f"shadow node {node}: {why}", PEER_LOST(node=node, why=why))
        back = sorted(self._lost_nodes & present)
        for node in back:
            yield Log(logging.DEBUG, f"shadow node {node} answers again", PEER_BACK(node=node))
        self._lost_nodes = (self._lost_nodes | ended_nodes) - set(back)

    def announce_behind(self, committee: Committee) -> Iterator[Log]:
        """Yield the lines about nodes that stop to count, or count again."""
        before, behind = self._late, committee.behind
        if before == behind.keys():
            return
        for node in sorted(behind.keys() - before):
            lag = counted(behind[node], "iteration")
            event = PEER_BEHIND(node=node, iterations=behind[node])
            yield Log(logging.WARNING, f"shadow node {node} is {lag} behind, and does not count", event)
        for node in sorted(before - behind.keys()):
            yield Log(logging.INFO, f"shadow node {node} has caught up", PEER_BACK(node=node))
        self._late = frozenset(behind)
