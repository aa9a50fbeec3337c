"""The cgroup of a lab's processes: where it is, ending all that lives in it, and removing it.

A process that dies leaves its network namespace some time before its cgroup: it closes its sockets in
between, which takes a packet socket a grace period of RCU. So a lab whose namespaces are empty may still
have some in its cgroup.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from checkmate.tagger import TaggerUnavailable
from checkmate.tagger.cgroups import open_own_cgroup
from topologies.describe.topology import LabError
from topologies.kernel import processes

_POLL_SECONDS = 0.01
_NAMED = 4


def place(lab: str) -> str | None:
    """Where a cgroup for the lab's processes may be made: below our own; `None` without cgroup v2.

    The ranks make theirs below it, so that nothing stays of those that are killed.
    """
    try:
        own = open_own_cgroup()
    except TaggerUnavailable:
        return None  # the tagger, which needs it, says so where it is missing
    try:
        path = Path(os.readlink(f"/proc/self/fd/{own}"))
    finally:
        os.close(own)
    # A mount that is hidden has no path.
    return str(path / f"checkmate-lab-{lab}") if (path / "cgroup.procs").exists() else None


def members(path: str) -> list[int]:
    """The processes in a cgroup and those below it; dying ones too, but none that is dead."""
    found: list[int] = []
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):  # removed meanwhile
            found += map(int, Path(directory, "cgroup.procs").read_text().split())
    return found


def kill(path: str | None) -> None:
    """SIGKILL to all in a cgroup, if there is one, and those below; also to what they are just starting."""
    if path is None:
        return
    with contextlib.suppress(FileNotFoundError):  # no such cgroup any more
        if (every := Path(path, "cgroup.kill")).exists():
            every.write_text("1")
        else:  # before Linux 5.14
            Path(path, "cgroup.freeze").write_text("1")  # then they die of a signal, but start nothing
            processes.signal_each(lambda: members(path), signal.SIGKILL, seconds=0.0)


def remove(path: str | None, seconds: float = 60.0) -> None:
    """End all in a cgroup, if there is one, and remove it with those below.

    Waits `seconds` for dying processes; `LabError` names those that are still there then.
    """
    if path is None:
        return
    deadline = time.monotonic() + seconds
    while Path(path).exists():
        kill(path)
        try:
            for directory, _, _ in os.walk(path, topdown=False):
                os.rmdir(directory)
        except FileNotFoundError:
            continue  # a process that removed its own
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(
                    f"the cgroup {path} can't be removed ({error.strerror}): {inhabitants(path)}; once that "
                    "has changed, checkmate lab down removes the rest"
                ) from None
            time.sleep(_POLL_SECONDS)


def inhabitants(path: str) -> str:
    """The processes in a cgroup and those below it, in words."""
    found = [process for pid in members(path) if (process := processes.described(pid)) is not None]
    if not found:
        return "no process is to be seen in it"
    more = len(found) - _NAMED
    return f"still in it {', '.join(found[:_NAMED])}" + (f" and {more} more" if more > 0 else "")
