"""Jobs whose ranks are a mesh: its DP groups, their hosts and their shadow nodes. Pure.

Ranks are numbered as torch's DeviceMesh numbers them: row by row over pp, dp_replicate, dp_shard, tp. Those
that differ in dp_replicate only are a DP group, in this order; if a host has several of them, those at the
same place of their hosts. Works on a file's data, before `placing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final, TypeGuard

from checkmate.job.faults import Fault, parts
from checkmate.job.fields import GPUS_MOST, RANKS_LAST
from checkmate.job.schema import Job, Mesh, ShadowNode, TrainingHost
from checkmate.wire.tag import SHARDS_MAX
from checkmate.wording import counted

RULE: Final = (
    "Of N shadow nodes, DP group g of G has those from number g x N // G of the list on, up to the next "
    "group's; at least one, and at least as many as replicas"
)
KEY: Final = "mesh"
_OF_GROUPS: Final = ("pp", "dp_shard", "tp")
"""Dimensions that number the groups, row by row."""
LOCAL: Final = "local_rank"
"""The last such dimension, of a mesh with several replicas on a host."""


def expand(raw: Any) -> list[Fault]:
    """Add the DP groups of a mesh to `raw`. Return why that is not possible."""
    if "dp_groups" in raw:
        return [Fault(("dp_groups",), "is what mesh describes already: remove one of them")]
    faults = [
        Fault((key,), f"is {'empty' if key in raw else 'missing'}; a mesh needs it: {why}")
        for key, why in ((KEY, "its sizes, such as {dp_replicate: 4, dp_shard: 8}"), *_NEEDED)
        if raw.get(key) is None
    ]
    described, hosts = parts(raw, Mesh, KEY), parts(raw, TrainingHost, "hosts")
    gpus = raw.get("gpus_per_host")
    known = Mesh.model_fields.keys()
    whole = [one for one in described if one.fields.keys() == known and one.raw.keys() <= known]
    if not faults and len(whole) == 1 and _is_number(gpus, GPUS_MOST):
        mesh = Mesh(**whole[0].fields)
        names = list(dict.fromkeys(host.fields["name"] for host in hosts if "name" in host.fields))
        faults = [*_impossible(mesh, len(hosts), gpus, raw.get("collective")), *_too_few_nodes(raw)]
        if not faults and len(names) == len(hosts):
            nics = [len(n) if isinstance(n := host.raw.get("nics"), list) else 1 for host in hosts]
            placed = [*zip(names, nics, strict=True)]
            raw["dp_groups"] = list(_groups(mesh, placed, gpus, _nodes(raw), raw.get("replicas", 1)))
    return faults


_NEEDED: Final = (
    ("hosts", "list them, in the order of ranks"),
    ("gpus_per_host", "the number of ranks on each host"),
)


def _impossible(mesh: Mesh, hosts: int, gpus: int, collective: object) -> Iterator[Fault]:
    """Yield why these hosts can't have a mesh."""
    yield from _misfits(mesh, hosts, gpus)
    yield from _beyond_nccl(collective, mesh, gpus)


def _misfits(mesh: Mesh, hosts: int, gpus: int) -> Iterator[Fault]:
    """Yield why the ranks of a mesh are not on these hosts, or not apart."""
    inner = mesh.dp_shard * mesh.tp
    ranks = mesh.pp * mesh.dp_replicate * inner
    if ranks > RANKS_LAST + 1:
        yield Fault((KEY,), f"has {ranks:,} ranks, and a job has {RANKS_LAST + 1:,} at most")
    elif ranks != hosts * gpus:
        have = f"{counted(hosts, 'host')} with gpus_per_host: {gpus} have {hosts * gpus:,}"
        yield Fault((KEY,), f"has {ranks:,} ranks, but {have}; change the mesh, hosts or gpus_per_host")
    elif 1 < inner < gpus:
        yield Fault(
            (KEY,),
            f"puts ranks 0 and {inner} of one DP group on the same host, because dp_shard x tp is {inner}, "
            f"less than gpus_per_host: {gpus}; a switch copies what passes between hosts, so make it "
            f"{gpus} or more, or 1 for DDP, or list dp_groups",
        )
    elif inner == 1 and (mesh.dp_replicate % gpus or mesh.dp_replicate == gpus):
        yield Fault(
            (KEY,),
            f"has {mesh.dp_replicate} replicas for gpus_per_host: {gpus}; a switch copies what passes "
            f"between hosts, so make dp_replicate a multiple of {gpus}, and more than that",
        )


def _beyond_nccl(collective: object, mesh: Mesh, gpus: int) -> Iterator[Fault]:
    """Yield that only our own ring sums gradients within hosts."""
    if collective == "nccl" and (local := replicas_on_a_host(mesh, gpus)) > 1:
        yield Fault(
            ("collective",),
            f"nccl can't sum over the {local} replicas that the mesh puts on each host yet: use ring, or "
            f"make the ranks of a host shards of one replica (dp_shard: {gpus})",
        )


def _too_few_nodes(raw: Mapping[str, Any]) -> Iterator[Fault]:
    nodes, replicas = raw.get("shadow_nodes"), raw.get("replicas", 1)
    if isinstance(nodes, list) and _is_number(replicas, SHARDS_MAX) and 0 < len(nodes) < replicas:
        yield Fault(("replicas",), f"{replicas} replicas need as many shadow nodes; the job has {len(nodes)}")


def _nodes(raw: Any) -> list[int]:
    """Return the ids of the job's shadow nodes; none if one is unknown."""
    found = [node.fields.get("id") for node in parts(raw, ShadowNode, "shadow_nodes")]
    ids = [number for number in found if number is not None]
    return ids if len(ids) == len(found) else []


def _groups(
    mesh: Mesh, hosts: list[tuple[str, int]], gpus: int, nodes: list[int], replicas: object
) -> Iterator[dict[str, Any]]:
    """Yield the DP groups, as a job file has them. `hosts`: the name of each, and its number of NICs."""
    local = replicas_on_a_host(mesh, gpus)
    apart = mesh.dp_shard * mesh.tp * local
    for group, (stage, place) in enumerate(product(range(mesh.pp), range(apart))):
        first = stage * mesh.dp_replicate * apart // local + place
        ranks = range(first, first + mesh.dp_replicate * apart // local, apart)
        made: dict[str, Any] = {"ranks": [_rank(number, hosts, gpus) for number in ranks]}
        if nodes:
            each = replicas if _is_number(replicas, SHARDS_MAX) else 1
            made["shadow_nodes"] = [nodes[i] for i in serving(group, mesh.pp * apart, len(nodes), each)]
        yield made


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


def fits(job: Job, mesh: Mesh) -> bool:
    """Return whether a job's ranks and hosts could have this mesh instead of their own."""
    gpus = job.gpus_per_host or 1
    hosts = sum(len(group.ranks) for group in job.dp_groups) // gpus
    return not any(_impossible(mesh, hosts, gpus, job.collective))


def replicas_on_a_host(mesh: Mesh, gpus: int) -> int:
    """Return the number of replicas of the model that a host has: 1 if its ranks are shards of one."""
    return gpus if mesh.dp_shard * mesh.tp == 1 else 1


def replica_groups(job: Job, group: int) -> tuple[int, ...]:
    """Return the DP groups that train a group's model by the job's mesh: itself, and those beside it."""
    local = dimensions(job).get(LOCAL, 1)
    first = group - group % local
    return tuple(range(first, first + local))


def dimensions(job: Job) -> dict[str, int]:
    """Return the sizes of the dimensions that number DP groups; empty for a job without a mesh."""
    if job.mesh is None:
        return {}
    found = {name: getattr(job.mesh, name) for name in _OF_GROUPS}
    local = replicas_on_a_host(job.mesh, job.gpus_per_host or 1)
    return {**found, LOCAL: local} if local > 1 else found


def coordinates(job: Job, group: int) -> dict[str, int]:
    """Return a DP group's place in the mesh, by dimension; empty for a job without a mesh."""
    found = {}
    for name, size in reversed(dimensions(job).items()):
        group, found[name] = divmod(group, size)
    return dict(reversed(found.items()))


def group_name(job: Job, group: int) -> str:
    """Return a DP group's name in messages: `11 (pp 1, dp_shard 3)`; without dimensions of size 1."""
    known = dimensions(job)
    shown = [f"{name} {at}" for name, at in coordinates(job, group).items() if known[name] > 1]
    return f"{group} ({', '.join(shown)})" if shown else str(group)


def sizes(job: Job) -> str:
    """Return the dimensions over which DP groups are counted, as ` (pp 2 x dp_shard 8)`; or an empty text."""
    shown = [f"{name} {size}" for name, size in dimensions(job).items() if size > 1]
    return f" ({' x '.join(shown)})" if shown else ""


def groups_key(job: Job) -> str:
    """Return the key of the job file from which DP groups are."""
    return "dp_groups" if job.mesh is None else KEY


def _is_number(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= most
