"""Network namespaces: creation, removal, entering one, and the processes in them.

Names are those of `ip netns` (/run/netns), so that `ip netns exec cm-LAB-HOST` works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyroute2 import IPRoute, config, netns

from topologies.kernel.processes import all_processes, kill_all, signal_each
from topologies.signals import undisturbed

FOLDER = Path(netns.NETNS_RUN_DIR)
_TERM_SECONDS = 5.0
_KILL_SECONDS = 5.0

# pyroute2 waits this many seconds for a process that it forks; its 2 s are too short on a busy machine.
config.default_communicate_timeout = 30


def name_of(lab: str, node: str) -> str:
    """Return the name of a lab's namespace. Lab names have no hyphens, so no name is another's prefix."""
    return f"cm-{lab}-{node}"


def of_lab(lab: str) -> list[str]:
    """Return the lab's existing namespaces, including incomplete ones."""
    prefix = name_of(lab, "")
    return sorted(name for name in netns.listnetns() if name.startswith(prefix))


def create(name: str) -> None:
    """Create a namespace; raise `FileExistsError` if it exists."""
    with undisturbed():  # it forks, and Python drops exceptions that a signal raises in hooks after a fork
        netns.create(name)


def remove(name: str) -> None:
    """Remove a namespace; it may be incomplete, or already removed."""
    path = FOLDER / name
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.umount2(os.fsencode(path), 2) == 0:  # MNT_DETACH; mounts may be stacked
        continue
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    path.unlink(missing_ok=True)


def own_name() -> str | None:
    """Return the name of this process's namespace, such as a lab's; `None` if it has no name."""
    name: str | None = netns.pid_to_ns(os.getpid())
    return name


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Move the calling thread, and the processes that it starts, into a namespace for a while."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        netns.setns(name, flags=0)
        try:
            yield
        finally:
            netns.setns(before)
    finally:
        os.close(before)


@contextlib.contextmanager
def netlink(name: str) -> Iterator[IPRoute]:
    """Yield a netlink socket of a namespace; signals are held back, because they would break pyroute2."""
    with undisturbed(), entered(name), IPRoute() as ip:
        yield ip


def processes(names: Iterable[str]) -> list[int]:
    """Return the processes in these namespaces, without this process."""
    inodes = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(_identity(FOLDER / name))
    return [pid for pid in all_processes() if pid != os.getpid() and _namespace(pid) in inodes]


def end_processes(names: Iterable[str], kill_more: Callable[[], None] = lambda: None) -> None:
    """End every process in these namespaces: by SIGTERM, and after a while by SIGKILL until there are none.

    `kill_more` is called before SIGKILL, for processes that start others faster than they can be found.
    """
    namespaces = list(names)
    signal_each(lambda: processes(namespaces), signal.SIGTERM, _TERM_SECONDS)
    kill_more()
    kill_all(lambda: processes(namespaces), _KILL_SECONDS)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _namespace(pid: int) -> tuple[int, int] | None:
    """Return a process's network namespace; `None` if it is dead, reaped or not."""
    try:
        return _identity(Path(f"/proc/{pid}/ns/net"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
