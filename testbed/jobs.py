"""Generated jobs: given numbers of ranks, shadow nodes and switches, each with addresses of its own."""

from __future__ import annotations

import itertools
from typing import Any

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.keys.access import access
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role


def mac(kind: int, number: int) -> str:
    return f"02:00:00:{kind:02x}:{number >> 8:02x}:{number & 255:02x}"


def switch(name: str, number: int, target: str = "softswitch", port: int | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "target": target,
        "address": f"127.0.0.1:{port or 9559 + number}",
        "device_id": 1,
        "stub": {"ip": f"10.255.0.{number + 1}", "mac": mac(0xFE, number), "port": 7400},
    }


def job_data(
    name: str = "demo",
    *,
    groups: int = 1,
    ranks: int = 3,
    nodes: int = 1,
    nics: int = 2,
    channels: int = 1,
    replicas: int = 1,
    switches: int = 1,
    number: int = 0,
    target: str = "softswitch",
    further: int = 0,
    shared: bool = False,
    lossless: bool = True,
    collective: str = "ring",
) -> dict[str, Any]:
    """Return a job's YAML as data.

    The switches are in a line, and hosts are attached to them in turn. Each host has up to two `further`
    addresses. Jobs with different `number` have different addresses and ports. With `shared`, every group has
    a rank on each of the same hosts.
    """
    ports = [0] * switches
    names = [f"tor{i}" for i in range(switches)]

    def place(index: int) -> dict[str, Any]:
        at = index % switches
        ports[at] += 1
        return {"switch": names[at], "port": ports[at] + 100 * number}

    def host(kind: int, index: int) -> dict[str, Any]:
        tail = f"{kind * 64 + index // 250}.{index % 250 + 1}"
        interface = {"ip": f"10.{number}.{tail}", "mac": mac(kind + 2 * number, index), **place(index)}
        addresses = [f"10.{number + 100 * (more + 1)}.{tail}" for more in range(further)]
        return {**interface, "addresses": addresses} if further else interface

    hosts = [host(0, index) for index in range(ranks if shared else groups * ranks)]
    dp_groups = [
        {
            "ranks": [
                {
                    "rank": g * ranks + r,
                    "mgmt": f"192.{168 + (g * ranks + r) // 256}.{number}.{(g * ranks + r) % 256}",
                    **hosts[(0 if shared else g * ranks) + r],
                }
                for r in range(ranks)
            ]
        }
        for g in range(groups)
    ]
    shadow_nodes = [
        {
            "id": n,
            "mgmt": f"192.168.{100 + number}.{n}:7000",
            "nics": [host(1, n * nics + i) for i in range(nics)],
        }
        for n in range(nodes)
    ]
    return {
        "job": name,
        "fabric": {
            "switches": [switch(s, i, target) for i, s in enumerate(names)],
            "links": [
                [{"switch": a, "port": 400 + i}, {"switch": b, "port": 300 + i}]
                for i, (a, b) in enumerate(itertools.pairwise(names))
            ],
        },
        "channels": channels,
        "replicas": replicas,
        **({} if collective == "ring" else {"collective": collective, "tree_bytes": 100_000}),
        **({} if lossless else {"lossless": False}),
        "dp_groups": dp_groups,
        "shadow_nodes": shadow_nodes,
    }


def tofino_job_data(
    name: str = "demo", *, board: str = "wedge100bf-32x-odd", target: str = "tofino", **kwargs: Any
) -> dict[str, Any]:
    """Return `job_data` on one Tofino, with hosts at the connectors 1, 2, ... of the front panel."""
    data = job_data(name, target=target, **kwargs)
    data["fabric"]["switches"][0]["front_panel"] = board
    hosts = [rank for group in data["dp_groups"] for rank in group["ranks"]]
    hosts += [nic for node in data["shadow_nodes"] for nic in node["nics"]]
    first = 1 + 16 * kwargs.get("number", 0)
    for connector, host in enumerate(hosts, first):
        host["port"] = f"{connector}/0"
    return data


def job(name: str = "demo", **kwargs: Any) -> Job:
    return of_data(Job, job_data(name, **kwargs))


def keys_of(job: Job, role: Role) -> RoleKeys | None:
    """Return a role's keys; `None` for a job without a folder of keys, which is insecure."""
    return access(job, role, insecure=job.keys is None).keys
