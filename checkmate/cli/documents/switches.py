"""Documents of commands about switches."""

from __future__ import annotations

from typing import Any, Final, get_type_hints

from pydantic import Field, create_model

from checkmate.cli.documents.base import DocumentPart, JsonDocument
from controlplane.status import SwitchStatus
from controlplane.tofino.pfc import Headroom, HostCommands, PausingPort, PfcPlan
from topologies.traffic.port_drops import PortDrops
from topologies.traffic.verdict import StreamRow


class HoldPart(DocumentPart):
    """A shard at a node. `lag`: iterations behind the trainers, since `lag_seconds` more than one.

    `left_out`: iterations that ranks left out for it. `repairs`: lost copies that ranks have sent again, for
    which they were asked for `repair_bytes`.
    """

    dp_group: int
    shard: int
    live: bool
    streams: int
    connected: int
    stepped: int
    in_full: int
    lag: int
    lag_seconds: float
    left_out: int
    repairs: int
    repair_bytes: int
    bytes: int
    trouble: str


class NodeStatusPart(DocumentPart):
    """A shadow node that has answered. `waited_seconds`: that steps of the present start waited for it."""

    holds: list[HoldPart]
    waited_seconds: float
    troubles: list[str]


class SilentNodePart(DocumentPart):
    """A shadow node that has not answered."""

    error: str


class StatusDocument(JsonDocument):
    """`status`: each switch by name; each shadow node of jobs with copies by hosts, by job and id."""

    switches: dict[str, SwitchStatus]
    nodes: dict[str, dict[str, NodeStatusPart | SilentNodePart]] = Field(default_factory=dict)


class WrittenPart(DocumentPart):
    """A switch that was written to: updates, and entities that it has now."""

    updates: int
    entities: int


class RemoveDocument(JsonDocument):
    """`remove`: each switch by name."""

    switches: dict[str, WrittenPart]


class ReplicaPart(DocumentPart):
    """A copy of a multicast group."""

    port: int
    instance: int


class GroupPart(DocumentPart):
    """A multicast group."""

    id: int
    replicas: list[ReplicaPart]


class EntryPart(DocumentPart):
    """A table entry; what `match` and `params` contain depends on the table."""

    table: str
    match: dict[str, Any]
    action: str
    params: dict[str, Any]
    priority: int


class PlannedStreamPart(DocumentPart):
    """A stream that a switch will have once it is connected."""

    job: str
    dp_group: int
    side: int
    boundary: int
    channel: int
    shadow_id: int
    shard: int
    replication_id: int
    shadow_node: int
    nic: str


class DpGroupPart(DocumentPart):
    """A DP group: its place in the mesh, if the job has one; ranks and their hosts in ring order."""

    dp_group: int
    mesh: dict[str, int]
    ranks: list[int]
    hosts: list[str | None]
    shadow_nodes: list[int]
    first_shadow_id: int


class ReceivedShardPart(DocumentPart):
    """A shard of a DP group."""

    group: int
    shard: int


class ReceiverPart(DocumentPart):
    """A shadow node to which ranks send their parts; streams are counted for shards of equal size."""

    node: int
    gradients: str
    shards: list[ReceivedShardPart]
    ranks: list[int]
    streams: int


class JobPlanPart(DocumentPart):
    """The DP groups of a job; with copies by hosts, the share of gradients that a rank sends, and to whom."""

    copies: str
    dp_groups: list[DpGroupPart]
    rank_shares: list[float] = Field(default_factory=list)
    nodes: list[ReceiverPart] = Field(default_factory=list)


class SwitchPlanPart(DocumentPart):
    """What a switch would get. `usage` and `limits` are by kind of entity."""

    target: str
    usage: dict[str, int]
    limits: dict[str, int]
    groups: list[GroupPart]
    entries: list[EntryPart]
    streams: list[PlannedStreamPart]


class PlanDocument(JsonDocument):
    """`plan`: each switch and each job by name."""

    switches: dict[str, SwitchPlanPart]
    jobs: dict[str, JobPlanPart]


class ScriptPart(DocumentPart):
    """A bfrt_python script."""

    script: str


class BfrtDocument(JsonDocument):
    """`plan --bfrt`: each Tofino by name."""

    switches: dict[str, ScriptPart]


def _extended(record: type, **more: Any) -> Any:
    """Return a model of a record with further or other fields."""
    fields: Any = {name: (kind, ...) for name, kind in {**get_type_hints(record), **more}.items()}
    return create_model(record.__name__, __base__=DocumentPart, __doc__=record.__doc__, **fields)


_Sender: Final = _extended(PausingPort, headroom=_extended(Headroom, bytes=int), admitted=int)
_Pfc: Final = _extended(PfcPlan, senders=list[_Sender])  # type: ignore[valid-type]


class PfcDocument(JsonDocument):
    """`plan --pfc`: each Tofino by name, and the commands of its hosts."""

    switches: dict[str, _Pfc]  # type: ignore[valid-type]
    hosts: list[HostCommands]


_Stream: Final = _extended(StreamRow, equal=bool)


class LabRankPart(DocumentPart):
    """A rank of a lab; `faults` counts failures of the tagger by name."""

    rank: int
    goodput_bits_per_second: float
    retransmitted_segments: int
    verified: int
    faults: dict[str, int]


class LabRunDocument(JsonDocument):
    """`lab run`."""

    good: bool
    equal: bool
    seconds: float
    gathered_bytes: int
    tagged_bytes: int
    streams: list[_Stream]  # type: ignore[valid-type]
    ranks: list[LabRankPart]
    switches: list[SwitchStatus]
    port_drops: list[PortDrops]
