"""The cgroup of a lab's processes: its path, ending its processes, and its removal.

A dying process leaves its network namespace before its cgroup. In between it closes its sockets, which takes
an RCU grace period for a packet socket. So a lab's cgroup may have processes when its namespaces are empty.
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
_LISTED = 4


def place(lab: str) -> str | None:
    """Return the path for a cgroup of the lab's processes, below our own; `None` without cgroup v2.

    The ranks create theirs below it, so that those of killed ranks are removed with the lab.
    """
    try:
        directory = open_own_cgroup()
    except TaggerUnavailable:
        return None  # the tagger, which needs it, reports a missing one
    try:
        path = Path(os.readlink(f"/proc/self/fd/{directory}"))
    finally:
        os.close(directory)
    # A hidden mount has no path.
    return str(path / f"checkmate-lab-{lab}") if (path / "cgroup.procs").exists() else None


def members(path: str) -> list[int]:
    """Return the processes in a cgroup and below, including dying but not dead ones."""
    pids: list[int] = []
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):  # already removed
            pids += map(int, Path(directory, "cgroup.procs").read_text().split())
    return pids


def kill(path: str | None) -> None:
    """Send SIGKILL to all processes in a cgroup and below, if it exists, and to their new children."""
    if path is None:
        return
    with contextlib.suppress(FileNotFoundError):  # the cgroup no longer exists
        if (switch_file := Path(path, "cgroup.kill")).exists():
            switch_file.write_text("1")
        else:  # before Linux 5.14
            Path(path, "cgroup.freeze").write_text(
                "1"
            )  # a signal then kills them one by one, but they start nothing
            processes.signal_each(lambda: members(path), signal.SIGKILL, seconds=0.0)


def remove(path: str | None, seconds: float = 60.0) -> None:
    """Kill all processes in a cgroup, if it exists, and remove it with the cgroups below.

    Args:
        path: The cgroup.
        seconds: Time for its processes to die.

    Raises:
        LabError: Some processes are still there.
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
            continue  # removed by a process of its own
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(
                    f"the cgroup {path} can't be removed ({error.strerror}): {inhabitants(path)}; after "
                    "that has changed, checkmate lab down removes the rest"
                ) from None
            time.sleep(_POLL_SECONDS)


def inhabitants(path: str) -> str:
    """Return a description of the processes in a cgroup and below."""
    described = [process for pid in members(path) if (process := processes.described(pid)) is not None]
    if not described:
        return "no process is visible in it"
    more = len(described) - _LISTED
    return f"still in it {', '.join(described[:_LISTED])}" + (f" and {more} more" if more > 0 else "")
