"""Shadow nodes as services: refused calls."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from checkmate import state
from checkmate.job import host_copies
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.nodes.other_ranks import job_ranks
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import SUPERSEDED, open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.logic import starts
from checkmate.shadow.process import Serving
from checkmate.shadow.receive.connect import StreamError
from checkmate.shadow.receive.part_listener import MOST_BUFFER
from checkmate.shadow.service import ServeError, records_listener
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.tree import TreeSlicing
from testbed.copies import Copies, local_job
from testbed.ports import free_port
from testbed.record_line import RecordLine
from testbed.small_training import RUN, SHAPES, START, SmallTraining, status
from tests.support.labs.end_hosts import needs_buffers

pytestmark = needs_buffers


def test_an_address_that_is_taken_or_foreign_is_explained() -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), pytest.raises(ServeError, match=r"127\.0\.3\.1:\d+, the mgmt address.* is in use"):
        Serving(job, 0)


@contextmanager
def expect_refusal(code: grpc.StatusCode, message: str = "") -> Iterator[None]:
    """Expect a call to end with this status and message."""
    with pytest.raises(grpc.RpcError) as info:
        yield
    assert isinstance(info.value, grpc.Call)
    assert info.value.code() == code
    assert message in str(info.value.details())


def test_a_node_that_is_stopped_takes_records_into_its_kernel() -> None:
    """With copies by hosts, buffers are what any user may have, and not what the kernel begins with."""
    port = free_port()
    data = {
        "job": "mine",
        "copies": "host",
        "ranks": 2,
        "shadow_nodes": [{"id": 0, "mgmt": f"127.0.0.1:{port - 1}", "records": f"127.0.0.1:{port}"}],
    }
    job, _ = host_copies.read(data)
    assert job is not None
    with records_listener(job, 0, None) as listener, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = listener.accept()
        most = int(Path("/proc/sys/net/core/rmem_max").read_text())
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == min(MOST_BUFFER, 2 * most)


def test_a_nic_that_is_not_this_machines_is_named() -> None:
    data = data_of(local_job(nodes=1), exclude_none=True)
    data["shadow_nodes"][0]["nics"][1]["ip"] = "192.0.2.7"
    with pytest.raises(StreamError, match=r"192\.0\.2\.7 is not an address of this machine"):
        Serving(of_data(Job, data), 0)


WEIGHT = Parameter("w", (4,), "float32")


def request_of(of: Job, **changes: Any) -> pb.BeginRequest:
    layout = make_layout([WEIGHT], of.shards(0))
    spec = pb.OptimizerSpec(name="torch.optim.SGD")
    spec.groups.add(parameters=[0], options='{"lr": 0.1}')
    fields = {
        "job": of.job,
        "protocol": PROTOCOL,
        "start": START,
        "continues": START,
        "ranks": len(of.dp_groups[0].ranks),
        "job_ranks": job_ranks(of),
        "layout": layout.to_json(),
        "optimizer": spec,
        **changes,
    }
    return pb.BeginRequest(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "another"}, "job another: this node belongs to job demo"),
        ({"group": 1}, "no DP group 1: job demo has 1"),
        ({"ranks": 7}, "7 ranks: DP group 0 of job demo has 3"),
        ({"incarnation": 256}, "a number from 0 to 255"),
        ({"first_iteration": 2, "next_iteration": 1}, "nor the next below the first"),
        ({"layout": "{}"}, "not a layout"),
        (
            {"layout": make_layout([WEIGHT], 5).to_json()},
            "a layout of 5 shards: DP group 0 of job demo has 1",
        ),
        (
            {"layout": make_layout([WEIGHT], 1, slicing=TreeSlicing()).to_json()},
            "a layout with trees: here, DP group 0 of job demo has none",
        ),
        ({"optimizer": pb.OptimizerSpec(name="torch.optim.LBFGS")}, "unsupported optimizer"),
        (
            {"layout": make_layout([WEIGHT, Parameter("w", (9,), "uint8", state="codes")], 1).to_json()},
            "the layout has optimizer state, which an optimizer that is repeated has itself",
        ),
        (
            {
                "layout": make_layout(
                    [WEIGHT, Parameter("w", (9,), "uint8", state="codes", owner=(3,))], 1
                ).to_json(),
                "optimizer": pb.OptimizerSpec(name="any", copied=True),
            },
            "state of the rank at position 3: the DP group has 3",
        ),
        (
            {"optimizer": pb.OptimizerSpec(name="x" * 5000, copied=True)},
            "an optimizer's name has 5000 characters",
        ),
    ],
)
def test_a_begin_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        with expect_refusal(grpc.StatusCode.INVALID_ARGUMENT, message):
            ShadowStub(channel).Begin(request_of(job, **changes), timeout=5)
        assert not status(job, 0).holds


def said_of(job: Job, part: pb.RecordPart) -> pb.RecordReply:
    """Send a part on a new connection. Return the reply of node 0, which closes it if it refuses."""
    line = RecordLine(job, 0)
    try:
        reply = line.answer(part)
        if reply.refused:
            assert line.closed.wait(5)
        return reply
    finally:
        line.close()


def test_calls_that_come_too_early_are_refused_and_changes_nothing() -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        calls: list[Callable[[], object]] = [
            lambda: list(stub.Fetch(pb.FetchRequest(job=job.job), timeout=5)),
            lambda: stub.Seed(iter([pb.Seeds(header=pb.SeedHeader(job=job.job))]), timeout=5),
        ]
        for call in calls:
            with expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, "has not begun"):
                call()
        assert "has not begun" in said_of(job, pb.RecordPart(job=job.job)).refused
        stub.Begin(request_of(job), timeout=5)
        with pytest.raises(grpc.RpcError, match="the node is not fenced: call Fence first"):
            stub.Settle(pb.SettleRequest(job=job.job), timeout=5)
        assert not stub.Reserve(pb.ReserveRequest(job=job.job, iteration=5, seconds=1), timeout=5).granted
        stub.Release(pb.ReleaseRequest(job=job.job, iteration=5), timeout=5)


def test_seeds_and_records_of_another_run_are_refused() -> None:
    """An incarnation wraps after 256 starts: data from then belongs to another run, and is refused."""
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        stub.Begin(request_of(job, incarnation=7, run="now"), timeout=5)
        for run in ("then", ""):
            header = pb.SeedHeader(
                job=job.job, incarnation=7, run=run, start=START, shard=pb.Shard(), iteration=-1
            )
            part = pb.RecordPart(job=job.job, incarnation=7, run=run, start=START, iteration=0)
            words = f"run {run or '(unnamed)'}: DP group 0 is in run now here"
            with expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, words):
                stub.Seed(state.to_seeds(header, ()), timeout=5)
            assert words in said_of(job, part).refused
            part.run = header.run = "now"
            assert (said_of(job, part).iteration, said_of(job, part).refused) == (0, "")
            assert not stub.Seed(state.to_seeds(header, ()), timeout=5).again


def test_seeds_and_records_of_another_start_are_refused() -> None:
    """A run continues over restarts: after 256 of them both its name and the incarnation are the same."""
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        stub.Begin(request_of(job, incarnation=7, run="one", start=START), timeout=5)
        header = pb.SeedHeader(job=job.job, incarnation=7, run="one", shard=pb.Shard(), iteration=-1)
        part = pb.RecordPart(job=job.job, incarnation=7, run="one", iteration=0)
        for part.start, why in (
            (b"the other start.", "another start of training"),
            (b"", "another start of training"),
        ):
            header.start = part.start
            with expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, why):
                stub.Seed(state.to_seeds(header, ()), timeout=5)
            assert why in said_of(job, part).refused
        assert not status(job, 0).holds[0].seeded
        part.start = header.start = START
        assert (said_of(job, part).iteration, said_of(job, part).refused) == (0, "")
        assert not stub.Seed(state.to_seeds(header, ()), timeout=5).again


def test_what_ranks_say_of_themselves_is_in_the_status() -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        ShadowStub(channel).Begin(request_of(job, incarnation=7, run="one", start=START), timeout=5)
        part = pb.RecordPart(job=job.job, incarnation=7, run="one", start=START, iteration=0)
        for part.position, trained, seconds in ((0, 3, 0.5), (1, 4, 0.25)):
            part.progress.CopyFrom(pb.RankProgress(trained=trained, waited_seconds=seconds))
            assert said_of(job, part).refused == ""
        now = status(job, 0)
        assert (now.waited_seconds, {hold.trained for hold in now.holds}) == (0.5, {4})
        assert {hold.lag_seconds for hold in now.holds} == {0}, "it joins"
        for trained, seconds in ((1 << 62, 0.0), (2, math.nan), (2, -1.0)):
            part.progress.CopyFrom(pb.RankProgress(trained=trained, waited_seconds=seconds))
            assert said_of(job, part).refused
        part.ClearField("progress")
        assert said_of(job, part).refused == ""
        assert status(job, 0).waited_seconds == 0.5


def test_trainers_with_other_software_are_warned() -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        request = request_of(job, torch="1.0", capability="ABACUS", device="cuda")
        warnings = stub.Begin(request, timeout=5).warnings
        assert len(warnings) == 3
        assert f"trainers have torch 1.0, this node {torch.__version__}" in warnings[0]
        assert "ABACUS" in warnings[1]
        assert "GPU" in warnings[2]


def test_seeds_with_a_wrong_checksum_are_refused_and_nothing_of_them_is_taken() -> None:
    job = local_job(nodes=1)
    with ExitStack() as stack:
        stack.enter_context(Serving(job, 0))
        copies = Copies(job)
        stack.callback(copies.close)
        training = SmallTraining(job, copies)
        stack.callback(training.close)
        training.begin([0])
        header = pb.SeedHeader(
            job=job.job, run=RUN, start=START, iteration=-1, parameters=[0], shard=pb.Shard()
        )
        piece = pb.ParameterPiece(
            parameter=0, tensor=pb.TensorPiece(dtype="float32", shape=SHAPES[0], data=bytes(64 * 32 * 4))
        )
        wrong = [pb.Seeds(header=header), pb.Seeds(piece=piece), pb.Seeds(checksum=b"no")]
        with pytest.raises(grpc.RpcError, match="wrong checksum"):
            training.stubs[0].Seed(iter(wrong), timeout=5)
        assert status(job, 0).holds_nothing


def refusal_of(of: Job, start: bytes = START, **more: Any) -> pb.RefusedRequest:
    return pb.RefusedRequest(
        job=of.job, protocol=PROTOCOL, start=start, iteration=12, rank="rank 0 (a)", text="no", **more
    )


def test_why_a_script_was_refused_is_kept_until_another_start_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        with expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, "has not begun here"):
            stub.Refused(refusal_of(job), timeout=5)
        stub.Begin(request_of(job, incarnation=3, generation=2), timeout=5)
        assert not status(job, 0).HasField("refusal")
        with expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, "has not begun here"):
            stub.Refused(refusal_of(job, b"the other start."), timeout=5)
        caplog.set_level(logging.WARNING)
        stub.Refused(refusal_of(job), timeout=5)
        later = refusal_of(job)
        later.rank, later.text = "rank 1", "the ring broke"
        stub.Refused(later, timeout=5)
        assert caplog.messages == ["training was refused in iteration 12 on rank 0 (a): no"]
        refusal = pb.Refusal(
            generation=2, incarnation=3, start=START, iteration=12, rank="rank 0 (a)", text="no"
        )
        fence = pb.FenceRequest(job=job.job, protocol=PROTOCOL, timeout=1, drain=True)
        assert status(job, 0).refusal == stub.Fence(fence, timeout=5).refusal == refusal
        stub.Begin(request_of(job, incarnation=4, start=b"the other start."), timeout=5)
        assert not status(job, 0).HasField("refusal")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": "another"}, "job another: this node belongs to job demo"),
        ({"protocol": 1}, "the caller has an older version"),
        ({"start": b"short"}, "start has 5 bytes"),
        ({"iteration": -2}, "iteration -2"),
        ({"rank": 300 * "r"}, "rank has 300 characters"),
        ({"text": 5000 * "t"}, "text has 5000 characters"),
    ],
)
def test_a_refusal_beyond_its_bounds_is_not_kept(changes: dict[str, Any], words: str) -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        stub.Begin(request_of(job), timeout=5)
        request = refusal_of(job)
        for name, value in changes.items():
            setattr(request, name, value)
        with pytest.raises(grpc.RpcError, match=words):
            stub.Refused(request, timeout=5)
        assert not status(job, 0).HasField("refusal")


def test_two_starts_that_run_at_the_same_time_are_told_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The older one hears it as soon as it is fenced, the newer one once the other has gone on for long."""
    monkeypatch.setattr(starts, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(starts, "APART_SECONDS", 0.1)
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel, ExitStack() as stack:
        stub = ShadowStub(channel)
        first = {"incarnation": 3, "run": "one", "start": START}
        second = {"incarnation": 4, "run": "one", "start": b"the other start."}
        older, newer = RecordLine(job, 0), RecordLine(job, 0)
        stack.callback(older.close)
        stack.callback(newer.close)

        def reply_to(line: RecordLine, start: dict[str, Any], iteration: int) -> pb.RecordReply:
            return line.answer(pb.RecordPart(job=job.job, iteration=iteration, **start))

        stub.Begin(request_of(job, **first), timeout=5)
        drain = pb.FenceRequest(job=job.job, protocol=PROTOCOL, timeout=1, drain=True)
        stub.Fence(drain, timeout=5)
        assert not reply_to(older, first, 0).superseded, "a restart that only drains may end there"
        stub.Fence(pb.FenceRequest(job=job.job, protocol=PROTOCOL, timeout=1), timeout=5)
        reply = reply_to(older, first, 1)
        assert (reply.superseded, reply.by, reply.iteration) == (True, "127.0.0.1", 1)
        with expect_refusal(SUPERSEDED, "incarnation 3 is fenced: start training in a new one"):
            stub.Begin(request_of(job, **first), timeout=5)
        stub.Begin(request_of(job, **second), timeout=5)
        assert reply_to(older, first, 2).superseded
        assert not reply_to(newer, second, 0).also_training, "the older one may be dying"
        for iteration in range(3, 8):
            time.sleep(0.2)
            assert (reply_to(older, first, iteration).superseded, older.refusal) == (True, "")
        reply = reply_to(newer, second, 1)
        assert (reply.superseded, list(reply.also_training)) == (False, ["127.0.0.1"])
        (trouble,) = status(job, 0).trouble
        assert trouble.startswith("an older start of this job still trains: its step records come from 127.0")
        assert not reply_to(newer, {**second, "position": 1}, 2).also_training, "only the first rank reports"


def test_a_start_that_was_replaced_cannot_take_the_node_back() -> None:
    """It was not fenced, because the node was away then."""
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        stub.Begin(request_of(job, incarnation=3), timeout=5)
        stub.Begin(request_of(job, incarnation=4, start=b"the other start."), timeout=5)
        with expect_refusal(SUPERSEDED):
            stub.Begin(request_of(job, incarnation=3), timeout=5)
        assert status(job, 0).incarnation == 4
