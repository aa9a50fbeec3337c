"""A lab's mesh: the DP groups that a job file makes of it (`checkmate.job.mesh`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from checkmate.job import mesh_groups
from checkmate.job.faults import Fault

KEYS: Final = ("mesh", "gpus_per_host")
"""Which a lab's file and a job file have in common."""


def groups_of(raw: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Return the DP groups of a lab with a mesh, from its file's data, or why there are none.

    A group has `ranks`, each with `rank`, `host` (its number) and `nic`, and `shadow_nodes` by number.
    """
    hosts, nodes = raw.get("hosts"), raw.get("shadow_nodes")
    job = {key: raw[key] for key in (*KEYS, "dp_groups", "replicas") if key in raw}
    if isinstance(hosts, list):
        job["hosts"] = [{"name": f"host{i}", "nics": nics} for i, nics in enumerate(hosts)]
    if isinstance(nodes, list):
        job["shadow_nodes"] = [{"id": number} for number in range(len(nodes))]
    faults = mesh_groups.expand(job)
    groups = [] if faults else job.get("dp_groups", [])
    for rank in (rank for group in groups for rank in group["ranks"]):
        rank["host"] = int(rank["host"].removeprefix("host"))
    return groups, faults
