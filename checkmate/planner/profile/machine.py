"""This machine: cores, memory and load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

BUSY: Final = 0.25
"""A machine is busy if its load average is more than this share of its cores."""
_SPARE: Final = 0.7
"""Share of free memory to use; the rest is for temporaries and for other processes."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Return the number of threads that ran, or waited for a core or a disk: the last minute's average."""
    return os.getloadavg()[0]


def memory() -> int:
    """Return the memory of the machine, or of its cgroup, in bytes."""
    limit = _number(_CGROUP / "memory.max")
    return min(_meminfo("MemTotal"), limit if limit is not None else 1 << 62)


def memory_available() -> int:
    """Return the bytes to use here: most of what the machine and its cgroup have free."""
    free = _meminfo("MemAvailable")
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return int(_SPARE * max(0, free))


def _meminfo(key: str) -> int:
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # no limit
