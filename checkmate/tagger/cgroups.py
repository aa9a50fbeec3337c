"""Finds this process's cgroup v2, also where no cgroup2 file system is to be seen, and makes child cgroups.

Cgroups are named by directory file descriptors: after `ip netns exec`, which hides /sys/fs/cgroup, the
only way there is a mount of our own, which has no path and ends with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from checkmate.tagger.errors import TaggerUnavailable

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on every architecture
_FSCONFIG_CMD_CREATE = 6
_PREFIX = "checkmate-"


def open_own_cgroup() -> int:
    """A file descriptor of the cgroup v2 directory that this process is in; the caller closes it.

    Raises `TaggerUnavailable` without cgroup v2.
    """
    own = _own_path()
    root, base = _open_hierarchy()
    try:
        return os.open(str(own.relative_to(base)), os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
    except (OSError, ValueError) as error:
        raise TaggerUnavailable(
            f"its cgroup {own} can't be opened ({error})", "start it outside of a restricted cgroup namespace"
        ) from None
    finally:
        os.close(root)


@contextlib.contextmanager
def private_cgroup() -> Iterator[int]:
    """Move this process into a cgroup of its own, a child of its present one, and back at the end.

    Yields the child's file descriptor. What a process that was killed has left behind is removed by the
    next one that comes.
    """
    parent = open_own_cgroup()
    name = f"{_PREFIX}{os.getpid()}"
    try:
        _sweep(parent)
        try:
            os.mkdir(name, dir_fd=parent)
        except OSError as error:
            raise TaggerUnavailable(f"no cgroup can be made ({error})", "run as root") from None
        child = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
        try:
            _move(child, os.getpid())
            yield child
        finally:
            for process in _members(child):
                _move(parent, process)
            os.close(child)
            os.rmdir(name, dir_fd=parent)
    finally:
        os.close(parent)


def _own_path() -> PurePosixPath:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            return PurePosixPath(path)
    raise TaggerUnavailable(
        "this kernel has no cgroup v2", "use one with CONFIG_CGROUPS=y and CONFIG_CGROUP_BPF=y"
    )


def _open_hierarchy() -> tuple[int, PurePosixPath]:
    """The cgroup2 file system's root directory, and the cgroup that it shows there."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        if kind == "cgroup2":
            with contextlib.suppress(OSError):  # hidden behind another mount: look on
                root = os.open(fields[4], os.O_RDONLY | os.O_DIRECTORY)
                if _is_cgroup(root):
                    return root, PurePosixPath(fields[3])
                os.close(root)
    return _mount(), PurePosixPath("/")


def _is_cgroup(directory: int) -> bool:
    return os.access("cgroup.procs", os.F_OK, dir_fd=directory)


def _mount() -> int:
    """Mount cgroup2 nowhere: a directory file descriptor is all there is of it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    context = call(_FSOPEN, b"cgroup2", 0)
    if context < 0:
        raise _no_mount()
    try:
        if call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0) < 0:
            raise _no_mount()
        mount = call(_FSMOUNT, context, 0, 0)
        if mount < 0:
            raise _no_mount()
    finally:
        os.close(context)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    finally:
        os.close(mount)


def _no_mount() -> TaggerUnavailable:
    reason = os.strerror(ctypes.get_errno())
    return TaggerUnavailable(
        f"no cgroup2 file system is mounted, nor can one be ({reason})",
        "run as root, or mount one: mount -t cgroup2 none /sys/fs/cgroup",
    )


def _members(cgroup: int) -> list[int]:
    with open(os.open("cgroup.procs", os.O_RDONLY, dir_fd=cgroup)) as listing:
        return [int(line) for line in listing]


def _move(cgroup: int, process: int) -> None:
    target = os.open("cgroup.procs", os.O_WRONLY, dir_fd=cgroup)
    try:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.write(target, str(process).encode())
    finally:
        os.close(target)


def _sweep(parent: int) -> None:
    """Remove the cgroups of processes that no longer live."""
    for name in os.listdir(parent):
        process = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and process.isdecimal() and not Path("/proc", process).exists():
            with contextlib.suppress(OSError):  # still in use, or another process was faster
                os.rmdir(name, dir_fd=parent)
