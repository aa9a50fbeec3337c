"""Metrics of each process: names by the conventions, bounded labels, and the values of its status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from checkmate.consolidate.follow import SavedCheckpoint
from checkmate.consolidate.metrics import KeeperTally, families
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import metrics as of_shadow
from checkmate.shadow.logic.node_state import Tally
from controlplane import metrics as of_controller
from controlplane.guard import Refusal
from controlplane.metrics import StrayPackets
from softswitch import metrics as of_softswitch
from tests.support.metrics import HOLD, NODE, SAMPLE, STATISTICS, everything


def values(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return each sample by name and labels, in the text format."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sample.labels.items()): sample.value
        for metric in metrics
        for sample in metric.samples
    }


@pytest.mark.parametrize("metric", everything(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(
        r"checkmate_(shadow|controller|switch|stream|reconcile|softswitch|consolidate)_[a-z_]+", metric.name
    )
    assert metric.documentation.endswith(".")
    assert not re.search(r"_(ms|kb|mb|minutes|percent|count|total)(_|$)", metric.name), "base units"
    for sample in metric.samples:
        assert sample.name.endswith("_total") == (metric.type == "counter")
        assert sample.labels.keys() <= {
            *("switch", "job", "dp_group", "shard", "side", "channel", "shadow_id", "node", "replication_id"),
            *("nic", "device", "port", "interface", "error", "reason", metric.name),
        }, "runs, incarnations and iterations are values"


def test_no_name_is_used_twice() -> None:
    names = [metric.name for metric in everything()]
    assert len(names) == len(set(names))


def test_a_shadow_node_says_what_its_status_has() -> None:
    tally = Tally(steps=4, step_seconds=0.5, gaps=1, mismatches=2, seeds=3)
    samples = values(of_shadow.families(NODE, tally, 77))
    hold, node = "job=gpt,dp_group=1,shard=2,node=5", "job=gpt,node=5"
    assert samples[f"checkmate_shadow_committed_iteration,{hold}"] == 41
    assert samples[f"checkmate_shadow_lag_iterations,{hold}"] == 2
    assert samples[f"checkmate_shadow_lag_seconds,{hold}"] == 1.5
    assert samples[f"checkmate_shadow_left_out_iterations_total,{hold}"] == 6
    assert samples[f"checkmate_shadow_step_waits_seconds_total,{node}"] == 0.25
    assert samples[f"checkmate_shadow_streams_missing,{hold}"] == 1
    assert samples[f"checkmate_shadow_offered,{hold}"] == 0
    states = {name: value for name, value in samples.items() if "hold_state" in name}
    assert [name.rpartition("=")[2] for name, value in states.items() if value] == ["live"]
    assert samples[f"checkmate_shadow_received_bytes_total,{node},nic=10.0.2.1"] == 99
    assert samples[f"checkmate_shadow_step_duration_seconds_sum,{node}"] == 0.5
    assert samples[f"checkmate_shadow_step_duration_seconds_count,{node}"] == 4
    assert samples[f"checkmate_shadow_gaps_total,{node}"] == 1
    assert samples[f"checkmate_shadow_comparison_mismatches_total,{node}"] == 2
    assert samples[f"checkmate_shadow_seeds_total,{node}"] == 3
    assert samples[f"checkmate_shadow_socket_buffer_bytes,{node}"] == 77
    assert of_shadow.not_ready(NODE) == "not connected: 1 stream"
    assert of_shadow.not_ready(pb.NodeStatus(job="gpt")) == "no training has begun"
    assert "drained" in of_shadow.not_ready(pb.NodeStatus(job="gpt", left=True))


@pytest.mark.parametrize(
    ("changes", "fenced", "state"),
    [
        ({}, False, "live"),
        ({"live": False}, False, "joining"),
        ({}, True, "fenced"),
        ({"doubtful": True}, True, "doubtful"),
    ],
)
def test_every_state_of_a_hold_has_a_name(changes: dict[str, bool], fenced: bool, state: str) -> None:
    hold = pb.HoldStatus()
    hold.CopyFrom(HOLD)
    for name, value in changes.items():
        setattr(hold, name, value)
    status = pb.NodeStatus(job="gpt", node=5, fenced=fenced, holds=[hold])
    samples = values(of_shadow.families(status, Tally(), 0))
    assert [name for name, value in samples.items() if "hold_state" in name and value] == [
        f"checkmate_shadow_hold_state,job=gpt,dp_group=1,shard=2,node=5,checkmate_shadow_hold_state={state}"
    ]


def test_a_controller_says_what_it_serves() -> None:
    samples = values(of_controller.families([SAMPLE], standby=False))
    stream = "switch=tor,job=gpt,dp_group=0,side=last,channel=2,shadow_id=3,node=5,replication_id=1"
    assert samples[f"checkmate_stream_connected,{stream}"] == 1
    assert samples[f"checkmate_stream_copied_bytes_total,{stream}"] == 1000
    assert samples[f"checkmate_stream_lost_packets_total,{stream}"] == 2
    assert samples["checkmate_switch_passed_packets_total,switch=tor,reason=without_tag"] == 6
    assert (
        samples["checkmate_controller_primary,switch=tor"] == samples["checkmate_switch_up,switch=tor"] == 1
    )
    assert samples["checkmate_controller_term,switch=tor"] == 9
    assert samples["checkmate_switch_write_errors_total,switch=tor,error=WriteRefused"] == 3
    assert samples["checkmate_reconcile_duration_seconds_sum,switch=tor"] == 0.5
    assert samples["checkmate_controller_standby"] == 0


def test_packets_that_are_refused_stay_counted_when_their_job_goes() -> None:
    """Otherwise the counter would fall, which `increase` takes for a restart: a false alert."""

    def refusal_of(address: str, packets: int) -> Refusal:
        return Refusal("tor", None, address, "a host", packets, 0)

    strays = StrayPackets()
    gpt, bert = refusal_of("10.0.0.1", 500), refusal_of("10.0.0.2", 200)
    at_port = Refusal("tor", 7, "10.0.0.3", "a host", 30, 0)
    assert [strays.take(samples) for samples in ([gpt, bert], [bert], [bert, at_port])] == [700, 700, 700]
    assert (
        strays.take([refusal_of("10.0.0.1", 4), refusal_of("10.0.0.2", 201)]) == 705
    )  # gpt is back, and new
    assert SAMPLE.status is not None
    switch_sample = replace(SAMPLE, strays=705, status=replace(SAMPLE.status, refused=(bert, at_port)))
    samples = values(of_controller.families([switch_sample], standby=False))
    assert samples["checkmate_switch_refused_packets_total,switch=tor,port="] == 705
    assert samples["checkmate_switch_refused_packets_total,switch=tor,port=7"] == 30


def test_a_switch_that_is_away_has_no_streams() -> None:
    samples = values(of_controller.families([replace(SAMPLE, term=None, status=None)], standby=False))
    assert (
        samples["checkmate_switch_up,switch=tor"] == samples["checkmate_controller_primary,switch=tor"] == 0
    )
    assert not [
        name for name in samples if name.startswith(("checkmate_stream_", "checkmate_controller_term"))
    ]
    assert values(of_controller.families([], standby=True))["checkmate_controller_standby"] == 1


def test_the_embedded_switch_says_its_statistics() -> None:
    samples = values(of_softswitch.families(STATISTICS, 1, 2))
    port = "device=1,port=7,interface=veth7"
    assert samples[f"checkmate_softswitch_port_received_bytes_total,{port}"] == 12
    assert samples[f"checkmate_softswitch_port_received_dropped_packets_total,{port}"] == 1
    assert samples["checkmate_softswitch_packet_in_unheard_packets_total,device=1"] == 3
    assert samples["checkmate_softswitch_primaries,device=1"] == 2


def test_what_keeps_checkpoints_says_how_far_it_is() -> None:
    tally = KeeperTally("gpt", 10)
    tally.note_failure("no shadow node can be reached")
    assert tally.not_ready() == "no shadow node can be reached"
    tally.note_recovery()
    assert tally.not_ready() == ""
    tally.note_failure("the disk is full")
    tally.note_saved(SavedCheckpoint(Path("x"), "gpt", "run", 1, 19, 2, 1000, 0.5), 1e9)
    tally.note_saved(SavedCheckpoint(Path("y"), "gpt", "run", 1, 29, 2, 1000, 0.75), 1e9 + 5)
    assert tally.not_ready() == ""
    samples = values(families(tally))
    assert samples["checkmate_consolidate_saved_iteration,job=gpt"] == 29
    assert samples["checkmate_consolidate_saved_timestamp_seconds,job=gpt"] == 1e9 + 5
    assert samples["checkmate_consolidate_duration_seconds_sum,job=gpt"] == 1.25
    assert samples["checkmate_consolidate_duration_seconds_count,job=gpt"] == 2
    assert samples["checkmate_consolidate_failures_total,job=gpt"] == 2


def test_checkpoints_count_from_what_was_there_first() -> None:
    """A process that starts again after iteration 5,000 is not 5,000 behind, nor is a new run ahead."""
    tally = KeeperTally("gpt", 10)
    since = []
    for run, iteration in (("a", 5000), ("a", 5007), ("a", 4990), ("b", 3), ("b", 40)):
        tally.note_progress(run, iteration)
        since.append(tally.since)
    assert since == [5000, 5000, 5000, 3, 3]
    tally.note_saved(SavedCheckpoint(Path("x"), "gpt", "b", 2, 39, 2, 1000, 0.5), 1e9)
    tally.note_progress("b", 41)
    assert values(families(tally))["checkmate_consolidate_since_iteration,job=gpt"] == 39
