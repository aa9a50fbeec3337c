"""Linux capabilities: giving up those that a process does not need (capabilities(7))."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

# linux/prctl.h and linux/capability.h
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_VERSION_3: Final = 0x20080522

_PROGRAM: Final = (Path(__file__).parents[1], Path(os.__file__), Path(sys.prefix))
_LAST: Final = Path("/proc/sys/kernel/cap_last_cap")
_UNPRIVILEGED_PORTS: Final = 1024


class Capability(IntEnum):
    """The capabilities that processes of Checkmate use, by the kernel's numbers."""

    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    SETGID = 6
    SETUID = 7
    SETPCAP = 8
    NET_BIND_SERVICE = 10
    NET_ADMIN = 12
    NET_RAW = 13
    SYS_ADMIN = 21
    PERFMON = 38
    BPF = 39


class PrivilegesError(RuntimeError):
    """Capabilities cannot be given up; the message has the reason."""

    exit_code = 1


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def keep_only(*capabilities: Capability) -> None:
    """Give up all capabilities but these, for good, here and in all processes that this one starts.

    Those that this process does not have stay absent. Call it before any thread is started, because
    a thread that runs already would keep its capabilities.

    Raises:
        PrivilegesError: Threads are running, or the kernel refuses.
    """
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise PrivilegesError(
            f"{threads} threads are running: capabilities must be given up before they start"
        )
    mask = sum(1 << capability for capability in capabilities)
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    if Capability.SETPCAP in effective():  # without it the set stays, but no execve can draw on it any more
        for number in range(int(_LAST.read_text()) + 1):
            if not mask >> number & 1:
                _prctl(libc, _PR_CAPBSET_DROP, number)
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _call(libc.capget, ctypes.byref(header), sets)
    for word, part in enumerate(sets):
        part.permitted &= mask >> (32 * word)
        part.effective, part.inheritable = part.permitted, 0
    _call(libc.capset, ctypes.byref(header), sets)


@dataclass(frozen=True)
class Owner:
    """A user and a group, to whom a folder belongs."""

    uid: int
    gid: int


def owner_of(folder: Path) -> Owner | None:
    """Return the user who can change where a folder is, or what is in it; `None` if only root and this can.

    That is the owner of the deepest folder on its path that belongs to another user.
    """
    for path in (absolute := Path(os.path.abspath(folder)), *absolute.parents):
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        if about.st_uid not in (0, os.geteuid()):
            return Owner(about.st_uid, about.st_gid)
    real = Path(os.path.realpath(folder))
    return None if real == absolute else owner_of(real)


def become(owner: Owner) -> None:
    """As root with SETUID and SETGID, become another user for good, in all threads, without any capability.

    What root writes by a path that another user can change may be led to any file of root's.
    """
    os.setgroups([])
    os.setresgid(owner.gid, owner.gid, owner.gid)
    os.setresuid(owner.uid, owner.uid, owner.uid)


def give_up(*dropped: Capability) -> None:
    """Give up these capabilities in this thread, for good, and in all threads and processes that it starts.

    Other threads that run already keep theirs. Those that this thread does not have do not matter.
    """
    global _given_up  # noqa: PLW0603
    mask = ~sum(1 << capability for capability in dropped)
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _call(libc.capget, ctypes.byref(header), sets)
    for word, part in enumerate(sets):
        part.permitted &= mask >> (32 * word)
        part.effective &= part.permitted
        part.inheritable &= part.permitted
    _call(libc.capset, ctypes.byref(header), sets)
    _given_up |= frozenset(dropped)


_given_up: frozenset[Capability] = frozenset()


def given_up() -> frozenset[Capability]:
    """Return what `give_up` was called with."""
    return _given_up


def effective() -> frozenset[Capability]:
    """Return those of this process's effective capabilities that `Capability` lists."""
    status = Path("/proc/self/status").read_text()
    mask = int(status.partition("CapEff:")[2].split()[0], 16)
    return frozenset(capability for capability in Capability if mask >> capability & 1)


def to_read(files: Iterable[Path]) -> tuple[Capability, ...]:
    """Return what reading these files, and Checkmate's own modules, takes.

    Root needs a capability if they, or a folder above them, belong to another user, as with `sudo` in
    somebody's home. Files that do not exist count by their folders.
    """
    return (Capability.DAC_READ_SEARCH,) if _of_others([*_PROGRAM, *files]) else ()


def to_write(folder: Path) -> tuple[Capability, ...]:
    """Return what writing into a folder, and setting the mode of files in it, takes."""
    return (Capability.DAC_OVERRIDE, Capability.FOWNER) if _of_others([folder]) else ()


def to_listen(ports: Iterable[int]) -> tuple[Capability, ...]:
    """Return what listening on these ports takes."""
    return (Capability.NET_BIND_SERVICE,) if any(port < _UNPRIVILEGED_PORTS for port in ports) else ()


def _of_others(paths: Iterable[Path]) -> bool:
    """Return whether one of these paths, or a folder above it, belongs to another user."""
    absolute = [path.absolute() for path in paths]
    parts = {part for path in absolute for part in (path, *path.parents, *path.resolve().parents)}
    return any(_is_of_another(part) for part in parts)


def _is_of_another(path: Path) -> bool:
    try:
        return path.stat().st_uid != os.geteuid()
    except FileNotFoundError:
        return False
    except PermissionError:
        return True


def _prctl(libc: ctypes.CDLL, option: int, argument: int) -> None:
    _call(libc.prctl, ctypes.c_int(option), *map(ctypes.c_ulong, (argument, 0, 0, 0)))


def _call(function: Callable[..., int], *arguments: object) -> None:
    ctypes.set_errno(0)
    if function(*arguments):
        raise PrivilegesError(
            f"the kernel refused to give up capabilities: {os.strerror(ctypes.get_errno())}"
        )
