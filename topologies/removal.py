"""Removal of a lab in any state."""

from __future__ import annotations

from topologies import state
from topologies.kernel import cgroups, namespaces


def remove(name: str) -> None:
    """Remove a lab: its processes, hosts before switches, then namespaces and cgroup, and the folder last."""
    record = state.read_record(name)
    present = namespaces.of_lab(name)
    cgroup = None if record is None else record.cgroup
    namespaces.end_processes(present, lambda: cgroups.kill(cgroup))
    for namespace in present:
        namespaces.remove(namespace)
    cgroups.remove(cgroup)
    state.forget(name)
