"""Checkmate: per-iteration checkpoints of data-parallel PyTorch training.

checkmate.restore(model, optimizer)   # resume from the shadow nodes, if they hold anything
checkmate.protect(model, optimizer)   # have them follow from here on
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

from checkmate.base import extras
from checkmate.errors import CheckmateError as CheckmateError

if TYPE_CHECKING:
    from checkmate.keys.errors import KeysError
    from checkmate.optim.supported import UnsupportedOptimizer
    from checkmate.ring.place import RingError
    from checkmate.state import StateError
    from checkmate.tagger import TaggerUnavailable
    from checkmate.training.errors import RefusedError, RegroupError, SessionError
    from checkmate.training.in_place.attendance import MeetingError
    from checkmate.training.in_place.resilient import resilient
    from checkmate.training.loop import Batches
    from checkmate.training.protect import Protection, protect
    from checkmate.training.record.wrapped import clip_grad_norm_, clip_grads_with_norm_
    from checkmate.training.restore import Restored, restore
    from checkmate.training.start.all_ranks import RestoreError
    from checkmate.training.start.named_job import job_mesh, shard_mesh
    from checkmate.wire.parameter import LayoutError

    __version__: str

# gRPC reads it when it is imported. Else it logs each failed handshake, without a limit.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "Batches",
    "CheckmateError",
    "KeysError",
    "LayoutError",
    "MeetingError",
    "Protection",
    "RefusedError",
    "RegroupError",
    "RestoreError",
    "Restored",
    "RingError",
    "SessionError",
    "StateError",
    "TaggerUnavailable",
    "UnsupportedOptimizer",
    "__version__",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "job_mesh",
    "protect",
    "resilient",
    "restore",
    "shard_mesh",
]

_WHERE: Final = {
    "Batches": "checkmate.training.loop",
    "clip_grad_norm_": "checkmate.training.record.wrapped",
    "clip_grads_with_norm_": "checkmate.training.record.wrapped",
    "job_mesh": "checkmate.training.start.named_job",
    "KeysError": "checkmate.keys.errors",
    "LayoutError": "checkmate.wire.parameter",
    "MeetingError": "checkmate.training.in_place.attendance",
    "Protection": "checkmate.training.protect",
    "protect": "checkmate.training.protect",
    "RefusedError": "checkmate.training.errors",
    "RegroupError": "checkmate.training.errors",
    "RestoreError": "checkmate.training.start.all_ranks",
    "resilient": "checkmate.training.in_place.resilient",
    "Restored": "checkmate.training.restore",
    "restore": "checkmate.training.restore",
    "RingError": "checkmate.ring.place",
    "SessionError": "checkmate.training.errors",
    "shard_mesh": "checkmate.training.start.named_job",
    "StateError": "checkmate.state",
    "TaggerUnavailable": "checkmate.tagger",
    "UnsupportedOptimizer": "checkmate.optim.supported",
}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import on first use, because importing torch takes seconds and most commands do not need it."""
        if name == "__version__":
            return metadata.version("checkmate-training")
        if name not in _WHERE:
            raise AttributeError(f"module 'checkmate' has no attribute {name!r}")
        with extras.needs(f"checkmate.{name}", "trainer"), _no_collection():
            return getattr(import_module(_WHERE[name]), name)

    @contextmanager
    def _no_collection() -> Iterator[None]:
        """Keep the garbage collector from searching what imports create, which stays, and all of torch."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if not gc.get_freeze_count():  # else the caller's frozen objects would thaw
                gc.freeze()
                gc.unfreeze()  # all objects count as old now, so that the next collection is small
            if collects:
                gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
