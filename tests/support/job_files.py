"""Job files as tests write and break them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job.files import JobError, read_job
from testbed.jobs import job_data, mac


def write(folder: Path, data: Any, name: str = "job.yaml") -> Path:
    """Write a job's data, or a text as it is."""
    file = folder / name
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return file


def faults(folder: Path, data: Any) -> dict[str, str]:
    """Return the faults of a job file by path, of which each has one."""
    with pytest.raises(JobError) as excinfo:
        read_job(write(folder, data))
    places = [(fault.path, fault.message) for fault in excinfo.value.faults]
    assert len({path for path, _ in places}) == len(places), "one fault for each place"
    return dict(places)


def edited(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the value at a path such as `hosts.0.name` changed, or removed if it is `...`."""
    document = copy.deepcopy(data)
    *way, last = [int(part) if part.isdigit() else part for part in re.split("[./]", path)]
    at: Any = document
    for part in way:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document


def meshed(
    pp: int = 1,
    replicate: int = 2,
    shard: int = 1,
    tp: int = 1,
    *,
    gpus: int = 1,
    nics: int = 1,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return a job with a mesh, and as many hosts as it needs."""
    data = job_data(**kwargs)
    del data["dp_groups"]
    data["mesh"] = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    data["gpus_per_host"] = gpus
    data["hosts"] = [
        {"name": f"gpu{h}", "nics": [interface(h * nics + i) for i in range(nics)]}
        for h in range(pp * replicate * shard * tp // gpus)
    ]
    return data


def interface(number: int) -> dict[str, Any]:
    """Return a NIC of a host on the training network."""
    at = {"ip": f"10.8.{number // 250}.{number % 250 + 1}", "mac": mac(8, number)}
    return at | {"switch": "tor0", "port": 100 + number}
