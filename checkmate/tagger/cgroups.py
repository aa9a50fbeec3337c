"""Finds this process's cgroup v2, even if no cgroup2 file system is visible.

Cgroups are identified by directory file descriptors: after `ip netns exec`, which hides /sys/fs/cgroup, the
only access is a mount of our own, which has no path and ends with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path, PurePosixPath

from checkmate.tagger.errors import TaggerUnavailable

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on every architecture
_FSCONFIG_CMD_CREATE = 6


def open_own_cgroup() -> int:
    """Return a file descriptor of this process's cgroup v2 directory, which the caller must close.

    Raises:
        TaggerUnavailable: cgroup v2 does not exist, or can't be accessed.
    """
    process_path = _own_path()
    root, base = _open_hierarchy()
    try:
        return os.open(str(process_path.relative_to(base)), os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
    except (OSError, ValueError) as error:
        raise TaggerUnavailable(
            f"its cgroup {process_path} can't be opened ({error})",
            "start it outside a restricted cgroup namespace",
        ) from None
    finally:
        os.close(root)


def _own_path() -> PurePosixPath:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            return PurePosixPath(path)
    raise TaggerUnavailable(
        "this kernel has no cgroup v2", "use one with CONFIG_CGROUPS=y and CONFIG_CGROUP_BPF=y"
    )


def _open_hierarchy() -> tuple[int, PurePosixPath]:
    """Return the cgroup2 file system's root directory, and the path of the cgroup that it shows there."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            with contextlib.suppress(OSError):  # hidden by another mount: try the next one
                root = os.open(fields[4], os.O_RDONLY | os.O_DIRECTORY)
                if os.access("cgroup.procs", os.F_OK, dir_fd=root):
                    return root, PurePosixPath(fields[3])
                os.close(root)
    return _mount(), PurePosixPath("/")


def _mount() -> int:
    """Mount cgroup2 without a path, and return a directory file descriptor."""
    context = _call(_FSOPEN, b"cgroup2", 0)
    try:
        _call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, context, 0, 0)
    finally:
        os.close(context)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    finally:
        os.close(mount)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Return the result of one of the system calls that mount."""
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise TaggerUnavailable(
            f"cgroup2 is not mounted and can't be mounted ({os.strerror(ctypes.get_errno())})",
            "run as root, or mount it: mount -t cgroup2 none /sys/fs/cgroup",
        )
    return result
