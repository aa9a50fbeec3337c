"""Two ranks on this machine, from start to exit, with shadow nodes that only note what they receive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkmate import state
from checkmate.events.reading import read_paths
from checkmate.report import processes as by_process
from checkmate.report.recoveries import recoveries
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire import layout as layouts
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.schedule import stream_layout
from testbed.jobs import job_data
from testbed.ports import free_port
from tests.scripts import refused
from tests.support.shadow import standings
from tests.support.shadow.recording_node import RecordingNode
from tests.support.training.lab import LabRun
from tests.support.training.orders import ScriptOrders
from topologies.kernel import processes

ROOT = Path(__file__).parents[2]
SECONDS = 90.0
BUFFERS = [f"body.1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the tagger needs root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def nodes() -> Iterator[list[RecordingNode]]:
    served = [RecordingNode(shards=[0]), RecordingNode(shards=[1])]
    yield served
    for node in served:
        node.stop()


def job_file(folder: Path, nodes: list[RecordingNode], ranks: int = 2, collective: str = "ring") -> Path:
    data = {**job_data(ranks=ranks, nodes=2, channels=2), "collective": collective}
    for number, rank in enumerate(data["dp_groups"][0]["ranks"]):
        rank["ip"] = f"127.0.9.{number + 1}"
    for described, node in zip(data["shadow_nodes"], nodes, strict=True):
        described["mgmt"], described["records"] = node.address, node.records_at
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def train(folder: Path, nodes: list[RecordingNode], **orders: Any) -> tuple[LabRun, list[tuple[int, str]]]:
    """Run both ranks to their end; return their results, and each one's status and errors."""
    file = ScriptOrders(str(folder), layers=1, width=32, **orders).write(folder / "orders.json")
    collective = "nccl" if "nccl" in orders else "ring"
    program = "tests.scripts.training", str(file)
    return LabRun(folder, 2), run_ranks(folder, nodes, *program, collective=collective)


def run_ranks(
    folder: Path, nodes: list[RecordingNode], *program: str, collective: str = "ring"
) -> list[tuple[int, str]]:
    """Run both ranks of a program to their end; return each one's status and errors."""
    common = {
        **os.environ,
        "CHECKMATE_JOB": str(job_file(folder, nodes, collective=collective)),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=ROOT,
            env={**common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [(process.communicate(timeout=SECONDS)[1], process.returncode) for process in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(["the ranks don't end", *map(where_it_is, ranks)]))
    finally:
        for process in ranks:
            process.kill()
    return [(code, errors) for errors, code in ends]


def where_it_is(rank: subprocess.Popen[str]) -> str:
    """Return a rank's output, and the stacks of its and its children's threads."""
    processes.kill([*processes.descendants(rank.pid), rank.pid], signal.SIGABRT)
    return f"{rank.args!r}: {rank.communicate(timeout=10)[1]}"


def records(node: RecordingNode, position: int) -> list[pb.RecordPart]:
    return [part for part in node.records if part.position == position]


def check_events(folder: Path) -> None:
    """Check the events that both ranks have kept, one after another, and what a report makes of them."""
    event_log = read_paths([folder])
    assert event_log.passed_over == {}
    names = {
        f"rank {n}": [event.name for event in event_log.events if event.source == f"rank {n}"] for n in (0, 1)
    }
    kinds = ("restore.started", "restore.agreed", "restore.ended", "protect.started", "protect.ended")
    expected = [f"trainer.{name}" for name in (*kinds, "first", "ended")]
    assert names["rank 1"] == expected
    assert names["rank 0"] == [expected[0], "trainer.restore.drained", *expected[1:]]
    (start,) = recoveries(
        by_process.processes(by_process.merge_events(event_log.events, "demo")), event_log.events, []
    )
    assert (start.source, start.next, start.why) == ("start", 0, "")
    assert all(step.seconds < SECONDS for step in start.steps) and len(start.steps) == 5


def test_from_start_to_exit(
    nodes: list[RecordingNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a DataLoader whose workers are forked during training, and an event log."""
    monkeypatch.setenv("CHECKMATE_EVENTS", str(tmp_path / "events"))
    run, ends = train(tmp_path, nodes, iterations=4, plain=True, workers=2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert not any("fork" in errors for _, errors in ends)
    for line in (
        "the shadow nodes hold nothing: training begins with iteration 0",
        "shadow nodes 0, 1 follow DP group 0, from iteration 0 on",
    ):
        assert [errors.count(line) for _, errors in ends] == [1, 0], ends
    assert run.resumed() == 0
    check_events(tmp_path / "events")
    (begin,) = nodes[0].begins
    begin_key = (begin.incarnation, begin.run, begin.start)
    assert [(b.incarnation, b.run, b.start) for b in nodes[1].begins] == [begin_key]
    assert begin.start
    assert (begin.job, begin.group, begin.ranks, begin.device) == ("demo", 0, 2, "cpu")
    assert (begin.first_iteration, begin.next_iteration, begin.keep) == (0, 0, False)
    assert begin.generation == 1
    assert begin.torch == torch.__version__
    layout = layouts.from_json(begin.layout)
    for shard, node in enumerate(nodes):
        seeded = [number for header, numbers in node.seeds for number in numbers]
        assert sorted(seeded) == sorted(layout.of_shard(shard))
        seeds = {(header.iteration, header.run, header.start) for header, _ in node.seeds}
        assert seeds == {(-1, begin.run, begin.start)}
        buffers = sorted(name for header, _ in node.seeds for name in header.record.buffers)
        assert buffers == list(begin.buffers) == BUFFERS
        for position in range(2):
            parts = records(node, position)
            assert [part.iteration for part in parts] == [0, 1, 2, 3]
            assert {(part.incarnation, part.run, part.start) for part in parts} == {begin_key}
            assert [state.loads(part.extra) for part in parts] == [{"seen": n + 1} for n in range(4)]
            check_ends(parts, layout, position)
        assert [part.step.last for part in records(node, 0)] == [False, False, False, True]
        assert not any(part.HasField("step") for part in records(node, 1))


def check_ends(parts: list[pb.RecordPart], layout: layouts.Layout, side: int) -> None:
    """Check that each stream's end is that of the schedule."""
    for part in parts:
        ends = {(end.channel, end.shard): end.end for end in part.ends}
        expected = {}
        for channel in range(2):
            for shard in range(2):
                stream = stream_layout(
                    layout.schedule, 2, channel, 2, side=side, shadow_id=shard, slicing=layout.slicing
                )
                expected[channel, shard] = stream.nbytes * (part.iteration + 1)
        assert ends == expected


@pytest.mark.slow
def test_over_a_double_of_nccl(nodes: list[RecordingNode], tmp_path: Path) -> None:
    """Nodes are told NCCL's slicing, and records go out once the plugin's bytes are acknowledged."""
    run, ends = train(tmp_path, nodes, iterations=4, nccl="2.28")
    assert [code for code, _ in ends] == [0, 0], ends
    assert list(run.losses(0)) == [0, 1, 2, 3]
    (begin,) = nodes[0].begins
    layout = layouts.from_json(begin.layout)
    assert layout.slicing == NcclSlicing(cell=8 << 10)
    for position in range(2):
        parts = records(nodes[1], position)
        assert [part.iteration for part in parts] == [0, 1, 2, 3]
        check_ends(parts, layout, position)


@pytest.mark.slow
def test_training_goes_on_if_nccl_cannot_be_tagged(nodes: list[RecordingNode], tmp_path: Path) -> None:
    run, ends = train(tmp_path, nodes, iterations=4, nccl="2.25")
    assert [code for code, _ in ends] == [0, 0], ends
    assert list(run.losses(0)) == [0, 1, 2, 3]
    error = "gradients are not tagged, so shadow nodes don't follow: rank 0 (192.168.0.0): NCCL 2.25.5 is not"
    assert [errors.count(error) for _, errors in ends] == [1, 0], ends
    assert [errors.count("follow DP group") for _, errors in ends] == [0, 0]
    for node in nodes:
        assert not node.begins
        assert not node.records


def test_the_death_of_a_rank_is_a_ring_error_on_the_other(nodes: list[RecordingNode], tmp_path: Path) -> None:
    _, ends = train(tmp_path, nodes, iterations=6, kills=((1, 2),), batch_norm=False)
    assert [code for code, _ in ends] == [1, -signal.SIGKILL], ends
    error = ends[0][1].strip().splitlines()[-1]
    assert "checkmate.ring.place.RingError: " in error
    assert "rank 0 (192.168.0.0), channel " in error and " rank 1 (192.168.0.1): " in error
    assert "Unable to cast" not in ends[0][1]


def test_without_restore_nothing_that_an_earlier_process_has_trained_is_discarded(
    nodes: list[RecordingNode], tmp_path: Path
) -> None:
    nodes[0].status = standings.node(0, standings.hold((0, 0), 6, 7))
    _, ends = train(tmp_path, nodes, iterations=4, restore=False)
    assert [code for code, _ in ends] == [1, 1], ends
    for _, errors in ends:
        assert (
            "RestoreError: the shadow nodes hold iteration 6 of this job, and the script does not resume "
            "from it: call checkmate.restore before protect"
        ) in errors
    assert not any(shadow_node.begins for shadow_node in nodes)


@pytest.mark.slow
def test_an_error_is_no_end_of_training(nodes: list[RecordingNode], tmp_path: Path) -> None:
    _, ends = train(tmp_path, nodes, iterations=4, plain=True, fail_at=2, restore=False)
    assert [code for code, _ in ends] == [1, 1]
    assert all("ArithmeticError: as ordered" in errors for _, errors in ends)
    for node in nodes:
        # Iteration 1 has stepped, but the script may not have been done with it.
        assert [(part.iteration, part.step.last) for part in records(node, 0)] == [(0, False)]


@pytest.mark.slow
def test_shadow_nodes_that_are_away_cost_nothing_but_the_wait(
    nodes: list[RecordingNode], tmp_path: Path
) -> None:
    for node in nodes:
        node.stop()
    run, ends = train(tmp_path, nodes, iterations=4, restore=False, wait=0.5)
    assert [code for code, _ in ends] == [0, 0], ends
    assert list(run.losses(0)) == [0, 1, 2, 3]
    assert "training begins without all shadow nodes: shadow node 0" in ends[0][1]
    assert ends[0][1].count("training continues") == 2
    for shard in (0, 1):
        assert f"but no other node has shard {shard}: a crash now" in ends[0][1]
    for node in nodes:
        node.start()


@pytest.mark.slow
def test_without_shadow_nodes_nothing_is_resumed(nodes: list[RecordingNode], tmp_path: Path) -> None:
    nodes[1].stop()
    _, ends = train(tmp_path, nodes, iterations=4, timeout=1.0)
    assert [code for code, _ in ends] == [1, 1]
    for _, errors in ends:
        assert f"shadow node 1 ({nodes[1].address}): can't be reached (Connection refused)" in errors
        assert "no checkpoint folder is set (pass checkpoints= or set CHECKMATE_CHECKPOINTS)" in errors
        assert "`checkmate reset JOB` has the next start begin with iteration 0" in errors
    nodes[1].start()


@pytest.mark.slow
def test_what_fails_half_way_leaves_nothing(nodes: list[RecordingNode], tmp_path: Path) -> None:
    """No thread, hook, tagger or socket: another model can be protected, or none."""
    ends = run_ranks(tmp_path, nodes, "tests.scripts.half_way", str(tmp_path))
    assert [code for code, _ in ends] == [0, 0], ends
    nothing = {
        "hooks": 0,
        "clipped": 0,
        "protected": False,
        "tagger": 0,
        "ring": 0,
        "interval": 0.005,
        "threads": [],
    }
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "already has the communication hook allreduce_hook" in report["hook"].pop("error")
        assert report["late"].pop("error") == "RuntimeError: no hook"
        assert "NoScaler" in report["scaler"].pop("error")
        report.get("alone", {}).pop("error", None)
        assert report == dict.fromkeys(report, nothing)
        assert ("alone" in report) == (rank == 0)


def test_a_script_that_catches_its_refusal_ends_with_an_error(
    nodes: list[RecordingNode], tmp_path: Path
) -> None:
    """Each further call is refused, the nodes know why, and the exit status is not 0."""
    ends = run_ranks(tmp_path, nodes, "tests.scripts.refused", "caught")
    assert [code for code, _ in ends] == [1, 1], ends
    text = (
        f"iteration {refused.CHANGED_AT}: parameter weight was changed, and not by the step of the optimizer"
    )
    assert all(f"RefusedError: {text}" in errors for _, errors in ends), ends
    for node in nodes:
        assert {part.iteration for part in node.records} == {0, 1}
        assert {refusal.iteration for refusal in node.refusals} == {refused.CHANGED_AT}
        assert {refusal.start for refusal in node.refusals} == {node.begins[0].start}


def test_a_last_iteration_that_cannot_be_recorded_is_an_error(
    nodes: list[RecordingNode], tmp_path: Path
) -> None:
    ends = run_ranks(tmp_path, nodes, "tests.scripts.refused", "unstored")
    assert [code for code, _ in ends] == [1, 1], ends
    assert all("StateError: only tensors, NumPy arrays, numbers" in errors for _, errors in ends), ends
    for node in nodes:
        assert {part.iteration for part in node.records} == {0, 1, 2, 3}
        assert {refusal.iteration for refusal in node.refusals} == {refused.ITERATIONS - 1}
