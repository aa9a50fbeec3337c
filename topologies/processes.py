"""Process trees in /proc, and pinning: what `signal` and `subprocess` leave to others."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from topologies.describe import BadDescription


def descendants(pid: int) -> list[int]:
    """A process's children, and theirs, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def kill_tree(pid: int) -> None:
    """SIGKILL to a child of ours that nobody has waited for, and to its descendants."""
    kill([pid], signal.SIGSTOP)  # so that it starts nothing while they are counted
    kill([*descendants(pid), pid])


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Send a signal to these processes; those that were there."""
    hit = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            hit.append(pid)
    return hit


@contextlib.contextmanager
def pinned(cpus: Collection[int] | None) -> Iterator[None]:
    """What the calling thread starts meanwhile runs on these CPUs alone; `None`: wherever it may itself."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    if not cpus or not before.issuperset(cpus):
        usable = ", ".join(map(str, sorted(before)))
        raise BadDescription(f"CPUs {sorted(cpus)}: this machine lets us use {usable}")
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
