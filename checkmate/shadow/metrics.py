"""A shadow node's status as metrics of Prometheus. Pure.

Runs, incarnations and iterations are values, not labels, so that a training job of months has few series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    StateSetMetricFamily,
    SummaryMetricFamily,
)

from checkmate.base.wording import counted
from checkmate.nodes.standing import lag
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.node_state import Tally
from checkmate.shadow.logic.phases import LEFT_TROUBLE
from checkmate.shadow.view import state_of

STATES: Final = ("live", "joining", "fenced", "doubtful")
_OF_HOLD: Final = ("job", "dp_group", "shard", "node")
_OF_NODE: Final = ("job", "node")


def families(status: pb.NodeStatus, tally: Tally, unread: int) -> Iterator[Metric]:
    """Yield the metrics `checkmate_shadow_*` of a node. `unread`: bytes in socket buffers."""
    node = (status.job, str(status.node))
    holds = [(_labels(status, hold), hold) for hold in status.holds]
    yield _gauge(
        "committed_iteration",
        "The last iteration that the shard has stepped; -1: none.",
        ((labels, hold.stepped) for labels, hold in holds),
    )
    yield _gauge(
        "lag_iterations",
        "Iterations by which trainers are ahead of the shard's last step.",
        ((labels, lag(hold)) for labels, hold in holds),
    )
    yield _gauge(
        "lag_seconds",
        "Time since the shard was last at most one iteration behind trainers; 0: it is.",
        ((labels, hold.lag_seconds) for labels, hold in holds),
    )
    yield _gauge(
        "offered",
        "Whether a restart could use the shard's state.",
        ((labels, int(hold.offered)) for labels, hold in holds),
    )
    yield _gauge(
        "streams_missing",
        "Streams that the shard expects, and that are not connected.",
        ((labels, hold.streams - hold.connected) for labels, hold in holds),
    )
    yield _counter(
        "left_out_iterations",
        "Iterations that ranks have left out, because the node took too little.",
        ((labels, hold.left_out) for labels, hold in holds),
    )
    yield _counter(
        "repairs",
        "Lost copies that a rank has sent again (lossless: false).",
        ((labels, hold.repairs) for labels, hold in holds),
    )
    yield _counter(
        "repair_bytes",
        "Bytes of streams that ranks were asked for again.",
        ((labels, hold.repair_bytes) for labels, hold in holds),
    )
    states = StateSetMetricFamily("checkmate_shadow_hold_state", "What the shard does.", labels=_OF_HOLD)
    for labels, hold in holds:
        now = state_of(hold, status.fenced).plain
        states.add_metric(labels, {state: state == now for state in STATES})
    yield states
    yield from _tallied(tally, status, node)
    waiting = GaugeMetricFamily(
        "checkmate_shadow_socket_buffer_bytes", "Bytes received and not read yet.", labels=_OF_NODE
    )
    waiting.add_metric(node, unread)
    yield waiting
    waited = CounterMetricFamily(
        "checkmate_shadow_step_waits_seconds",
        "Time that steps have waited for the node, on the rank whose steps waited longest.",
        labels=_OF_NODE,
    )
    waited.add_metric(node, status.waited_seconds)
    yield waited
    trouble = GaugeMetricFamily(
        "checkmate_shadow_troubles", "Problems in the node's status.", labels=_OF_NODE
    )
    trouble.add_metric(node, len(status.trouble) + sum(bool(hold.trouble) for hold in status.holds))
    yield trouble


def _tallied(tally: Tally, status: pb.NodeStatus, node: tuple[str, str]) -> Iterator[Metric]:
    """Yield what has been counted since the node's start."""
    nbytes = CounterMetricFamily(
        "checkmate_shadow_received_bytes", "Gradients received.", labels=(*_OF_NODE, "nic")
    )
    for nic in status.nics:
        nbytes.add_metric((*node, nic.ip), nic.bytes)
    yield nbytes
    steps = SummaryMetricFamily(
        "checkmate_shadow_step_duration_seconds", "Steps of all due shards together.", labels=_OF_NODE
    )
    steps.add_metric(node, tally.steps, tally.step_seconds)
    yield steps
    for name, text, count in (
        ("gaps", "Streams that have lost bytes, so that a shard had to join again.", tally.gaps),
        ("comparison_mismatches", "Steps after which a comparison differed.", tally.mismatches),
        ("seeds", "Messages of seeds that were loaded.", tally.seeds),
    ):
        family = CounterMetricFamily(f"checkmate_shadow_{name}", text, labels=_OF_NODE)
        family.add_metric(node, count)
        yield family


def not_ready(status: pb.NodeStatus) -> str:
    """Return why the node cannot serve a restart, or ""."""
    missing = sum(hold.streams - hold.connected for hold in status.holds)
    if status.left:
        return LEFT_TROUBLE
    if not status.holds:
        return "no training has begun"
    if missing:
        return f"not connected: {counted(missing, 'stream')}"
    return "" if all(hold.offered for hold in status.holds) else "not every shard is offered"


def _labels(status: pb.NodeStatus, hold: pb.HoldStatus) -> tuple[str, ...]:
    return status.job, str(hold.shard.group), str(hold.shard.shard), str(status.node)


def _of_holds(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(f"checkmate_shadow_{name}", text, labels=_OF_HOLD)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


_counter: Final = partial(_of_holds, CounterMetricFamily)
_gauge: Final = partial(_of_holds, GaugeMetricFamily)
