"""Memory of this machine, or less if cgroups limit this process (the kernel's admin-guide/cgroup-v2).

Also the return of freed memory to the kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/")


def total(root: Path = _ROOT) -> int:
    """Return the bytes that this process could have at most. `root` has the folders `proc` and `sys`."""
    return min([_meminfo("MemTotal", root), *(limit for limit, _ in _cgroups(root))])


def available(root: Path = _ROOT) -> int:
    """Return the bytes that this process can take now without swapping, as `total` does."""
    free = (limit - used for limit, used in _cgroups(root))
    return max(0, min([_meminfo("MemAvailable", root), *free]))


def _meminfo(key: str, root: Path) -> int:
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each limited cgroup from this process's one upward."""
    own_paths = [
        line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
    ]
    mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    for fields in mounts if own_paths else ():
        if fields[fields.index("-") + 1] != "cgroup2":
            continue
        top, path_in_cgroup = PurePosixPath(fields[4]), PurePosixPath(os.path.normpath(own_paths[0]))
        if not path_in_cgroup.is_relative_to(fields[3]):
            continue
        below = path_in_cgroup.relative_to(fields[3])
        for part in (below, *below.parents):
            folder = root / top.relative_to("/") / part
            limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
            if limit is not None and used is not None:
                yield limit, used
        return


def _number(file: Path) -> int | None:
    """Return a file's number; `None` for `max`, and if the memory controller is not enabled there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def trim() -> None:
    """Return memory that this process has freed to the kernel."""
    glibc("malloc_trim", 0)


def glibc(name: str, *arguments: int) -> None:
    """Call a function that only glibc has; do nothing with another C library."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
