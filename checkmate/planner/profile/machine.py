"""This machine: cores, memory, and how busy it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

BUSY: Final = 0.25
"""A machine is busy where other processes keep more than this part of its cores."""
_SPARE: Final = 0.7
"""Of the memory that is free: the rest is for temporaries, and for others."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def busy_cores() -> float:
    """How many cores were busy over the last minute."""
    return os.getloadavg()[0]


def memory() -> int:
    """Bytes that the machine has, or its cgroup may use."""
    limit = _number(_CGROUP / "memory.max")
    return min(_meminfo("MemTotal"), limit if limit is not None else 1 << 62)


def memory_available() -> int:
    """Bytes that may be used here: most of what is free, by the machine and by its cgroup's limit."""
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
        return None  # no such limit
