"""Checkpoints from real shadow nodes over real gRPC: correct for their iteration, or not written at all."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import state
from checkmate.consolidate import checkpoint_folder, disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.follow import FollowListener, follow, next_due
from checkmate.consolidate.snapshot import Missing, SnapshotReader, Unreachable, combine_shards
from checkmate.nodes.reader import ShardState
from checkmate.nodes.standing import Lacking
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc import shadow_pb2_grpc as rpc
from checkmate.rpc.channels import OPTIONS
from checkmate.rpc.protocol import PROTOCOL
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.small_training import RUN, START
from tests.support.checkpoints import half_way, hidden
from tests.support.cli import COMMAND
from tests.support.documents import check_document
from tests.support.keys import without_warning
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.consolidated import ConsolidatePlace, kept_in
from tests.support.waiting import wait_until

pytestmark = needs_buffers


@pytest.mark.parametrize(
    ("groups", "nodes", "replicas"), [(1, 1, 1), (1, 2, 1), (1, 3, 2), (2, 2, 1), (2, 2, 2)]
)
def test_after_training_ended(
    place: Callable[..., ConsolidatePlace], groups: int, nodes: int, replicas: int
) -> None:
    """The last iteration is available at once, and repeatedly."""
    here = place(groups=groups, nodes=nodes, replicas=replicas, ranks=2)
    here.iterate(3)
    for _ in range(2):
        snapshot = here.read(timeout=5)
        assert (snapshot.iteration, snapshot.run, snapshot.generation) == (2, RUN, 1)
        here.check(checkpoint(snapshot), 2)
    here.iterate()
    here.check(checkpoint(here.read()), 3)
    assert [node.node.state.reserved for node in here.world.nodes.values()] == [{}] * nodes


@pytest.mark.parametrize(("groups", "replicas"), [(1, 1), (2, 2)])
def test_while_training_goes_on(place: Callable[..., ConsolidatePlace], groups: int, replicas: int) -> None:
    """All shards and stages are read at the newest iteration, without delaying training."""
    here = place(groups=groups, nodes=2, replicas=replicas, ranks=2)
    here.iterate()
    with here.going_on():
        iterations = []
        for _ in range(5):
            before = here.trainings[0].iteration
            snapshot = here.read()
            assert snapshot.iteration >= before - 1
            here.check(checkpoint(snapshot), snapshot.iteration)
            iterations.append(snapshot.iteration)
        assert here.read(at_least=iterations[-1] + 5).iteration >= iterations[-1] + 5
    assert iterations == sorted(iterations)
    wait_until(lambda: not any(n.node.state.reserved for n in here.world.nodes.values()), "released")


def test_from_fenced_nodes(place: Callable[..., ConsolidatePlace]) -> None:
    """Between a crash and the restart's first iteration."""
    here = place(nodes=2, ranks=2)
    here.iterate(2)
    training = here.trainings[0]
    for node in here.world.nodes:
        training.stubs[node].Fence(pb.FenceRequest(protocol=PROTOCOL, job=here.job.job, timeout=2), timeout=5)
    for node in here.world.nodes:
        training.stubs[node].Settle(
            pb.SettleRequest(job=here.job.job, iteration=1, run=RUN, continues=START), timeout=5
        )
    here.check(checkpoint(here.read()), 1)


def test_with_a_holder_gone(place: Callable[..., ConsolidatePlace]) -> None:
    here = place(nodes=2, replicas=2, ranks=2)
    here.iterate()
    here.world.stop(1)
    here.check(checkpoint(here.read()), 0)


def test_what_is_missing_is_named(place: Callable[..., ConsolidatePlace]) -> None:
    here = place(nodes=2, ranks=2)
    here.iterate()
    here.world.stop(1)
    address = here.job.node(1).mgmt
    with pytest.raises(Missing) as excinfo:
        here.read(timeout=1)
    words = str(excinfo.value)
    assert words.startswith("no iteration is complete within 1 s: shard 1 of DP group 0: shadow node 1 (")
    assert f"({address}): can't be reached" in words
    assert "ipv4:" not in words
    assert "shard 0" not in words


def test_what_speaks_no_shadow_protocol_is_no_shadow_node(place: Callable[..., ConsolidatePlace]) -> None:
    """Another gRPC server at the address of one node, and the other node away: no node answers."""
    here = place(nodes=2, ranks=2)
    for node in (0, 1):
        here.world.stop(node)
    server = grpc.server(ThreadPoolExecutor(1))
    assert server.add_insecure_port(here.job.node(0).mgmt)
    server.start()
    try:
        with pytest.raises(Unreachable, match=r"no shadow node .* can be reached .*a service other"):
            here.read(timeout=1)
    finally:
        server.stop(0).wait()


def fetched(shard: int, buffers: list[str], expected: list[str]) -> ShardState:
    layout = make_layout([Parameter("w", (4,), "float32")], 2, 100)
    record = pb.IterationRecord(parts=[pb.RecordPart()], buffers=dict.fromkeys(buffers, b"data"))
    header = pb.SeedHeader(
        shard=pb.Shard(shard=shard), layout=layout.to_json(), record=record, buffers=expected
    )
    return ShardState(header, layout, {})


def test_buffers_of_all_nodes_are_taken_together_and_none_is_left_out() -> None:
    """A node that joined late has only some."""
    expected = ["frozen", "mean"]
    combined = combine_shards(0, [fetched(0, ["mean"], expected), fetched(1, ["frozen"], expected)])
    assert set(combined.record.buffers) == {"mean", "frozen"}
    with pytest.raises(Lacking, match="have not arrived yet: frozen$"):
        combine_shards(0, [fetched(0, ["mean"], expected), fetched(1, [], expected)])


def test_shards_of_two_models_are_not_put_together() -> None:
    first, second = fetched(0, [], []), fetched(1, [], [])
    second.header.layout = make_layout([Parameter("v", (4,), "float32")], 2, 100).to_json()
    with pytest.raises(Lacking, match="shard 1 of DP group 0 has another model") as excinfo:
        combine_shards(0, [first, second])
    assert excinfo.value.wrong == {(0, 1)}


def test_nodes_that_have_forgotten_everything(place: Callable[..., ConsolidatePlace]) -> None:
    here = place(nodes=2, ranks=2)
    here.iterate()
    for node in list(here.world.nodes):
        here.world.stop(node)
        here.world.start(node)
    with pytest.raises(Missing, match="shard 0 of DP group 0: shadow node 0 .*: holds nothing; shard 1 of"):
        here.read(timeout=1)


def test_a_job_file_with_other_ranks_is_refused(place: Callable[..., ConsolidatePlace]) -> None:
    """It would give random generators to other ranks than they are of."""
    here = place(nodes=1, ranks=2)
    here.iterate()
    first, second = (rank.rank for rank in here.job.dp_groups[0].ranks)
    ranks = [
        replace(rank, rank=number)
        for rank, number in zip(here.job.dp_groups[0].ranks, (second, first), strict=True)
    ]
    group = replace(here.job.dp_groups[0], ranks=tuple(ranks))
    changed_job = replace(here.job, dp_groups=(group,))
    words = "with ranks 0, 1, but the job now has it with ranks 1, 0: specify"
    with SnapshotReader(changed_job) as nodes, pytest.raises(Missing, match=words):
        nodes.read(5)


class Liar(rpc.ShadowServicer):
    """A server in a node's place that changes the answers of another holder of the same shards."""

    def __init__(self, truth: rpc.ShadowStub, node: int, change: Callable[[list[pb.Seeds]], object]) -> None:
        self._truth, self._node, self._change = truth, node, change
        self.requests = 0

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        status = self._truth.Status(request)
        status.node = self._node
        return status

    def Reserve(self, request: pb.ReserveRequest, context: grpc.ServicerContext) -> pb.ReserveReply:
        return self._truth.Reserve(request)

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        return self._truth.Release(request)

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.Seeds]:
        self.requests += 1
        messages = list(self._truth.Fetch(request))
        self._change(messages)
        yield from messages


def spoil_header(messages: list[pb.Seeds], **changes: Any) -> None:
    """Replace the header, with a correct checksum."""
    header = messages[0].header
    for name, value in changes.items():
        if name == "shard":
            header.shard.shard = value
        elif name == "record":
            del header.record.parts[:value]
        else:
            setattr(header, name, value)
    checksum = state.Checksum(header)
    for message in messages[1:-1]:
        checksum.add(message.piece, message.piece.tensor.data)
    messages[-1].checksum = checksum.digest()


def flip(messages: list[pb.Seeds]) -> None:
    data = bytearray(messages[3].piece.tensor.data)
    data[0] ^= 1
    messages[3].piece.tensor.data = bytes(data)


LIES: dict[str, Callable[[list[pb.Seeds]], object]] = {
    "another job": lambda m: spoil_header(m, job="other"),
    "another run": lambda m: spoil_header(m, run="second"),
    "another incarnation": lambda m: spoil_header(m, incarnation=1),
    "another iteration": lambda m: spoil_header(m, iteration=0),
    "another shard": lambda m: spoil_header(m, shard=7),
    "half a record": lambda m: spoil_header(m, record=1),
    "damaged": flip,
    "cut short": lambda m: m.pop(),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_the_shard_is_never_mixed_in(place: Callable[..., ConsolidatePlace], lie: str) -> None:
    """It is read from the other holder; without one, it is missing, and the message has the reason."""
    here = place(nodes=2, replicas=2, ranks=2)
    here.iterate(2)
    here.world.stop(1)
    truth = here.trainings[0].stubs[0]
    liar = Liar(truth, 1, LIES[lie])  # type: ignore[abstract]
    server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
    rpc.add_ShadowServicer_to_server(liar, server)
    assert server.add_insecure_port(here.job.node(1).mgmt)
    server.start()
    try:
        here.check(checkpoint(here.read()), 1)
        assert liar.requests
        away = replace(here.job.node(0), mgmt="127.0.0.1:1")
        alone = replace(here.job, shadow_nodes=(away, here.job.node(1)))
        once = threading.Event()
        once.set()
        with (
            SnapshotReader(alone, stopped=once) as nodes,
            pytest.raises(Missing, match="shard 1 of DP group 0: shadow node 1") as excinfo,
        ):
            nodes.read(20)
        assert isinstance(excinfo.value.__cause__, Lacking)
        assert excinfo.value.__cause__.wrong == {(0, 0), (0, 1)}
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("kind", ["dcp", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_command_writes_a_checkpoint(
    place: Callable[..., ConsolidatePlace], kind: str, tmp_path: Path
) -> None:
    here = place(groups=2, nodes=2, ranks=2)
    here.iterate(2)
    out = tmp_path / "checkpoint"
    with half_way(out, "torch", tmp_path) as killed:
        killed.kill()
    assert hidden(tmp_path)
    argv = [*COMMAND, "consolidate", str(here.file(tmp_path)), "--out", str(out), "--format", kind]
    result = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False)
    assert (result.returncode, without_warning(result.stderr)) == (0, "")
    check_document("consolidate", report := json.loads(result.stdout))
    assert (report["iteration"], report["shards"], report["path"]) == (1, 4, str(out))
    here.check(disk.load(out), 1)
    assert hidden(tmp_path) == []
    again = subprocess.run(argv, capture_output=True, text=True, check=False)
    if kind == "dcp":
        assert again.returncode == 2
        assert "is an existing folder" in again.stderr.replace("\n", " ")
    else:
        assert again.returncode == 0
        assert "iteration 1 of job demo, 4 shards" in again.stdout
    long = subprocess.run([*argv[:-3], "x" * 300], capture_output=True, text=True, check=False)
    assert long.returncode == 2
    assert "can't be written: File name too long" in long.stderr.replace("\n", " ")
    for node in list(here.world.nodes):
        here.world.stop(node)
    failing = [*argv[:-3], str(tmp_path / "other"), *argv[-2:], "--timeout", "1"]
    result = subprocess.run([*failing, "--json"], capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert json.loads(result.stdout)["exit"] == 3
    assert "no shadow node of job demo can be reached within 1 s" in result.stderr
    assert "a lab's shadow nodes can be reached from its controller namespace only" in result.stderr
    assert "shard 1 of DP group 1" in result.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_the_command_keeps_the_last_few(
    place: Callable[..., ConsolidatePlace], kind: str, tmp_path: Path
) -> None:
    """During training, until it is stopped."""
    here = place(nodes=2, ranks=2)
    folder = tmp_path / "kept"
    argv = [*COMMAND, "consolidate", str(here.file(tmp_path)), "--out", str(folder)]
    argv += ["--format", kind, "--every", "5", "--keep", "2", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            with here.going_on():
                reports = [json.loads(process.stdout.readline()) for _ in range(4)]
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 0
    reports += [json.loads(line) for line in rest.splitlines()]
    iterations = [report["iteration"] for report in reports]
    assert iterations == sorted(set(iterations))
    assert all((b + 1) // 5 > (a + 1) // 5 for a, b in itertools.pairwise(iterations))
    kept_paths = kept_in(folder)
    assert [path.name.removesuffix(".pt") for path in kept_paths] == [
        f"generation-0001-iteration-{i:08}" for i in iterations[:-3:-1]
    ]
    for path, iteration in zip(kept_paths, reversed(iterations), strict=False):
        here.check(disk.load(path), iteration)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in kept_paths)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_sharded_job_is_followed_with_whole_tensors(
    place: Callable[..., ConsolidatePlace], kind: disk.Format, tmp_path: Path
) -> None:
    here = place(groups=2, nodes=2, ranks=2, sharded=True)
    stopped, paths, troubles = threading.Event(), list[Path](), list[str]()

    with (
        here.going_on(),
        SnapshotReader(here.job, stopped=stopped) as nodes,
        ThreadPoolExecutor(1) as pool,
    ):
        following = pool.submit(
            follow,
            *(nodes, tmp_path, kind, 10.0, 5, 2, stopped),
            FollowListener(
                lambda checkpoint: paths.append(checkpoint.path),
                troubles.append,
                troubles.append,
            ),
        )
        try:
            wait_until(lambda: len(paths) >= 4, "four checkpoints", 60)
        finally:
            stopped.set()
            following.result()
    assert troubles == []
    kept_paths = kept_in(tmp_path)
    assert kept_paths == paths[:-3:-1]
    for path in kept_paths:
        here.check(disk.load(path), int(path.name.removesuffix(".pt")[-8:]))


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_full_disk_in_the_background(
    place: Callable[..., ConsolidatePlace], kind: disk.Format, small_disk: Path
) -> None:
    """It reports each checkpoint that doesn't fit, leaves existing ones intact, and continues later."""
    here = place(nodes=2, ranks=2)
    here.iterate(2)
    stopped, iterations, troubles = threading.Event(), list[int](), list[str]()
    with SnapshotReader(here.job, stopped=stopped) as nodes, ThreadPoolExecutor(1) as pool:
        following = pool.submit(
            follow,
            *(nodes, small_disk, kind, 10.0, 1, 5, stopped),
            FollowListener(
                lambda checkpoint: iterations.append(checkpoint.iteration),
                troubles.append,
                troubles.append,
            ),
        )
        try:
            wait_until(lambda: iterations == [1], "the first")
            filler = small_disk / "filler"
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
            filler.write_bytes(bytes(free - 4096))
            here.iterate()
            wait_until(lambda: len(troubles) == 1, "the trouble")
            here.iterate()
            wait_until(lambda: len(troubles) == 2, "the next trouble")
            filler.unlink()
            here.iterate()
            wait_until(lambda: iterations == [1, 4], "the last")
        finally:
            stopped.set()
            following.result()
    assert all("No space left on device" in trouble for trouble in troubles)
    assert [path.name for path in kept_in(small_disk)] == [
        checkpoint_folder.checkpoint_path(small_disk, 1, iteration, kind).name for iteration in (4, 1)
    ]
    here.check(disk.load(checkpoint_folder.checkpoint_path(small_disk, 1, 1, kind)), 1)
    here.check(disk.load(checkpoint_folder.checkpoint_path(small_disk, 1, 4, kind)), 4)


def test_the_last_iteration_of_all_is_kept_whenever_it_comes(
    place: Callable[..., ConsolidatePlace], tmp_path: Path
) -> None:
    """Once only, even if following begins after training has ended."""
    here = place(nodes=2, ranks=2)
    here.iterate(6)
    for _ in range(2):
        stopped, iterations = threading.Event(), list[int]()
        with SnapshotReader(here.job, stopped=stopped) as nodes, ThreadPoolExecutor(1) as pool:
            following = pool.submit(
                follow,
                *(nodes, tmp_path, "torch", 10.0, 4, 5, stopped),
                FollowListener(
                    lambda checkpoint, iterations=iterations: iterations.append(checkpoint.iteration),  # type: ignore[misc]
                    lambda trouble: None,
                    lambda seconds_left: None,
                ),
            )
            try:
                if here.trainings[0].iteration == 5:
                    for training in here.trainings:
                        training.last = True
                    here.iterate()
                wait_until(lambda: iterations == [6], "the last", 20)  # noqa: B023
                time.sleep(1.0)
            finally:
                stopped.set()
                following.result()
        assert iterations == [6]
    here.check(disk.load(checkpoint_folder.checkpoint_path(tmp_path, 1, 6, "torch")), 6)


@given(st.integers(-1, 1000), st.integers(1, 50))
def test_when_one_is_due(iteration: int, interval: int) -> None:
    next_iteration = next_due(iteration, interval)
    assert next_iteration >= max(iteration, 0)
    assert (next_iteration + 1) % interval == 0
    assert next_iteration - max(iteration, 0) < interval
