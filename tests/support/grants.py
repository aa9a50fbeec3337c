"""Fabric files of an operator, with grants of exactly what jobs claim."""

from __future__ import annotations

from typing import Any


def grant_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return a grant of everything that a job's data claims, and of nothing else."""
    hosts = [rank for group in job["dp_groups"] for rank in group["ranks"]]
    hosts += [nic for node in job["shadow_nodes"] for nic in node["nics"]]
    ports: dict[str, list[Any]] = {}
    for host in hosts:
        if host["port"] not in ports.setdefault(host["switch"], []):
            ports[host["switch"]].append(host["port"])
    addresses = [address for host in hosts for address in (host["ip"], *host.get("addresses", ()))]
    return {
        "ports": ports,
        "addresses": list(dict.fromkeys(map(str, addresses))),
        "macs": list(dict.fromkeys(host["mac"] for host in hosts)),
        "shadow_nodes": [node["mgmt"].rpartition(":")[0] for node in job["shadow_nodes"]],
    }


def fabric_of(*jobs: dict[str, Any]) -> dict[str, Any]:
    """Return the fabric of jobs, which is the first one's, with a grant for each."""
    return {**jobs[0]["fabric"], "grants": {job["job"]: grant_of(job) for job in jobs}}
