"""Network namespaces: making and removing them, entering one, and finding the processes in them.

Names are as `ip netns` has them (/run/netns), so that `ip netns exec cm-LAB-HOST` works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyroute2 import IPRoute, netns

from topologies.describe.topology import LabError
from topologies.kernel.processes import signal_each
from topologies.signals import undisturbed

FOLDER = Path(netns.NETNS_RUN_DIR)
_TERM_SECONDS = 5.0
_KILL_SECONDS = 5.0


def name_of(lab: str, node: str) -> str:
    """A lab's namespace. Lab names hold no hyphen, so no lab's names begin as another's do."""
    return f"cm-{lab}-{node}"


def of_lab(lab: str) -> list[str]:
    """The lab's namespaces that exist, half-made ones included."""
    prefix = name_of(lab, "")
    return sorted(name for name in netns.listnetns() if name.startswith(prefix))


def create(name: str) -> None:
    """Make a namespace; `FileExistsError` where it exists."""
    with undisturbed():  # it forks, and Python drops what a signal raises in its hooks after a fork
        netns.create(name)


def remove(name: str) -> None:
    """Remove a namespace, also one that was only half made, or is gone already."""
    path = FOLDER / name
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.umount2(os.fsencode(path), 2) == 0:  # MNT_DETACH; mounts may be stacked
        continue
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    path.unlink(missing_ok=True)


def own_name() -> str | None:
    """The named namespace that this process is in, a lab's for one."""
    own = _identity(Path("/proc/self/ns/net"))
    for name in netns.listnetns():
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if _identity(FOLDER / name) == own:
                return str(name)
    return None


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Be in a namespace: the calling thread alone, and what it starts meanwhile."""
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
    """The links of a namespace. Signals wait: pyroute2's event loop doesn't take exceptions in its midst."""
    with undisturbed(), entered(name), IPRoute() as ip:
        yield ip


def processes(names: Iterable[str]) -> list[int]:
    """The processes in these namespaces, except this one."""
    inodes = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(_identity(FOLDER / name))
    return [pid for pid in _all_processes() if pid != os.getpid() and _namespace(pid) in inodes]


def end_processes(names: Iterable[str], kill_more: Callable[[], None] = lambda: None) -> None:
    """End every process in these namespaces: SIGTERM, and after a while SIGKILL till there are none.

    Some start others meanwhile: those that only `kill_more`, which comes before SIGKILL, may catch.
    """
    chosen = list(names)
    signal_each(lambda: processes(chosen), signal.SIGTERM, _TERM_SECONDS)
    kill_more()
    deadline = time.monotonic() + _KILL_SECONDS
    while left := processes(chosen):
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(map(str, left))} don't end, not even by SIGKILL")
        signal_each(lambda: processes(chosen), signal.SIGKILL, _KILL_SECONDS)


def _all_processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _namespace(pid: int) -> tuple[int, int] | None:
    """The network namespace that a process is in; `None` for a dead one, also while nobody reaped it."""
    try:
        return _identity(Path(f"/proc/{pid}/ns/net"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
