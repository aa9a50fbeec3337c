"""Documents of the planning commands. Sizes are in bytes, times in seconds, rates in bits per second."""

from __future__ import annotations

from checkmate.cli.documents.base import DocumentPart, JsonDocument
from checkmate.planner.capacity.plan import SwitchUse
from checkmate.planner.cost.report import Scheme
from checkmate.planner.demand import BoundaryDemand, ShardDemand
from checkmate.planner.profile.sizing import Sizing
from checkmate.planner.profile.tables import ProfileFigure
from checkmate.planner.scaling import StepTimes


class CostDocument(JsonDocument):
    """`cost`. `assumed` has the keys that were not specified; saved amounts are null without --every."""

    gpus: int
    failures_per_gpu_hour: float
    duration_s: float
    iteration_s: float
    stall_s: float
    slowdown: float
    dollars_per_gpu_hour: float
    dollars_per_node_hour: float
    shadow_nodes: int
    dp_groups: int
    replicas: int
    restart_s: float
    restart_in_place_s: float | None
    failures_per_node_hour: float
    seeding_s: float
    disk_every_s: float
    assumed: list[str]
    failures: float
    best_interval_iterations: float
    schemes: list[Scheme]
    saved_gpu_hours: float
    saved_dollars: float
    yours_saved_gpu_hours: float | None
    yours_saved_dollars: float | None
    break_even_stall_s: float
    extra_ports: int
    extra_ports_share: float


class SizePart(DocumentPart):
    """A model on several numbers of nodes; `nodes_needed` is null if none suffices."""

    model: str
    nodes_needed: int | None
    nodes: list[Sizing]


class ProfileDocument(JsonDocument):
    """`profile`. `receive_bytes_per_s` is by number of NICs."""

    cores: int
    receive_bytes_per_s: dict[int, float]
    steps: list[StepTimes]
    load_average: float
    receive_buffers_as_asked: bool
    outliers: list[ProfileFigure]
    iteration_seconds: float | None
    sizes: list[SizePart]


class ModelPart(DocumentPart):
    """The model of a DP group."""

    name: str
    parameters: int
    bytes: int
    dtype: str


class RoundPart(DocumentPart):
    """What a NIC receives in a round of the ring."""

    bytes: int
    peak_bits_per_s: float


class NicPart(DocumentPart):
    """What a NIC receives; `receive_seconds` is null without a profile."""

    node: int
    nic: int
    streams: int
    bytes: int
    rounds: list[RoundPart]
    receive_seconds: float | None


class MemoryPart(DocumentPart):
    """What a node keeps in memory."""

    parameters: int
    optimizer_state: int
    gradients: int
    socket_buffers: int
    reading: int
    total: int


class PlannedShardPart(DocumentPart):
    """A shard of a DP group."""

    group: int
    shard: int


class NodePart(DocumentPart):
    """A shadow node; `step_seconds` is null without a profile."""

    node: int
    shards: list[PlannedShardPart]
    memory: MemoryPart
    step_seconds: float | None


class CheckPart(DocumentPart):
    """A resource at its scarcest place."""

    what: str
    where: str
    needed: float
    there: float
    unit: str
    share: float
    fits: bool


class MisfitPart(DocumentPart):
    """What does not fit, with its path in the job file."""

    path: str
    message: str


class AnyCapacityDocument(JsonDocument):
    """What `plan --capacity` says of each job."""

    job: str
    models: list[ModelPart]
    dp_groups: int
    replicas: int
    streams: int
    shards: list[ShardDemand]
    balance: list[float]
    checks: list[CheckPart]
    not_checked: list[str]
    fits: bool
    misfits: list[MisfitPart]


class CapacityDocument(AnyCapacityDocument):
    """`plan --capacity` of a job with copies by switches."""

    channels: int
    multicast_groups: int
    shadow_nics: int
    switch_ports: int
    transceivers: int
    ports_of_the_rule: int
    switches: list[SwitchUse]
    boundary_ranks: list[BoundaryDemand]
    nics: list[NicPart]
    nodes: list[NodePart]


class RankPart(DocumentPart):
    """A rank with copies by hosts; `host_memory` is pinned if gradients are on a GPU."""

    group: int
    rank: int
    part_bytes: int
    sent_bytes: int
    streams: int
    host_memory: int


class ReceivingNodePart(NodePart):
    """A shadow node to which ranks send their parts."""

    streams: int
    bytes: int
    receive_seconds: float


class HostCapacityDocument(AnyCapacityDocument):
    """`plan --capacity` of a job with copies by hosts."""

    gpus_per_host: int
    ranks: list[RankPart]
    nodes: list[ReceivingNodePart]
