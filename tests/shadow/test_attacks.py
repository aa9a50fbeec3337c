"""Forged, corrupt and half-open calls to a shadow node: refused with a reason, while others are served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from checkmate.base import machine_memory
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import job_ranks
from checkmate.nodes.stubs import reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.frames import Unpacker
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow import memory
from checkmate.shadow.logic.bounds import MAX_RESERVATIONS
from checkmate.shadow.service import max_calls
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.record_line import RecordLine
from testbed.small_training import START, status
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, fence, settle
from tests.support.waiting import wait_until

pytestmark = needs_buffers
NAN = float("nan")
OTHER_RANKS = pb.JobRanks(groups=[pb.GroupRanks(ranks=[1, 0, 2])])


@pytest.fixture
def stub(job: Job) -> Iterator[ShadowStub]:
    with open_channel(job, 0, None) as channel:
        yield ShadowStub(channel)


def request_of(job: Job, **changes: Any) -> pb.BeginRequest:
    layout = make_layout([Parameter("w", (4,), "float32")], job.shards(0))
    spec = pb.OptimizerSpec(name="torch.optim.SGD")
    spec.groups.add(parameters=[0], options='{"lr": 0.1}')
    fields: dict[str, Any] = {
        "job": job.job,
        "protocol": PROTOCOL,
        "ranks": len(job.dp_groups[0].ranks),
        "job_ranks": job_ranks(job),
        "run": "one",
        "layout": layout.to_json(),
        "optimizer": spec,
        "start": START,
        "continues": START,
    }
    return pb.BeginRequest(**{**fields, **changes})


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as info:
        call()
    assert isinstance(info.value, grpc.Call)
    return info.value.code(), str(info.value.details())


def laid(shape: object, shards: int = 1) -> str:
    parameter = {"name": "w", "shape": shape, "dtype": "float32", "dim_order": []}
    return json.dumps({"parameters": [parameter], "shards": shards, "bucket_bytes": 1000})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": laid([1 << 45])}, "its shards have 141 TB of parameters"),
        ({"layout": laid([-4])}, "sizes must be a list of numbers"),
        ({"layout": laid("four")}, "sizes must be a list of numbers"),
        ({"layout": laid([True])}, "sizes must be a list of numbers"),
        (
            {"layout": laid([4], 1 << 45)},
            "a layout of 35,184,372,088,832 shards: DP group 0 of job demo has 1",
        ),
        ({"layout": "[" * 100_000}, "not a layout"),
        ({"first_iteration": 1 << 62, "next_iteration": 1 << 62}, "neither may be negative or above"),
        ({"generation": 1 << 31}, "generation 2147483648: more than 1048576 beyond generation 0"),
        ({"start": b"short"}, "start has 5 bytes"),
        ({"continues": b""}, "continues has 0 bytes"),
        ({"run": "r" * 1000}, "run has 1000 characters"),
        ({"former_groups": range((1 << 16) + 1)}, "the number of former groups 65537: must be a number from"),
        (
            {"job_ranks": OTHER_RANKS},
            "job file has DP group 0 with ranks 1, 0, 2, but this node's has it with ranks 0, 1, 2",
        ),
        ({"protocol": 0}, "the caller has an older version of Checkmate"),
        ({"protocol": PROTOCOL + 1}, "this shadow node has an older version of Checkmate"),
    ],
)
def test_a_begin_beyond_its_bounds_is_refused(
    job: Job, stub: ShadowStub, changes: dict[str, Any], words: str
) -> None:
    code, details = refusal(lambda: stub.Begin(request_of(job, **changes), timeout=5))
    assert words in details
    assert code == grpc.StatusCode.FAILED_PRECONDITION or "protocol" not in changes
    assert not status(job, 0).holds


def test_no_generation_is_discarded_that_no_run_has_reached(job: Job, stub: ShadowStub) -> None:
    """All later runs would be refused, for good."""
    reset = pb.ResetRequest(job=job.job, generation=(1 << 32) - 1, protocol=PROTOCOL)
    _, details = refusal(lambda: stub.Reset(reset, timeout=5))
    assert "more than 1048576 beyond generation 0" in details
    assert status(job, 0).discarded == 0


def forged(job: Job, **changes: Any) -> pb.RecordPart:
    fields = {"job": job.job, "run": "one", "start": START, **changes}
    return pb.RecordPart(**fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iteration": 1 << 40}, "more than 1048576 beyond iteration"),
        ({"iteration": (1 << 62)}, "must be a number from 0 to"),
        ({"iteration": -5}, "must be a number from 0"),
        ({"position": 900}, "position 900"),
        ({"position": 1, "step": pb.Step()}, "only the group's first rank describes it"),
        ({"ends": [pb.StreamEnd(end=1 << 50)]}, "an end at byte"),
        ({"ends": [pb.StreamEnd(channel=99)]}, "an end of channel 99"),
        ({"step": pb.Step(options=["{}"] * 9)}, "options of 9 parameter groups"),
        ({"step": pb.Step(without_gradient=[7])}, "parameter 7, which the shard does not have"),
        ({"step": pb.Step(slices=[pb.Slice(offset=1 << 63)])}, "a slice of bytes"),
        ({"step": pb.Step(scalings=[pb.Scaling()] * 65)}, "65 scalings list 65 parameters"),
        ({"step": pb.Step(scalings=[pb.Scaling(parameters=[0] * 1000)])}, "1 scalings list 1000 parameters"),
    ],
)
def test_a_forged_record_is_refused_and_the_node_goes_on(
    job: Job, stub: ShadowStub, changes: dict[str, Any], words: str
) -> None:
    stub.Begin(request_of(job), timeout=5)
    line = RecordLine(job, 0)
    start = time.monotonic()
    reply = line.answer(forged(job, **changes))
    line.close()
    assert words in reply.refused
    assert status(job, 0).holds
    assert time.monotonic() - start < 3


def test_each_parameter_may_be_clipped_by_itself(job: Job, stub: ShadowStub) -> None:
    """As scripts do that call `clip_grad_norm_` for each layer or parameter."""
    parameters = [Parameter(f"w{number}", (4,), "float32") for number in range(40)]
    spec = pb.OptimizerSpec(name="torch.optim.SGD")
    spec.groups.add(parameters=range(40), options='{"lr": 0.1}')
    layout = make_layout(parameters, job.shards(0)).to_json()
    stub.Begin(request_of(job, layout=layout, optimizer=spec), timeout=5)
    line = RecordLine(job, 0)
    scalings = [pb.Scaling(factor=1, parameters=[number]) for number in range(40)]
    assert not line.answer(forged(job, step=pb.Step(scalings=scalings))).refused
    line.close()


@pytest.mark.parametrize(
    "options",
    [
        '{"lr": {"numpy": ["int8", 300]}}',
        '{"lr": {"numpy": ["V", 4611686018427387904]}}',
        '{"lr": {"numpy": ["V", 2000000000]}}',
        '{"lr": {"numpy": ["float32", [1, 2]]}}',
        '{"lr": {"tensor": {"dtype": "float32", "shape": [100000000], "data": ""}}}',
    ],
)
def test_options_that_are_none_are_refused(job: Job, stub: ShadowStub, options: str) -> None:
    spec = pb.OptimizerSpec(name="torch.optim.SGD")
    spec.groups.add(parameters=[0], options=options)
    code, details = refusal(lambda: stub.Begin(request_of(job, optimizer=spec), timeout=5))
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    assert "not a parameter group's options" in details


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda s: s.Fence(pb.FenceRequest(protocol=PROTOCOL, job="demo", timeout=NAN), timeout=5),
            "timeout nan",
        ),
        (lambda s: s.Fence(pb.FenceRequest(job="demo"), timeout=5), "the caller has an older version"),
        (lambda s: s.Status(pb.StatusRequest(job="demo"), timeout=5), "the caller has an older version"),
        (lambda s: s.Reserve(pb.ReserveRequest(job="demo", seconds=NAN), timeout=5), "a hold time of nan"),
        (
            lambda s: s.Reserve(pb.ReserveRequest(job="demo", iteration=1 << 39), timeout=5),
            "more than 1048576",
        ),
        (lambda s: s.Settle(pb.SettleRequest(job="demo", iteration=-9), timeout=5), "iteration -9"),
        (
            lambda s: s.Copy(pb.CopyRequest(job="demo", wanted=[pb.PartsWanted(node=9)]), timeout=5),
            "no shadow node 9 in job demo",
        ),
        (
            lambda s: list(s.Commit(iter([pb.Progress(job="demo", node=77, protocol=PROTOCOL)]), timeout=5)),
            "no shadow node 77",
        ),
    ],
)
def test_a_call_beyond_its_bounds_is_refused(
    stub: ShadowStub, call: Callable[[ShadowStub], object], words: str
) -> None:
    code, details = refusal(lambda: call(stub))
    assert words in details
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


def test_reservations_have_a_limit(world: Callable[..., World]) -> None:
    here = world(nodes=1)
    training = here.started()
    training.iterate()
    here.stepped(0)
    request = pb.ReserveRequest(job=here.job.job, iteration=3, seconds=10)
    for _ in range(MAX_RESERVATIONS):
        assert training.stubs[0].Reserve(request, timeout=5).granted
    code, details = refusal(lambda: training.stubs[0].Reserve(request, timeout=5))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert f"this node has {MAX_RESERVATIONS} reservations" in details
    training.stubs[0].Release(pb.ReleaseRequest(job=here.job.job, iteration=3), timeout=5)
    assert training.stubs[0].Reserve(request, timeout=5).granted


def test_reserved_iterations_have_no_more_memory_than_there_is(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may need a copy of the whole state, however small the request is."""
    here = world(nodes=1)
    training = here.started()
    training.iterate()
    here.stepped(0)
    state_bytes = here.resources().replica.nbytes
    assert state_bytes == 3 * 4 * sum(p.numel() for p in training.parameters)
    monkeypatch.setattr(machine_memory, "available", lambda: 3 * state_bytes)

    def reserve(iteration: int) -> bool:
        request = pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=60)
        return training.stubs[0].Reserve(request, timeout=5).granted

    assert all(reserve(iteration) for iteration in (1, 2, 3, 1, 2, 3))
    code, details = refusal(lambda: reserve(4))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("4 iterations at a time may take")


def test_calls_that_wait_for_an_iteration_keep_no_other_waiting(world: Callable[..., World]) -> None:
    """A reader may reserve an iteration far ahead, and ask for it as often as the node has workers."""
    here = world(nodes=1)
    training = here.started()
    training.iterate()
    here.stepped(0)
    stub, name = training.stubs[0], here.job.job
    assert stub.Reserve(pb.ReserveRequest(job=name, iteration=1000, seconds=600), timeout=5).granted
    far = pb.FetchRequest(job=name, shard=pb.Shard(), iteration=1000)
    calls: list[Any] = [stub.Fetch(far, timeout=600) for _ in range(2 * training.ranks + 16)]
    wait_until(lambda: sum(call.done() for call in calls) >= training.ranks + 8, "refused", 5)
    code, details = refusal(lambda: list(stub.Fetch(far, timeout=5)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "calls wait for iterations" in details
    assert training.seed(0, 0) == []
    fence(here, training)
    settle(here, training, 0)
    training.check(0, 0, 0)
    for call in calls:
        call.cancel()


def test_recovery_and_seeds_do_not_wait_for_readers(world: Callable[..., World]) -> None:
    here = world(nodes=1)
    training = here.started()
    readers = here.nodes[0]._server._pool
    release = threading.Event()
    for _ in range(readers._max_workers):
        readers.submit(release.wait, 30)
    try:
        assert training.seed(0, 0) == []
        assert training.stubs[0].Reserve(pb.ReserveRequest(job=here.job.job), timeout=5).granted
        assert fence(here, training)[0].fenced
    finally:
        release.set()


def test_each_rank_of_a_large_job_can_call() -> None:
    assert max_calls(ranks=2) == 1024
    assert max_calls(ranks=1000) >= 4 * 1000


def test_a_seed_is_checked_before_it_is_collected(job: Job, stub: ShadowStub) -> None:
    """A header that does not fit ends the call at once; today all pieces would be read first."""
    stub.Begin(request_of(job), timeout=5)
    sizes: list[int] = []

    def seeds(parameter: int, shape: list[int]) -> Iterator[pb.Seeds]:
        header = pb.SeedHeader(job=job.job, run="one", start=START, iteration=-1, shard=pb.Shard())
        header.parameters.append(parameter)
        yield pb.Seeds(header=header)
        for number in range(10_000):
            sizes.append(number)
            tensor = pb.TensorPiece(dtype="float32", shape=shape, offset=number << 16, data=bytes(1 << 16))
            yield pb.Seeds(piece=pb.ParameterPiece(parameter=parameter, tensor=tensor))

    assert "lists parameter 5" in refusal(lambda: stub.Seed(seeds(5, [4]), timeout=10))[1]
    assert "its seed has (35184372088832,)" in refusal(lambda: stub.Seed(seeds(0, [1 << 45]), timeout=10))[1]
    assert len(sizes) < 10_000


def said_to(stub: ShadowStub, request: pb.FenceRequest) -> pb.NodeStatus | str:
    try:
        return stub.Fence(request, timeout=10)
    except grpc.RpcError as error:
        return reason(error)


def raw(job: Job, method: str, channel: grpc.Channel) -> Any:
    return channel.stream_unary(f"/checkmate.v1.Shadow/{method}", None, None)


def test_half_open_calls_do_not_keep_a_fence_waiting(job: Job, stub: ShadowStub) -> None:
    """Headers without a body, from our own host: a Fence that is refused is tried again, as trainers do."""
    release: list[bool] = []

    def nothing() -> Iterator[bytes]:
        while not release:
            time.sleep(0.05)
        yield from ()

    with open_channel(job, 0, None) as channel:
        calls = [
            raw(job, method, channel).future(nothing()) for method in ("Fence", "Seed") for _ in range(60)
        ]
        time.sleep(0.2)
        start = time.monotonic()
        request = pb.FenceRequest(protocol=PROTOCOL, job=job.job, timeout=0.1)
        wait_until(lambda: not isinstance(said_to(stub, request), str), "fenced")
        took = time.monotonic() - start
        release.append(True)
        for call in calls:
            call.cancel()
    assert took < 4, f"{took:.1f} s"


def test_half_open_streams_between_nodes_leave_no_traceback(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(5)
        yield from ()

    with open_channel(job, 0, None) as channel:
        call: Any = channel.stream_stream("/checkmate.v1.Shadow/Commit", None, None)
        calls = [call(nothing()) for _ in range(60)]
        wait_until(lambda: sum(entry.done() for entry in calls) > 1, "refused", 10)
        wait_until(lambda: "peer reports" not in {entry.name for entry in threading.enumerate()}, "ended", 10)
        codes = {entry.code() for entry in calls if entry.done()}
        release.set()
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    assert not failed


def test_a_message_that_is_cut_is_refused_and_leaves_no_memory(job: Job) -> None:
    """Today grpcio keeps about 16 KB for each."""
    with open_channel(job, 0, None) as channel:
        call: Any = channel.unary_unary("/checkmate.v1.Shadow/Status", None, None)

        def send(count: int) -> None:
            for _ in range(count):
                code, details = refusal(lambda: call(b"\x0a\xff\xff", timeout=5))
                assert code == grpc.StatusCode.INVALID_ARGUMENT
                assert "Status: unreadable message of 3 bytes" in details

        send(200)
        machine_memory.trim()
        before = memory.resident()
        send(1000)
        machine_memory.trim()
        assert (memory.resident() - before) / 1000 < 4000


def test_a_trainer_of_another_version_hears_who_is_older(job: Job) -> None:
    for greeting, words in (
        (bytes.fromhex("c4ec0002"), "the trainer has an older version"),
        (
            bytes.fromhex(f"c4ec0003{PROTOCOL + 1:08x}"),
            "this shadow node has an older version",
        ),
    ):
        with socket.create_connection(job.node(0).records_at, 5) as sock:
            sock.sendall(greeting)
            answer = b"".join(iter(lambda s=sock: s.recv(4096), b""))  # type: ignore[misc]
        (frame,) = Unpacker(greeted=True).feed(answer)
        assert words in pb.RecordReply.FromString(frame.data).refused
