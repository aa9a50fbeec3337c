"""A node whose job file has other ranks now: what it holds of the former ones stays until nobody needs it."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import yaml

from checkmate.job.files import read_job
from checkmate.job.partial import replicas_there, with_replicas
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import (
    OtherRanks,
    difference,
    held_states,
    job_of,
    job_ranks,
    other_files,
    ranks_digest,
)
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.calls.begin import node_status
from checkmate.shadow.former_state import FormerChunk, FormerState
from checkmate.shadow.own_file import OwnJobFile
from checkmate.shadow.process import Serving
from checkmate.shadow.receive.part_listener import LEAST_BUFFER
from checkmate.shadow.replica.replica import Replica
from checkmate.shadow.service import Workers
from checkmate.state import SeedReader
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from testbed.ports import free_port
from testbed.small_training import RUN, START, SmallTraining
from tests.support.job_files import meshed, write
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, fence, settle
from tests.support.waiting import wait_until

LAST = 2
"""The iteration at which the former ranks were stopped."""


@pytest.fixture
def here() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, ranks=3, nodes=2)


def with_ranks(job: Job, ranks: int) -> Job:
    """Return the job with fewer ranks in its DP group."""
    (group,) = job.dp_groups
    return replace(job, dp_groups=(replace(group, ranks=group.ranks[:ranks]),))


def stopped(here: World) -> SmallTraining:
    """Return a training that a restart has ended at `LAST`."""
    training = here.started()
    for _ in range(LAST + 1):
        training.iterate()
    here.stepped(LAST)
    fence(here, training)
    settle(here, training, LAST)
    return training


def fetch(training: SmallTraining, node: int, digest: bytes) -> pb.SeedHeader:
    """Return the header of what a node serves of its first shard and these ranks."""
    request = pb.FetchRequest(
        job=training.job.job, shard=pb.Shard(shard=node), iteration=LAST, ranks_digest=digest
    )
    stream = training.stubs[node].Fetch(request, timeout=5)
    reader = SeedReader(stream)
    assert dict(reader.read_all(training.layout.parameters))
    return reader.header


def settle_at(training: SmallTraining, node: int, digest: bytes) -> pb.NodeStatus:
    request = pb.SettleRequest(
        job=training.job.job, iteration=LAST, run=RUN, continues=START, ranks_digest=digest
    )
    return training.stubs[node].Settle(request, timeout=5)


@needs_buffers
def test_the_state_of_former_ranks_is_served_and_not_lost(here: World) -> None:
    training = stopped(here)
    job, (former, present) = here.job, (ranks_digest(job_ranks(with_ranks(here.job, n))) for n in (3, 2))
    for serving in here.nodes.values():
        serving.node.take_up(with_ranks(job, 2))
    for node in here.nodes:
        status = here.status(node)
        assert not (status.holds or status.holds_nothing)
        assert [(hold.stepped, hold.seeded) for hold in status.former.holds] == [(LAST, True)]
        assert fetch(training, node, former).iteration == LAST
        for digest in (present, b"another"):
            with pytest.raises(grpc.RpcError, match="has not begun here"):
                fetch(training, node, digest)
    # A restart that ends half way: one of the nodes is asked for them again, the other has yet to be.
    assert settle_at(training, 0, former).former.holds
    # The file as it was: their state is the present one.
    here.nodes[0].node.take_up(job)
    assert [hold.stepped for hold in here.status(0).holds] == [LAST]
    assert not here.status(0).HasField("former")
    assert fetch(training, 0, b"").iteration == LAST
    # Nobody asks for them any more.
    assert not settle_at(training, 1, present).HasField("former")
    assert here.status(1).holds_nothing


@needs_buffers
def test_state_of_former_ranks_goes_once_all_shards_are_there(here: World) -> None:
    stopped(here)
    job = with_ranks(here.job, 2)
    for serving in here.nodes.values():
        serving.node.take_up(job)
    training = SmallTraining(job, here.copies)
    training.start = training.continues = b"of two ranks".ljust(16)
    training.incarnation, training.first = 1, LAST + 1
    training.iteration, training.states[LAST] = LAST, training.states[-1]
    training.begin([0])
    training.begin([1])
    training.seed(0, 0)
    wait_until(lambda: here.status(0).holds[0].live, "a live shard")
    assert all(here.status(node).HasField("former") for node in here.nodes)
    training.seed(1, 1)
    wait_until(lambda: here.status(1).holds[0].live, "both live shards")
    assert all(here.status(node).HasField("former") for node in here.nodes)  # with the record
    training.iterate()
    wait_until(
        lambda: not any(here.status(node).HasField("former") for node in here.nodes), "an end of former ranks"
    )
    assert not [resources for resources in here.nodes[0].node.resources.values() if resources.hold.settled]
    training.close()


@needs_buffers
def test_a_stage_takes_over_its_own_state_whatever_its_parameters_are_called() -> None:
    """Two pipeline stages on one node have the same names and shapes, and other values."""
    with ExitStack() as stack:
        here = World(stack, ranks=3, nodes=1, groups=2)
        trainings = [here.training(group=group, seed=group + 1) for group in range(2)]
        for training in trainings:
            training.begin([0])
            training.seed_all()
        here.ready()
        for _ in range(LAST + 1):
            for training in trainings:
                training.iterate()
        here.stepped(LAST)
        fence(here, trainings[0])
        settle(here, trainings[0], LAST)
        node = here.nodes[0].node
        groups = tuple(replace(group, ranks=group.ranks[:2]) for group in here.job.dp_groups)
        job = replace(here.job, dp_groups=groups)
        node.take_up(job)
        for group, before in enumerate(trainings):
            after = SmallTraining(job, here.copies, group=group)
            after.start, after.incarnation, after.first = b"of two ranks".ljust(16), 1, LAST + 1
            after.iteration = LAST
            request = after.begin_request(keep=True)
            request.former_groups.append(group)
            filled = after.stubs[0].Begin(request, timeout=10).filled
            assert [list(entry.parameters) for entry in filled] == [after.layout.of_shard(0)]
            hold = node.state.groups[group].hold(0)
            wait_until(lambda hold=hold: hold.seeded, "its former state")  # type: ignore[misc]
            for number, tensor, _ in node.resources[hold].replica.read(LAST, after.layout.of_shard(0)):
                assert torch.equal(tensor, before.states[LAST][number][0])
            stack.callback(after.close)


def test_what_nodes_hold_is_told_by_ranks(tmp_path: Path) -> None:
    """The newest start comes first, whichever ranks it is of; and a node that is gone is named."""
    file = write(tmp_path, meshed(shard=2))
    job = read_job(file)
    former = pb.JobRanks(
        groups=[
            pb.GroupRanks(
                ranks=[0, 1, 2], hosts=[""] * 3, shadow_nodes=[node.id for node in job.shadow_nodes]
            )
        ]
    )
    own = job_ranks(job)
    hold = pb.HoldStatus(seeded=True, stepped=4, in_full=4, incarnation=2)
    answers: dict[int, pb.NodeStatus | str] = {
        0: pb.NodeStatus(job_ranks=own, former=pb.FormerState(job_ranks=former, holds=[hold])),
        1: pb.NodeStatus(job_ranks=former, holds=[hold]),
        2: "away",
    }
    older, present = held_states(job, answers)
    assert (older.is_former, present.is_former) == (True, False)
    assert [getattr(answer, "holds", answer) for answer in older.answers.values()] == [[hold], [hold], "away"]
    assert [getattr(answer, "holds", answer) for answer in present.answers.values()] == [
        [],
        "holds nothing of these ranks",
        "away",
    ]
    assert [len(group.ranks) for group in older.job.dp_groups] == [3]
    newer = pb.HoldStatus(seeded=False, stepped=-1, incarnation=3)
    answers[0] = pb.NodeStatus(
        job_ranks=own, holds=[newer], former=pb.FormerState(job_ranks=former, holds=[hold])
    )
    assert [held.is_former for held in held_states(job, answers)] == [False, True]
    former.groups[0].shadow_nodes.append(99)
    with pytest.raises(
        OtherRanks, match="shadow node 99, which holds a part of the state, is not in the job"
    ):
        job_of(job, former)


@pytest.mark.parametrize("incarnations", [(3, 5, 7), (250, 2, 4)], ids=["in order", "wrapped"])
def test_of_several_former_ranks_the_newest_start_comes_first(
    incarnations: tuple[int, int, int], tmp_path: Path
) -> None:
    """All of one run: a node that was away has what the others had two restarts ago."""
    job = read_job(write(tmp_path, meshed(shard=2)))
    nodes = [node.id for node in job.shadow_nodes]
    tables = [
        pb.JobRanks(groups=[pb.GroupRanks(ranks=range(n), hosts=[""] * n, shadow_nodes=nodes)])
        for n in (5, 3)
    ]
    holds = [
        pb.HoldStatus(seeded=True, stepped=4, in_full=4, generation=1, incarnation=incarnation)
        for incarnation in incarnations
    ]
    answers: dict[int, pb.NodeStatus | str] = {
        number: pb.NodeStatus(job_ranks=ranks, holds=[status])
        for number, (ranks, status) in enumerate(zip([*tables, job_ranks(job)], holds, strict=True))
    }
    by_age = [
        [status.incarnation for answer in state.answers.values() for status in getattr(answer, "holds", ())]
        for state in held_states(job, answers)
    ]
    assert by_age == [[incarnation] for incarnation in reversed(incarnations)]


@pytest.mark.parametrize("nonsense", [{"hosts": []}, {"shadow_nodes": []}, {"mesh": {"pp": 2}}])
def test_ranks_that_no_job_has_are_refused(nonsense: dict[str, object], tmp_path: Path) -> None:
    job = read_job(write(tmp_path, meshed(shard=2)))
    ranks = job_ranks(job)
    for name, value in nonsense.items():
        ranks.ClearField("mesh")
        if name == "mesh":
            ranks.mesh.update({"pp": 2})
        else:
            ranks.groups[0].ClearField(name)  # type: ignore[arg-type]
        assert value is not None
    with pytest.raises(OtherRanks, match="that no job has"):
        job_of(job, ranks)


def test_a_job_file_is_read_again_if_it_was_changed(tmp_path: Path) -> None:
    data = {
        "job": "mine",
        "copies": "host",
        "ranks": 4,
        "shadow_nodes": [{"id": node, "mgmt": f"127.0.0.1:{7000 + 10 * node}"} for node in range(2)],
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    job = read_job(path)
    file = OwnJobFile(path, job, 1)
    assert file.next_ranks(job) == (None, "")

    def changed(**changes: object) -> tuple[pb.JobRanks | None, str]:
        path.write_text(yaml.safe_dump({**data, **changes}) + f"# {changes}\n")
        file.read_again()
        return file.next_ranks(job)

    ranks, why = changed(ranks=3)
    assert ranks is not None
    assert (len(ranks.groups[0].ranks), why) == (3, "")
    three = file.job_for(ranks)[0]
    assert three is not None
    assert three.rank_count == 3
    assert changed() == (None, "")
    assert file.job_for(ranks) == (None, "")
    nodes = [*data["shadow_nodes"], {"id": 2, "mgmt": "127.0.0.1:7100"}]  # type: ignore[misc]
    assert "in its job file, shadow_nodes changed, too" in changed(ranks=3, shadow_nodes=nodes)[1]
    assert "its job file was changed, and is refused: " in changed(ranks="three")[1]
    path.unlink()
    file.read_again()
    assert "its job file" in file.next_ranks(job)[1]


def test_other_holders_alone_are_a_change_that_a_node_follows(tmp_path: Path) -> None:
    """Of as many shards. A node that did not would lack what the file has it hold."""
    nodes = [{"id": node, "mgmt": f"127.0.0.1:{7000 + 10 * node}"} for node in range(2)]
    data = {"job": "mine", "copies": "host", "ranks": 4, "shadow_nodes": nodes}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    job = read_job(path)
    for changes, words in (
        ({"replicas": 2}, ("1 holder of each shard", "2 holders of each shard")),
        ({"shadow_nodes": nodes[::-1]}, ("DP group 0 on shadow nodes 0, 1", "it on shadow nodes 1, 0")),
    ):
        path.write_text(yaml.safe_dump(data))
        file = OwnJobFile(path, job, 1)
        path.write_text(yaml.safe_dump({**data, **changes}) + f"# {changes}\n")
        new = read_job(path)
        assert difference(job_ranks(job), job_ranks(new)) == words
        assert ranks_digest(job_ranks(job)) != ranks_digest(job_ranks(new))
        file.read_again()
        assert file.next_ranks(job) == (job_ranks(new), "")
        assert file.job_for(job_ranks(new)) == (new, "")
        assert file.job_for(job_ranks(job)) == (None, "")


@needs_buffers
def test_a_node_holds_what_a_file_with_other_holders_gives_it(here: World, tmp_path: Path) -> None:
    """What it has of that is filled, and what it has besides stays until all shards have their holders."""
    former = stopped(here)
    job = replace(here.job, replicas=2)
    path = tmp_path / "job.yaml"
    path.write_text("the old one")
    jobs = {"the old one": here.job, "the new one": job}
    node = here.nodes[0].node
    node.file = OwnJobFile(path, here.job, 0, lambda file: jobs[file.read_text()])
    path.write_text("the new one")
    training = SmallTraining(job, here.copies)
    training.start, training.incarnation, training.first = b"of two holders".ljust(16), 1, LAST + 1
    training.iteration = LAST
    request = training.begin_request(keep=True)
    request.former_groups.append(0)
    reply = training.stubs[0].Begin(request, timeout=10)
    assert [filled.shard for filled in reply.filled] == [0]
    status = here.status(0)
    assert [hold.shard.shard for hold in status.holds] == [0, 1]
    assert [hold.shard.shard for hold in status.former.holds] == [0]
    assert fetch(former, 0, ranks_digest(job_ranks(here.job))).iteration == LAST
    training.close()


@needs_buffers
def test_a_job_file_is_not_read_with_the_lock_of_the_node(here: World, tmp_path: Path) -> None:
    """Its disk may take seconds, in which nothing would step."""
    training = stopped(here)
    node, path = here.nodes[0].node, tmp_path / "job.yaml"
    path.write_text("the old one")
    is_free: list[bool] = []

    def read(_: Path) -> Job:
        thread = threading.Thread(target=node.touch)
        thread.start()
        thread.join(5)
        is_free.append(not thread.is_alive())
        return here.job

    node.file = OwnJobFile(path, here.job, 0, read)
    for drain in (True, False):
        path.write_text(f"changed, {drain}")
        request = pb.FenceRequest(job=here.job.job, protocol=PROTOCOL, timeout=1, drain=drain)
        training.stubs[0].Fence(request, timeout=20)
    assert is_free == [True, True]


def test_a_thread_does_not_miss_what_another_one_reads(tmp_path: Path) -> None:
    """Two DP groups begin at a time. Each finds the job that the file has now."""
    job = read_job(write(tmp_path, meshed(shard=2)))
    path = tmp_path / "own.yaml"
    path.write_text("the old one")
    is_reading, may_end = threading.Event(), threading.Event()
    new = replace(job, replicas=2)

    def read(_: Path) -> Job:
        is_reading.set()
        assert may_end.wait(20)
        return new

    file = OwnJobFile(path, job, 0, read)
    path.write_text("the new one")

    def found() -> Job | None:
        file.read_again()
        return file.job_for(job_ranks(new))[0]

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(found)]
        assert is_reading.wait(20)
        calls.append(pool.submit(found))
        time.sleep(0.05)
        may_end.set()
        assert [call.result(20) for call in calls] == [new, new]


def test_a_job_goes_on_with_as_few_replicas_as_it_may(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "job": "mine",
                "copies": "host",
                "mesh": {"dp_replicate": 4, "dp_shard": 2},
                "min_replicas": 2,
                "shadow_nodes": [{"id": 0, "mgmt": "127.0.0.1:7000"}],
            }
        )
    )
    job = read_job(path)
    file = OwnJobFile(path, job, 0)
    partial = with_replicas(job, (0, 2, 3))
    assert [[rank.rank for rank in group.ranks] for group in partial.dp_groups] == [[0, 2, 4], [1, 3, 5]]
    assert replicas_there(job, {0, 1, 2, 4, 5, 6, 7}) == (0, 2, 3)
    assert job_of(partial, job_ranks(partial)) == replace(
        partial, dp_groups=job_of(job, job_ranks(partial)).dp_groups
    )
    assert file.job_for(job_ranks(partial)) == (partial, "")
    assert file.next_ranks(partial) == (None, "")
    for nonsense in ((0,), (2, 0, 3), (0, 2, 9)):
        ranks = job_ranks(partial)
        ranks.present[:] = nonsense
        assert file.job_for(ranks) == (None, "")
    assert ranks_digest(job_ranks(partial)) != ranks_digest(job_ranks(with_replicas(job, (0, 1, 2))))


def test_a_node_with_an_old_file_is_named_also_if_fewer_replicas_may_train(tmp_path: Path) -> None:
    """One that follows fewer replicas of this file is none."""
    jobs = []
    for replicas in (3, 4):
        path = tmp_path / f"{replicas}.yaml"
        node = {"id": 0, "mgmt": "127.0.0.1:7000"}
        data = {"job": "mine", "copies": "host", "ranks": replicas, "min_replicas": 2, "shadow_nodes": [node]}
        path.write_text(yaml.safe_dump(data))
        jobs.append(read_job(path))
    old, job = jobs
    hold = pb.HoldStatus(seeded=True, stepped=4, in_full=4)
    answer = pb.NodeStatus(job_ranks=job_ranks(old), holds=[hold])
    assert "shadow node 0" in other_files(job, {0: answer})
    answer.job_ranks.CopyFrom(job_ranks(with_replicas(job, (0, 2))))
    assert not other_files(job, {0: answer})


@needs_buffers
def test_a_start_with_other_ranks_has_the_node_read_its_file(tmp_path: Path) -> None:
    """If the file has still the old ones, the node says so, and keeps what it has."""
    with ExitStack() as stack:
        here = World(stack, ranks=3, nodes=2)
        training = stopped(here)
        job = with_ranks(here.job, 2)
        path = tmp_path / "job.yaml"
        path.write_text("the old one")
        jobs = {"the old one": here.job, "the new one": job}
        for number, serving in here.nodes.items():
            serving.node.file = OwnJobFile(path, here.job, number, lambda file: jobs[file.read_text()])
        second = SmallTraining(job, here.copies)
        stack.callback(second.close)
        second.start, second.incarnation = b"of two ranks".ljust(16), 1
        with pytest.raises(grpc.RpcError, match="the trainers' job file has"):
            second.begin([0])
        assert fetch(training, 0, b"").iteration == LAST
        path.write_text("the new one")
        request = pb.FenceRequest(job=job.job, protocol=PROTOCOL, timeout=1)
        assert training.stubs[0].Fence(request, timeout=5).next_ranks == job_ranks(job)
        second.begin([0])
        status = node_status(here.nodes[0].node, job.job)
        assert status.former.job_ranks == job_ranks(here.job)
        assert [hold.streams for hold in status.holds] == [2]


@needs_buffers
def test_calls_of_one_start_take_up_its_ranks_once(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that begin between two of them stay."""
    stopped(here)
    job, node = with_ranks(here.job, 2), here.nodes[0].node
    times: list[float] = []
    waits: list[float] = []
    take_up, quiet = node.state.take_up, node.quiet

    def noted(timeout: float) -> bool:
        waits.append(timeout)
        return quiet(timeout)

    def counted(to_follow: Job, now: float) -> None:
        times.append(now)
        take_up(to_follow, now)

    monkeypatch.setattr(node.state, "take_up", counted)
    monkeypatch.setattr(node, "quiet", noted)
    with node.state_changed:
        node._stepping = True  # so that both wait for its end
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(node.take_up, job) for _ in range(2)]
        wait_until(lambda: len(waits) == 2, "both calls")
        with node.state_changed:
            node._stepping = False
            node.state_changed.notify_all()
        for call in calls:
            call.result(20)
    assert len(times) == 1
    training = SmallTraining(job, here.copies)
    training.start, training.incarnation, training.first = b"of two ranks".ljust(16), 1, LAST + 1
    training.iteration = LAST
    training.begin([0])
    node.take_up(job)
    assert [hold.streams for hold in here.status(0).holds] == [2]
    training.close()


@needs_buffers
def test_what_a_node_has_of_former_ranks_is_not_sent_again(here: World) -> None:
    former = stopped(here)
    job = with_ranks(here.job, 2)
    for serving in here.nodes.values():
        serving.node.take_up(job)
    training = SmallTraining(job, here.copies)
    training.start, training.continues = b"of two ranks".ljust(16), START
    training.incarnation, training.first, training.iteration = 1, LAST + 1, LAST
    training.states[LAST] = former.states[LAST]
    for node in here.nodes:
        request = training.begin_request(keep=True)
        request.former_groups.append(0)
        reply = training.stubs[node].Begin(request, timeout=10)
        assert [(filled.shard, sorted(filled.parameters)) for filled in reply.filled] == [
            (node, sorted(training.layout.of_shard(node)))
        ]
    wait_until(lambda: all(here.status(node).holds[0].seeded for node in here.nodes), "state")
    for node in here.nodes:
        read = here.resources(node).replica.read(LAST)
        for number, tensor, values in read:
            expected, entries = former.states[LAST][number]
            assert torch.equal(tensor, expected)
            assert all(
                torch.equal(torch.as_tensor(values[name]), torch.as_tensor(entries[name])) for name in entries
            )
    assert [serving.node.state.tally.seeds for serving in here.nodes.values()] == [1, 1]  # the first start's
    # Of another start's state, nothing is taken.
    training.start = b"another".ljust(16)
    training.continues = b"unknown".ljust(16)
    training.incarnation = 2
    assert not training.stubs[0].Begin(training.begin_request(keep=True), timeout=10).filled
    training.close()


def chunk(name: str, rows: slice, whole: tuple[int, int]) -> Parameter:
    shape = (rows.stop - rows.start, whole[1])
    return Parameter(name, shape, "float32", whole=whole, offset=(rows.start, 0))


def replica_of(parameters: list[Parameter], tensors: list[torch.Tensor]) -> tuple[Layout, Replica]:
    """Return a replica with AdamW's state after iteration 4, which is 1 and 2 more than the parameter."""
    layout = make_layout(parameters, 1)
    options = options_of(torch.optim.AdamW(tensors).param_groups[0])
    group = pb.ParamGroup(parameters=range(len(parameters)), options=options)
    spec = pb.OptimizerSpec(name="torch.optim.AdamW", groups=[group])
    replica = Replica(layout, 0, spec, exact=True)
    for number, tensor in enumerate(tensors):
        entries: dict[str, object] = {"step": torch.tensor(5.0)}
        entries |= {"exp_avg": tensor + 1, "exp_avg_sq": tensor + 2}
        replica.load(number, tensor.clone(), entries, 4)
    return layout, replica


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 3, 6)])
@pytest.mark.parametrize("rows", [slice(0, 6), slice(1, 5), slice(2, 3)])
def test_any_part_is_filled_from_chunks_that_contain_it(cuts: tuple[int, ...], rows: slice) -> None:
    whole = torch.arange(24.0).view(6, 4)
    chunks: dict[tuple[str, str], list[Any]] = {}
    for start, stop in itertools.pairwise(cuts):
        parameter = chunk("w", slice(start, stop), (6, 4))
        _, replica = replica_of([parameter], [whole[start:stop]])
        chunks.setdefault(("w", ""), []).append(FormerChunk(parameter, 0, replica))
    layout = make_layout([chunk("w", rows, (6, 4)), chunk("other", rows, (6, 4))], 1)
    former = FormerState(4, chunks)
    assert former.covered(layout, [0, 1]) == [0]
    (lot,) = former.fill(layout, [0])
    tensor, entries = lot[0]
    assert torch.equal(tensor.view(-1, 4), whole[rows])
    assert entries["step"] == 5.0
    for name, more in (("exp_avg", 1), ("exp_avg_sq", 2)):
        entry = entries[name]
        assert isinstance(entry, torch.Tensor)
        assert torch.equal(entry.view(-1, 4), whole[rows] + more)
    if len(cuts) > 2:
        missing = FormerState(4, {("w", ""): chunks["w", ""][1:]})
        assert missing.covered(layout, [0]) == ([0] if rows.start >= cuts[1] else [])


def test_workers_become_more_while_some_work() -> None:
    pool, may_end = Workers(1), threading.Event()
    running: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        may_end.wait(20)

    calls = [pool.submit(work, 0)]
    pool.grow(3)
    calls += [pool.submit(work, number) for number in range(1, 4)]
    wait_until(lambda: len(running) == 3, "three at a time")
    pool.grow(2)  # fewer ranks: those that there are go on
    assert pool.most == 3
    may_end.set()
    for call in calls:
        call.result(20)
    pool.shutdown()


def test_a_node_whose_job_grows_has_workers_and_buffers_for_all_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"id": 0, "mgmt": f"127.0.0.1:{free_port()}"}]
    nodes[0] |= {"records": f"127.0.0.1:{free_port()}", "gradients": f"127.0.0.1:{free_port()}"}

    def job(ranks: int) -> Job:
        path = tmp_path / f"{ranks}.yaml"
        data = {"job": "mine", "copies": "host", "ranks": ranks, "shadow_nodes": nodes}
        path.write_text(yaml.safe_dump(data))
        return read_job(path)

    with Serving(job(2), 0) as serving:
        server, listener = serving._server, serving._inbox._listener
        sizes = [server._pool.most, server._seeds.most]
        before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        serving.node.take_up(job(16))
        assert [server._pool.most, server._seeds.most] == [sizes[0] + 2 * 14, sizes[1] + 14]
        assert "start it again" not in caplog.text
        serving.node.take_up(job(4096))
        assert "the job has 4096 ranks now, and this node takes calls of 16 at most" in caplog.text
        assert before > listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == LEAST_BUFFER
