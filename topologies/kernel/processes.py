"""Process trees in /proc, signals to many, and pinning: what `signal` and `subprocess` leave to others."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from topologies.describe.topology import BadDescription


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


def signal_each(find: Callable[[], Collection[int]], number: signal.Signals, seconds: float) -> None:
    """Send a signal to every process that `find` finds, and wait so long for them to end.

    Each is held by a pidfd and looked for again before it gets the signal, so no stranger that has come by
    a process's number is ever hit.
    """
    held = [fd for pid in find() if (fd := _hold(pid, find)) is not None]
    try:
        for fd in held:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        _wait_all(held, seconds)
    finally:
        for fd in held:
            os.close(fd)


def described(pid: int) -> str | None:
    """`123 (python, D)`: a process's number, command and state as proc(5) has it; `None` for none."""
    try:
        command, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{pid} ({command}, {rest.split()[0]})"


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


def _hold(pid: int, find: Callable[[], Collection[int]]) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if pid in find():
        return fd
    os.close(fd)
    return None


def _wait_all(pidfds: Iterable[int], seconds: float) -> None:
    """Wait until all have ended; one at a time, for a pidfd stays readable."""
    deadline = time.monotonic() + seconds
    for fd in pidfds:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
