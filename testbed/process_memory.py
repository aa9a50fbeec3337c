"""The resident memory of a process, as Linux counts it (proc(5))."""

from __future__ import annotations

from pathlib import Path


def resident(pid: int | None = None) -> int:
    """Return the bytes that a process has now; by default, this one."""
    return _status(pid, "VmRSS")


def peak_resident(pid: int | None = None) -> int:
    """Return the most bytes that it has had."""
    return _status(pid, "VmHWM")


def unshared(pid: int) -> int:
    """Return the bytes that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _status(pid: int | None, name: str) -> int:
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
