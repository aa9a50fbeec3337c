"""Shadow nodes as services: refused calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import torch

from checkmate import state
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.nodes.other_ranks import job_ranks
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.process import Serving
from checkmate.shadow.receive.connect import StreamError
from checkmate.shadow.service import ServeError
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.copies import Copies, local_job
from testbed.record_line import RecordLine
from testbed.small_training import RUN, SHAPES, START, SmallTraining, status
from tests.support.labs.end_hosts import needs_buffers

pytestmark = needs_buffers


def test_an_address_that_is_taken_or_foreign_is_explained() -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), pytest.raises(ServeError, match=r"127\.0\.3\.1:\d+, the mgmt address.* is in use"):
        Serving(job, 0)


@contextmanager
def refused(code: grpc.StatusCode, message: str = "") -> Iterator[None]:
    """Expect a call to end with this status and message."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() == code
    assert message in str(caught.value.details())


def test_a_nic_that_is_not_this_machines_is_named() -> None:
    data = data_of(local_job(nodes=1), exclude_none=True)
    data["shadow_nodes"][0]["nics"][1]["ip"] = "192.0.2.7"
    with pytest.raises(StreamError, match=r"192\.0\.2\.7 is not an address of this machine"):
        Serving(of_data(Job, data), 0)


def request_of(of: Job, **other: Any) -> pb.BeginRequest:
    layout = make_layout([Parameter("w", (4,), "float32")], of.shards(0))
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
        **other,
    }
    return pb.BeginRequest(**fields)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"job": "another"}, "job another: this node belongs to job demo"),
        ({"group": 1}, "no DP group 1: job demo has 1"),
        ({"ranks": 7}, "7 ranks: DP group 0 of job demo has 3"),
        ({"incarnation": 256}, "a number from 0 to 255"),
        ({"first_iteration": 2, "next_iteration": 1}, "nor the next below the first"),
        ({"layout": "{}"}, "not a layout"),
        (
            {"layout": make_layout([Parameter("w", (4,), "float32")], 5).to_json()},
            "a layout of 5 shards: DP group 0 of job demo has 1",
        ),
        ({"optimizer": pb.OptimizerSpec(name="torch.optim.LBFGS")}, "unsupported optimizer"),
    ],
)
def test_a_begin_that_does_not_fit_is_refused(other: dict[str, Any], message: str) -> None:
    job = local_job(nodes=1)
    with Serving(job, 0), open_channel(job, 0, None) as channel:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
            ShadowStub(channel).Begin(request_of(job, **other), timeout=5)
        assert not status(job, 0).holds


def said_of(job: Job, part: pb.RecordPart) -> pb.RecordReply:
    """Send a part on a new connection. Return the reply of node 0, which closes it if it refuses."""
    line = RecordLine(job, 0)
    try:
        reply = line.answer(part)
        if reply.refused:
            assert line.ended.wait(5)
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
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "has not begun"):
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
            named = f"run {run or '(unnamed)'}: DP group 0 is in run now here"
            with refused(grpc.StatusCode.FAILED_PRECONDITION, named):
                stub.Seed(state.to_seeds(header, ()), timeout=5)
            assert named in said_of(job, part).refused
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
            with refused(grpc.StatusCode.FAILED_PRECONDITION, why):
                stub.Seed(state.to_seeds(header, ()), timeout=5)
            assert why in said_of(job, part).refused
        assert not status(job, 0).holds[0].seeded
        part.start = header.start = START
        assert (said_of(job, part).iteration, said_of(job, part).refused) == (0, "")
        assert not stub.Seed(state.to_seeds(header, ()), timeout=5).again


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
