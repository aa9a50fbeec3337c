"""The DP groups of a mesh, their hosts and their shadow nodes. Pure.

Ranks are numbered as torch's DeviceMesh numbers them: row by row over pp, dp_replicate, dp_shard, tp. Those
that differ in dp_replicate only are a DP group, in this order; if a host has several of them, those at the
same place of their hosts. Works on a file's data, before `placing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any, Final, TypeGuard

from checkmate.job.faults import Fault
from checkmate.job.fields import GPUS_MOST
from checkmate.job.mesh import KEY, impossible, replicas_on_a_host
from checkmate.job.schema import Mesh, ShadowNode, TrainingHost
from checkmate.job.validation import parts
from checkmate.wire.tag import SHARDS_MAX

RULE: Final = (
    "Of N shadow nodes, DP group g of G has those from number g x N // G of the list on, up to the next "
    "group's; at least one, and at least as many as replicas"
)


def expand(raw: Any) -> list[Fault]:
    """Add the DP groups of a mesh to `raw`. Return why that is not possible."""
    if "dp_groups" in raw:
        return [Fault(("dp_groups",), "is what mesh describes already: remove one of them")]
    faults = [
        Fault((key,), f"is {'empty' if key in raw else 'missing'}; a mesh needs it: {why}")
        for key, why in ((KEY, "its sizes, such as {dp_replicate: 4, dp_shard: 8}"), *_REQUIRED)
        if raw.get(key) is None
    ]
    described, hosts = parts(raw, Mesh, KEY), parts(raw, TrainingHost, "hosts")
    gpus = raw.get("gpus_per_host")
    sizes = {spec.name for spec in fields(Mesh)}
    whole = [part for part in described if part.fields.keys() == sizes and part.raw.keys() <= sizes]
    if not faults and len(whole) == 1 and _is_number(gpus, GPUS_MOST):
        mesh = Mesh(**whole[0].fields)
        names = list(dict.fromkeys(host.fields["name"] for host in hosts if "name" in host.fields))
        faults = [*impossible(mesh, len(hosts), gpus, raw.get("collective")), *_too_few_nodes(raw)]
        if not faults and len(names) == len(hosts):
            nics = [len(n) if isinstance(n := host.raw.get("nics"), list) else 1 for host in hosts]
            placed = [*zip(names, nics, strict=True)]
            raw["dp_groups"] = list(_groups(mesh, placed, gpus, _nodes(raw), raw.get("replicas", 1)))
    return faults


_REQUIRED: Final = (
    ("hosts", "list them, in the order of ranks"),
    ("gpus_per_host", "the number of ranks on each host"),
)


def _too_few_nodes(raw: Mapping[str, Any]) -> Iterator[Fault]:
    nodes, replicas = raw.get("shadow_nodes"), raw.get("replicas", 1)
    if isinstance(nodes, list) and _is_number(replicas, SHARDS_MAX) and 0 < len(nodes) < replicas:
        yield Fault(("replicas",), f"{replicas} replicas need as many shadow nodes; the job has {len(nodes)}")


def _nodes(raw: Any) -> list[int]:
    """Return the ids of the job's shadow nodes; none if one is unknown."""
    known_ids = [node.fields.get("id") for node in parts(raw, ShadowNode, "shadow_nodes")]
    ids = [number for number in known_ids if number is not None]
    return ids if len(ids) == len(known_ids) else []


def _groups(
    mesh: Mesh, hosts: list[tuple[str, int]], gpus: int, nodes: list[int], replicas: object
) -> Iterator[dict[str, Any]]:
    """Yield the DP groups, as a job file has them. `hosts`: the name of each, and its number of NICs."""
    local = replicas_on_a_host(mesh, gpus)
    lines = list(replica_lines(mesh, local))
    for group, ranks in enumerate(lines):
        entry: dict[str, Any] = {"ranks": [_rank(number, hosts, gpus) for number in ranks]}
        if nodes:
            holders = replicas if _is_number(replicas, SHARDS_MAX) else 1
            entry["shadow_nodes"] = [nodes[i] for i in serving(group, len(lines), len(nodes), holders)]
        yield entry


def replica_lines(mesh: Mesh, local: int = 1) -> Iterator[range]:
    """Yield the ranks of each DP group, which differ in dp_replicate only.

    `local`: the replicas on a host, each of which is in a DP group of its own.
    """
    apart = mesh.dp_shard * mesh.tp * local
    for stage, place in product(range(mesh.pp), range(apart)):
        first = stage * mesh.dp_replicate * apart // local + place
        yield range(first, first + mesh.dp_replicate * apart // local, apart)


def served_lines(mesh: Mesh, nodes: int, replicas: int) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Yield the ranks of each DP group, and the positions of its shadow nodes in the job's list."""
    lines = list(replica_lines(mesh))
    for group, ranks in enumerate(lines):
        yield ranks, tuple(serving(group, len(lines), nodes, replicas))


def _rank(number: int, hosts: list[tuple[str, int]], gpus: int) -> dict[str, Any]:
    """Return a rank. The GPUs of a host share its NICs evenly, in order."""
    at, local = divmod(number, gpus)
    name, nics = hosts[at]
    return {"rank": number, "host": name, "nic": local * nics // gpus}


def serving(group: int, groups: int, nodes: int, replicas: int) -> list[int]:
    """Return the positions of a group's shadow nodes in the job's list (`RULE`)."""
    first, following = group * nodes // groups, (group + 1) * nodes // groups
    count = min(max(following - first, replicas, 1), SHARDS_MAX)
    return [(first + i) % nodes for i in range(count)]


def _is_number(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= most
