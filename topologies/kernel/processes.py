"""Process trees in /proc, signals to many processes, and pinning."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from topologies.describe.topology import BadDescription, LabError

PYTHON: Final = (sys.executable, "-P")
"""For modules of our own, as root: without -P, `python -m` would import from the folder it is started in."""
_ROOT: Final = Path(__file__).resolve().parent.parent.parent


def all_processes() -> list[int]:
    """Return the processes of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> list[int]:
    """Return a process's descendants, parents first."""
    children: dict[int, list[int]] = {}
    for process in all_processes():
        if (parent := _parent(process)) is not None:
            children.setdefault(parent, []).append(process)
    family = [pid]
    for process in family:
        family += children.get(process, [])
    return family[1:]


def processor_seconds(pid: int) -> float:
    """Return the processor time that all threads of a process have used (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a child of ours that has not been waited for, and to its descendants."""
    kill([pid], signal.SIGSTOP)  # so that it starts no others meanwhile
    kill([*descendants(pid), pid])


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Send a signal to these processes; return those that existed."""
    hit = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            hit.append(pid)
    return hit


def signal_each(find: Callable[[], Collection[int]], number: signal.Signals, seconds: float) -> None:
    """Send a signal to every process that `find` returns, and wait for them to end.

    Each is held by a pidfd and looked up again before the signal is sent, so that a process which has reused
    a number is never hit.

    Args:
        find: Returns the processes.
        number: The signal.
        seconds: Time for the processes to end.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        descriptors: dict[int, int] = {}
        for pid in find():
            with contextlib.suppress(ProcessLookupError):
                descriptors[pid] = os.pidfd_open(pid)
                stack.callback(os.close, descriptors[pid])
        targets = [descriptors[pid] for pid in find() if pid in descriptors]
        for fd in targets:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        for fd in targets:  # one at a time, because a pidfd stays readable
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)


def kill_all(find: Callable[[], Collection[int]], seconds: float) -> None:
    """Send SIGKILL to what `find` returns until that is nothing. Raise `LabError` if some processes stay."""
    deadline = time.monotonic() + seconds
    while survivors := find():
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(map(str, survivors))} do not end, even after SIGKILL")
        signal_each(find, signal.SIGKILL, seconds)


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return whether a process was started with this environment variable."""
    try:
        return os.fsencode(f"{name}={value}") in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def described(pid: int) -> str | None:
    """Return a process as `123 (python, D)`, with its state as in proc(5); `None` if it does not exist."""
    try:
        command, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{pid} ({command}, {rest.split()[0]})"


@contextlib.contextmanager
def pinned(cpus: Collection[int] | None) -> Iterator[None]:
    """Pin processes that the calling thread starts meanwhile to these CPUs; `None` changes nothing."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    if not cpus or not before.issuperset(cpus):
        usable = ", ".join(map(str, sorted(before)))
        raise BadDescription(f"CPUs {sorted(cpus)}: only {usable} are available")
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Have processes that the calling thread starts meanwhile go before ordinary ones on their CPUs.

    It changes nothing if that is not permitted: it takes CAP_SYS_NICE, and a share of real time.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def last_lines(log: str) -> str:
    """Return the last lines of a process's log on one line, for an error message."""
    lines = [line for line in log.splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "no output"


def environment() -> dict[str, str]:
    """Return our environment, for this same package and its commands; a lab has no way out to a proxy."""
    variables = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    variables["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables
