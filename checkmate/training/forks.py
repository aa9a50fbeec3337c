"""What a forked child, such as a DataLoader's worker, must leave alone: gRPC's objects.

Its threads aren't there in the child, and what they held locked at the fork is locked for good. Whatever
frees such an object there may wait forever, and the parent for it; a collection of garbage frees them.
"""

from __future__ import annotations

import gc
import os
import threading

# Its fork handlers, the other way, abort workers that are forked while calls are under way. Before gRPC is
# imported, or it isn't heeded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_one_at_a_time = threading.RLock()
_collected: list[bool] = []


def _before() -> None:
    _one_at_a_time.acquire()
    _collected.append(gc.isenabled())
    gc.disable()


def _in_parent() -> None:
    if _collected.pop():
        gc.enable()
    _one_at_a_time.release()


def _in_child() -> None:
    gc.freeze()  # so the child collects what it makes itself
    _in_parent()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
