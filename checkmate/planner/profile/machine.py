"""This machine: cores, free memory and load."""

from __future__ import annotations

import os
from typing import Final

from checkmate.base import machine_memory

BUSY: Final = 0.25
"""A machine is busy if its load average is more than this share of its cores."""
_SPARE: Final = 0.7
"""Share of free memory to use; the rest is for temporaries and for other processes."""


def cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Return the number of threads that ran, or waited for a core or a disk: the last minute's average."""
    return os.getloadavg()[0]


def memory_available() -> int:
    """Return the bytes to use here: most of what the machine and its cgroup have free."""
    return int(_SPARE * machine_memory.available())
