"""Job files as tests write and break them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job.files import JobError, read_job


def write(folder: Path, data: Any, name: str = "job.yaml") -> Path:
    """Write a job's data, or a text as it is."""
    file = folder / name
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return file


def faults(folder: Path, data: Any) -> dict[str, str]:
    """Return the faults of a job file by path, of which each has one."""
    with pytest.raises(JobError) as caught:
        read_job(write(folder, data))
    told = [(fault.path, fault.message) for fault in caught.value.faults]
    assert len({path for path, _ in told}) == len(told), "one fault for each place"
    return dict(told)


def edited(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the value at a path such as `hosts.0.name` changed, or removed if it is `...`."""
    made = copy.deepcopy(data)
    *way, last = [int(part) if part.isdigit() else part for part in re.split("[./]", path)]
    at: Any = made
    for part in way:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return made
