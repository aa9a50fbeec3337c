"""Labs with `copies: host`: hosts and shadow nodes on one kernel bridge, without a switch. Pure.

Such a file has numbers in place of switches' names. Training, gradients and records all go over the
management network, whose bridge each lab has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Final, Literal

from checkmate.base.wording import counted
from checkmate.job.faults import Fault
from checkmate.job.fields import GPUS_MOST, items, whole
from checkmate.job.host_copies import RankMesh
from checkmate.job.mesh_groups import served_lines
from checkmate.job.schema import Frozen, Mesh
from checkmate.job.validation import validated
from topologies.describe.lab_file import RANKS_MAX, SHARDS_MAX, Example

WORDS: Final = "is for labs with switches (copies: switch): remove it, because this lab has none"
_OF_SWITCHES: Final = ("channels", "collective", "tree_bytes", "switches", "links", "dp_groups")


@dataclass(frozen=True, kw_only=True)
class BridgeLabFile(Frozen):
    """The whole file of a lab with `copies: host`."""

    title: Annotated[str, items(1)]
    copies: Literal["host"]
    example: Example | None = None
    replicas: Annotated[int, whole(1, SHARDS_MAX)] = 1
    hosts: Annotated[int, whole(1, RANKS_MAX)]
    gpus_per_host: Annotated[int, whole(1, GPUS_MOST)] = 1
    mesh: RankMesh | None = None
    shadow_nodes: Annotated[int, whole(1, 100)]

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.gpus_per_host

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of the ranks, which are replicas if the file has no mesh."""
        return Mesh(dp_replicate=self.ranks) if self.mesh is None else Mesh(**asdict(self.mesh))

    def groups(self) -> Iterator[tuple[range, tuple[int, ...]]]:
        """Return the ranks of each DP group, and its shadow nodes by number, as the job file has them."""
        return served_lines(self.whole_mesh, self.shadow_nodes, self.replicas)


def read(raw: object) -> tuple[BridgeLabFile | None, list[Fault]]:
    """Return a lab from the data of its YAML, or else every fault in it."""
    lab, faults = validated(BridgeLabFile, raw)
    if lab is not None:
        faults = list(_within(lab))
    faults = [Fault(fault.path, WORDS) if fault.path[-1] in _OF_SWITCHES else fault for fault in faults]
    return (None, faults) if faults else (lab, [])


def is_chosen(raw: object) -> bool:
    """Return whether the data of a lab's YAML are of one with copies by hosts."""
    return isinstance(raw, dict) and raw.get("copies") == "host"


def _within(lab: BridgeLabFile) -> Iterator[Fault]:
    if lab.ranks > RANKS_MAX:
        yield Fault(("hosts",), f"a lab has at most {RANKS_MAX} ranks, not {lab.ranks}")
    mesh = lab.whole_mesh
    size = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp
    if size != lab.ranks:
        yield Fault(
            ("mesh",),
            f"has {counted(size, 'rank')}, but {counted(lab.hosts, 'host')} with gpus_per_host: "
            f"{lab.gpus_per_host} have {lab.ranks}",
        )
    if lab.replicas > lab.shadow_nodes:
        yield Fault(
            ("replicas",),
            f"{lab.replicas} replicas need as many shadow nodes; the lab has {lab.shadow_nodes}",
        )
    if lab.mesh is None and lab.shadow_nodes > SHARDS_MAX:
        yield Fault(
            ("shadow_nodes",), f"a DP group has at most {SHARDS_MAX} shadow nodes, not {lab.shadow_nodes}"
        )
