"""Keeps forked children, such as DataLoader workers, from freeing gRPC's objects.

gRPC's threads do not exist in the child, and locks that they held at the fork stay locked. Garbage collection
in the child could free such an object and wait for ever, and the parent with it.
"""

from __future__ import annotations

import gc
import os
import threading

# gRPC's own fork handlers abort workers that are forked during a call. The variable takes effect only if it
# is set before gRPC is imported.
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
    gc.freeze()  # the child collects only objects of its own
    _in_parent()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
