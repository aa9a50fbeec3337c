"""What takes the place of `checkmate.restore` and `checkmate.protect` in ranks that are compared with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from torch import nn

from checkmate import Restored
from checkmate.job.boundaries import slicing
from checkmate.job.schema import Rank
from checkmate.ring.connections import connect_ring
from checkmate.ring.place import RingPlace, host_ports, ring_ports, tree_ports
from checkmate.training.gradients.host_reducer import HostReducer, HostRings, merge
from checkmate.training.gradients.reducer import Reducer
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.training.gradients.setup import reducing_front
from checkmate.training.model.choosing import model_of
from checkmate.training.start.named_job import named_job
from checkmate.training.start.places import Place, join, lay_out_shares
from checkmate.tree.connections import Tree, connect_tree
from checkmate.wire.layout import Layout

Batch = TypeVar("Batch")


def nothing_to_restore(*_: Any, **__: Any) -> Restored:
    """Replace `checkmate.restore`: training begins with iteration 0."""
    return Restored(0, None)


class Unprotected:
    """Replacement of `checkmate.protect`: DDP's own AllReduce averages gradients."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches."""
        return iter(batches)

    def mark(self) -> None:
        """Do nothing: the ends of iterations are not needed."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PORTS: Final = 1000
"""More than the rings of one job have at an address."""


class Untagged(Unprotected):
    """Replacement of `checkmate.protect`: the same reduction, without tags, records and shadow nodes."""

    def __init__(self, module: nn.Module, *_: Any, ring: int = 0, loopback: bool = False, **__: Any) -> None:
        """Connect it.

        Args:
            module: The model.
            ring: Its number, if the process has several.
            loopback: Whether ranks have addresses of this machine, instead of the job's.
        """
        model = model_of(module)
        session = join(model, named_job())
        layouts = lay_out_shares(model, session, slicing(session.job, session.group))
        layout = layouts[session.group]
        place = RingPlace(
            session.position,
            _addresses(session.job.dp_groups[session.group].ranks, loopback),
            session.job.channels,
            ports=[port + ring * _PORTS for port in ring_ports(session.job, session.group)],
            device=None if loopback else session.interface,
            fingerprint=layout.fingerprint,
        )
        pinned = next(iter(model.trained().values())).is_cuda
        divisor = session.replicas if model.averages else 1
        with contextlib.ExitStack() as undo:
            connections = undo.enter_context(connect_ring(place)), layout, _tree(session, place, ring, undo)
            inner = RingReducer(*connections, pinned=pinned, divisor=divisor)
            reducer: Reducer = inner
            if session.together:
                rings = undo.enter_context(HostRings(_host_place(session, layouts, ring, loopback)))
                merged = merge(list(layouts.values()))
                reducer = HostReducer(merged, session.share.index, inner, rings, pinned=pinned)
            front = reducing_front(model, reducer, 0)
            undo.callback(front.close)
            front.register()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the rings."""
        self._undo.close()


def _tree(session: Place, place: RingPlace, ring: int, undo: contextlib.ExitStack) -> Tree | None:
    """Connect the trees, if the job has any; `undo` closes the connections."""
    if not session.job.has_trees(session.group):
        return None
    ports = [port - ring * _PORTS for port in tree_ports(session.job, session.group)]
    return undo.enter_context(connect_tree(replace(place, ports=ports)))


def _addresses(ranks: Iterable[Rank], loopback: bool) -> list[str]:
    return [f"127.0.0.{rank.rank + 1}" if loopback else str(rank.ip) for rank in ranks]


def _host_place(session: Place, layouts: Mapping[int, Layout], ring: int, loopback: bool) -> RingPlace:
    """Return this rank's place among those of its host that train its model."""
    ranks = session.host_ranks
    return RingPlace(
        session.share.index,
        _addresses(ranks, loopback),
        1,
        ports=[port - ring * _PORTS for port in host_ports(session.job, ranks)],
        fingerprint=layouts[session.together[0]].fingerprint,
    )
