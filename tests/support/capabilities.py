"""The capabilities of running processes, as the kernel reports them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from checkmate.base.privileges import Capability

_LINE = re.compile(r"^(Cap\w+|NoNewPrivs):\s+(\w+)$", re.MULTILINE)


def mask_of(capabilities: Iterable[Capability]) -> int:
    return sum(1 << capability for capability in capabilities)


def check_keeps(pid: int, *capabilities: Capability, bounding: Iterable[Capability] | None = None) -> None:
    """Check that each thread of a process of root has exactly these capabilities and can get no others.

    `bounding`: those of the bounding set, on which no `execve` can draw any more.
    """
    mask, most = (
        f"{mask_of(members):016x}"
        for members in (capabilities, capabilities if bounding is None else bounding)
    )
    expected = {"CapPrm": mask, "CapEff": mask, "CapBnd": most, "CapInh": f"{0:016x}", "CapAmb": f"{0:016x}"}
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            sets, comm = dict(_LINE.findall((thread / "status").read_text())), (thread / "comm").read_text()
            assert sets == {**expected, "NoNewPrivs": "1"}, comm
            count += 1
    assert count
