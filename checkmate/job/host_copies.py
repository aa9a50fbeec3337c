"""Job files with `copies: host`: hosts send their gradients to shadow nodes themselves. Pure.

Such a file names neither a fabric nor addresses of ranks: any network will do. It becomes a `Job` without
switches, whose ranks have no address, and whose shadow nodes have no NICs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Literal

from checkmate.base.wording import counted, did_you_mean
from checkmate.job.faults import Fault
from checkmate.job.fields import (
    RANKS_LAST,
    FilePath,
    Flag,
    HostPort,
    Name,
    Seconds,
    ShadowNodeId,
    Size,
    items,
    whole,
)
from checkmate.job.mesh_groups import served_lines
from checkmate.job.schema import (
    DEFAULT_SENDING,
    NO_ADDRESS,
    DpGroup,
    Fabric,
    Frozen,
    Job,
    Mesh,
    Rank,
    Sending,
    ShadowNode,
)
from checkmate.job.validation import validated
from checkmate.wire.tag import SHARDS_MAX


@dataclass(frozen=True, kw_only=True)
class RankMesh(Frozen):
    """The ranks of a job as a mesh, numbered row by row, the last dimension first. DP groups are replicas."""

    pp: Size = 1
    dp_replicate: Size = 1
    dp_shard: Size = 1
    tp: Size = 1


@dataclass(frozen=True, kw_only=True)
class CopyNode(Frozen):
    """A shadow node. `gradients` is its address for gradients, `records` for step records."""

    id: ShadowNodeId
    mgmt: HostPort
    records: HostPort | None = None
    gradients: HostPort | None = None


@dataclass(frozen=True, kw_only=True)
class HostCopiesFile(Frozen):
    """A job file: its ranks, as a number or a mesh, and its shadow nodes."""

    job: Name
    copies: Literal["host"]
    ranks: Annotated[int, whole(1, RANKS_LAST + 1)] | None = None
    mesh: RankMesh | None = None
    replicas: Annotated[int, whole(1, SHARDS_MAX)] = 1
    keys: FilePath | None = None
    encrypt: Flag = False
    sending: Sending = DEFAULT_SENDING
    min_replicas: Size | None = None
    replacement_seconds: Seconds | None = None
    shadow_nodes: Annotated[tuple[CopyNode, ...], items(1)]


def concerns(raw: Any) -> bool:
    """Return whether `read` reads a file's data: hosts copy, or it does not say well who does."""
    return isinstance(raw, dict) and (raw.get("copies") == "host" or _way_fault(raw) is not None)


def _way_fault(raw: Mapping[str, Any]) -> Fault | None:
    """Return the fault of a file that names no way of copies, or none that there is, but means one.

    Other faults of it would be about the keys of the wrong way.
    """
    copies = raw.get("copies")
    if isinstance(copies, str) and copies not in _WAYS:
        hint = did_you_mean(copies, _WAYS)
        return Fault(("copies",), f"must be 'switch' or 'host', not {copies[:40]!r}{hint}")
    if copies is None and "ranks" in raw and "fabric" not in raw:
        return Fault(("copies",), "is missing: with ranks and without a fabric, hosts copy, copies: host")
    return None


def read(raw: Any) -> tuple[Job | None, list[Fault]]:
    """Return the job of a file's data, or all its faults."""
    if fault := _way_fault(raw):
        return None, [fault]
    file, faults = validated(HostCopiesFile, raw)
    if file is None:
        return None, [replace(fault, message=_FOREIGN) if _is_foreign(fault) else fault for fault in faults]
    if faults := list(_within(file)):
        return None, faults
    return _job(file), []


_WAYS: Final = ("switch", "host")

_OF_SWITCHES: Final = frozenset(
    (
        *("fabric", "tag", "collective", "tree_bytes", "channels", "lossless", "hosts", "gpus_per_host"),
        *("dp_groups", "nics"),
    )
)
"""Keys of jobs with copies by switches alone."""
_FOREIGN: Final = "is for copies by switch (copies: switch): remove it, because hosts send copies themselves"


def _is_foreign(fault: Fault) -> bool:
    return fault.path[-1] in _OF_SWITCHES


def _within(file: HostCopiesFile) -> Iterator[Fault]:
    """Yield faults between the parts of a file."""
    if (file.ranks is None) == (file.mesh is None):
        fault = "has ranks and a mesh: give one of them" if file.ranks else "is missing; or give a mesh"
        yield Fault(("ranks",), fault)
    elif file.mesh is not None and (ranks := _size(file.mesh)) > RANKS_LAST + 1:
        yield Fault(("mesh",), f"has {ranks:,} ranks, and a job has {RANKS_LAST + 1:,} at most")
    present = file.ranks or (file.mesh.dp_replicate if file.mesh else 0)
    if file.min_replicas is not None and present < file.min_replicas:
        has = f"{counted(present, 'replica')} of the model"
        yield Fault(("min_replicas",), f"is {file.min_replicas}, but the job has {has}: 1 to {present}")
    elif file.min_replicas is not None and file.replicas > 1 and 2 * file.min_replicas <= present:
        # Ranks of both parts could meet, each at a node of its own, and resume from it.
        yield Fault(
            ("min_replicas",),
            f"is {file.min_replicas} of {present} replicas of the model: if the network breaks, two parts "
            f"could go on, because shards have {file.replicas} holders (replicas): "
            f"{present // 2 + 1} or more, or replicas: 1",
        )
    if file.replacement_seconds is not None and file.min_replicas is None:
        yield Fault(("replacement_seconds",), "is for jobs with min_replicas; others wait for all ranks")
    nodes = len(file.shadow_nodes)
    if file.replicas > nodes:
        yield Fault(("replicas",), f"{file.replicas} replicas need as many shadow nodes; the job has {nodes}")
    if file.ranks is not None and nodes > SHARDS_MAX:
        yield Fault(
            ("shadow_nodes",), f"a DP group has at most {counted(SHARDS_MAX, 'shadow node')}, not {nodes}"
        )
    ids: set[int] = set()
    addresses: set[tuple[str, int]] = set()
    for index, node in enumerate(map(_node, file.shadow_nodes)):
        if node.id in ids:
            yield Fault(("shadow_nodes", index, "id"), f"shadow node id {node.id} is taken already")
        ids.add(node.id)
        for key, (host, port) in zip(("mgmt", "records", "gradients"), node.addresses, strict=True):
            if port > 65535:
                yield Fault(
                    ("shadow_nodes", index, key), f"its port would be {port}, after that of mgmt: set {key}"
                )
            elif (host, port) in addresses:
                yield Fault(("shadow_nodes", index, key), f"{key} address {host}:{port} is taken already")
            addresses.add((host, port))


def _size(mesh: RankMesh) -> int:
    return mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp


def _node(node: CopyNode) -> ShadowNode:
    return ShadowNode(id=node.id, mgmt=node.mgmt, records=node.records, gradients=node.gradients, nics=())


def _job(file: HostCopiesFile) -> Job:
    mesh = Mesh(dp_replicate=file.ranks or 1) if file.mesh is None else Mesh(**asdict(file.mesh))
    nodes = tuple(map(_node, file.shadow_nodes))
    groups = tuple(
        DpGroup(ranks=tuple(map(_rank, ranks)), shadow_nodes=tuple(nodes[holder].id for holder in holders))
        for ranks, holders in served_lines(mesh, len(nodes), file.replicas)
    )
    return Job(
        job=file.job,
        copies="host",
        fabric=Fabric(switches=()),
        replicas=file.replicas,
        keys=file.keys,
        encrypt=file.encrypt,
        sending=file.sending,
        min_replicas=file.min_replicas,
        replacement_seconds=file.replacement_seconds,
        mesh=None if file.mesh is None else mesh,
        dp_groups=groups,
        shadow_nodes=nodes,
    )


def _rank(number: int) -> Rank:
    return Rank(rank=number, ip=NO_ADDRESS, mac="", switch="", port=0)
