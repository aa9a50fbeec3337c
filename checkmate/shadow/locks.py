"""The locks of a shadow node, and the order in which threads acquire them.

A thread that holds a lock acquires only locks that follow it in `ORDER`. No thread steps, receives or uses
the network while it holds `node`. Tests replace `ordered_lock`, to check each acquisition.
"""

from __future__ import annotations

import threading
from typing import Final

ORDER: Final = (
    "job file",
    "meeting",
    "attempt",
    "node",
    "parts",
    "hold",
    "inlet",
    "sets",
    "replica",
    "reader",
)
"""`job file`: reading it again (`own_file`). `meeting`: the meetings of ranks (`calls.meet`). `attempt`: one
connection attempt of a stream (`receive.stream_threads`). `node`: the state of the node. `parts`: the streams
of parts that are expected (`receive.part_listener`). `hold`: a hold's replica and buckets, for a whole step
(`resources`). `inlet`: a stream's socket and position (`receive.inlet`). `sets`: the streams that have ended
an iteration (`receive.inlet`). `replica`: reservations of its readers (`replica.replica`). `reader`: the
streams of a NIC (`receive.stream_threads`).
"""


def ordered_lock(name: str) -> threading.Lock:
    """Return a non-reentrant lock; `name` is its place in `ORDER`."""
    return threading.Lock()
