"""The status of each kind of process, as examples for its metrics."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client.metrics_core import Metric

from checkmate.consolidate import metrics as of_keeper
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import metrics as of_shadow
from checkmate.shadow.logic.node_state import Tally
from controlplane import metrics as of_controller
from controlplane.guard import Refusal
from controlplane.status import StreamCount, StreamStatus, SwitchStatus
from softswitch import metrics as of_softswitch
from softswitch.frames.ports import PortStats

HOLD = pb.HoldStatus(
    shard=pb.Shard(group=1, shard=2),
    stepped=41,
    receiving=43,
    seeded=True,
    live=True,
    streams=4,
    connected=3,
    trained=42,
    left_out=6,
    lag_seconds=1.5,
)
NODE = pb.NodeStatus(
    job="gpt", node=5, holds=[HOLD], nics=[pb.NicStatus(ip="10.0.2.1", bytes=99)], waited_seconds=0.25
)
STREAM = StreamStatus(
    "gpt", 0, "replica 0", 1, False, 2, 3, 4, 1, 5, "10.0.2.1", "tor", True, 7, 10, 1000, 2, 200
)  # fmt: skip
STATUS = SwitchStatus(
    "tor",
    "softswitch",
    (STREAM,),
    {"without_tag": StreamCount(6, 60)},
    {},
    refused=(Refusal("tor", 3, "10.0.1.1", "rank 0 of gpt", 4, 240),),
)
SAMPLE = of_controller.SwitchSample("tor", 9, STATUS, {"WriteRefused": 3}, 2, 0.5)
STATISTICS = {
    "ports": {"7": {"interface": "veth7", "rx_dropped": 1} | asdict(PortStats(rx_bytes=12))},
    "unknown_port": 1,
    "packet_in_dropped": 2,
    "packet_in_unheard": 3,
}


def everything() -> list[Metric]:
    """Return all metrics of all processes."""
    return [
        *of_shadow.families(NODE, Tally(), 0),
        *of_controller.families([SAMPLE], standby=False),
        *of_softswitch.families(STATISTICS, 1, 1),
        *of_keeper.families(of_keeper.KeeperTally("gpt", 10)),
    ]
