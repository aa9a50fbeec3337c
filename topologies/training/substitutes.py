"""Replacements of Checkmate in a training script, for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar

from torch.nn.parallel import DistributedDataParallel

from checkmate import Restored
from checkmate.ring import connect_ring
from checkmate.ring.connections import RingPlace
from checkmate.training.gradients.hook import GradientHook
from checkmate.training.start.membership import join, lay_out, trained

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Untagged(Unprotected):
    """Replacement of `checkmate.protect`: the same ring and bits, without tags, records and shadow nodes."""

    def __init__(self, ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
        session = join(ddp)
        layout = lay_out(ddp, session.shards)
        place = RingPlace(session.position, session.ips, session.job.channels, fingerprint=layout.fingerprint)
        self._ring = connect_ring(place)
        self._hook = GradientHook(ddp, layout, list(trained(ddp).values()), self._ring, 0)
        self._hook.register()

    def __exit__(self, *_: object) -> None:
        self._hook.close()
        self._ring.close()
