"""The TCP connections of a double binary tree: on each channel and edge of a tree, one each way.

Each way has a connection of its own, as in the ring, so that a tagged segment never carries a SACK block.
Connections begin as those of the ring do, with greetings and proofs.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from checkmate.ring.connections import Connections, Hop, Sender, connect
from checkmate.ring.place import RingPlace
from checkmate.tagger import Tagger
from checkmate.tree.progress import TreeLink, TreeWay, links
from checkmate.wire.ring_sockets import TREE_CHANNEL_PORTS
from checkmate.wire.schedule import SIDES, side_of
from checkmate.wire.tree import TreePlace, tree_place

_ENDS: Final = 3  # of a rank in a tree, on which it accepts: its parent's, and two children's
assert len(SIDES) * _ENDS == TREE_CHANNEL_PORTS


@dataclass(frozen=True)
class TreeEnd:
    """This rank's end of a connection: the way of its data, the rank at the other end, and its socket."""

    link: TreeLink
    peer: int
    sender: Sender | None = None
    receiver: socket.socket | None = None


class Tree(Connections):
    """A rank's connections in both trees, on all channels."""

    def __init__(
        self,
        place: RingPlace,
        senders: list[Sender],
        receivers: list[socket.socket],
        tagger: Tagger | None = None,
    ) -> None:
        super().__init__(place, senders, receivers, tagger)
        self.ends: dict[tuple[int, int], list[TreeEnd]] = defaultdict(list)
        """By channel, counted from 0, and side."""
        going, coming = iter(senders), iter(receivers)
        for channel, side, link, peer in _all_links(place):
            sender, receiver = (next(going), None) if link.way.sends else (None, next(coming))
            self.ends[channel, side].append(TreeEnd(link, peer, sender, receiver))

    def root(self, channel: int) -> Sender | None:
        """Return what sends results on a channel if this rank is a root, which has one child."""
        side = side_of(self.place.ranks, self.place.rank)
        if side is None:
            return None
        return next(end.sender for end in self.ends[channel, side] if end.link.way is TreeWay.RESULT_OUT)


def connect_tree(place: RingPlace, tagger: Tagger | None = None, timeout: float = 30) -> Tree:
    """Connect to the ranks beside this one in both trees.

    Args:
        place: This rank's place. `ports` are the first ones of the ranks for trees.
        tagger: Tags what a root sends; `None` on ranks that do not tag.
        timeout: Seconds within which all ranks must start, in any order.

    Raises:
        RingError: A rank is missing or has another configuration.
    """
    outgoing, incoming = [], []
    for channel, side, link, peer in _all_links(place):
        if not link.way.sends:
            incoming.append(Hop(peer, _port(channel, side, link)))
            continue
        places = tree_place(place.ranks, place.rank, side), tree_place(place.ranks, peer, side)
        tagged = place.channels + channel if places[0].parent is None else None
        outgoing.append(Hop(peer, _port(channel, side, _other_end(place.rank, link, places[1])), tagged))
    return Tree(place, *connect(place, outgoing, incoming, tagger, timeout), tagger)


def _all_links(place: RingPlace) -> list[tuple[int, int, TreeLink, int]]:
    """Return channel, side, link and peer of each of a rank's connections."""
    ends = []
    for channel in range(place.channels):
        for side in SIDES:
            at = tree_place(place.ranks, place.rank, side)
            for link in links(at):
                up = (
                    at.parent if link.way in (TreeWay.SUM_OUT, TreeWay.RESULT_IN) else at.children[link.child]
                )
                assert up is not None
                ends.append((channel, side, link, up))
    return ends


def _other_end(rank: int, link: TreeLink, peer: TreePlace) -> TreeLink:
    """Return the peer's link at the other end of one on which this rank sends."""
    if link.way is TreeWay.RESULT_OUT:
        return TreeLink(TreeWay.RESULT_IN)
    return TreeLink(TreeWay.SUM_IN, peer.children.index(rank))


def _port(channel: int, side: int, link: TreeLink) -> int:
    """Return the port, after a rank's first one, on which it accepts the connection of a link."""
    end = 0 if link.way is TreeWay.RESULT_IN else 1 + link.child
    return (len(SIDES) * channel + side) * _ENDS + end
