"""Anything in the messages of shadow nodes: each is answered, or refused with a reason."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from checkmate import state
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import job_ranks
from checkmate.optim.options import OptionsError, options_of, parse_options
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.frames import ANSWER, GREETING, FrameError, Unpacker, pack
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.logic.bounds import check_decision, check_progress
from checkmate.shadow.logic.group import CallRefused
from checkmate.wire.layout import from_json, make_layout
from checkmate.wire.parameter import LayoutError, Parameter
from testbed.copies import local_job
from testbed.small_training import START, status
from tests.support.fuzz import damaged, fuzz, messages
from tests.support.labs.end_hosts import needs_buffers

JOB_OF_TWO: Final = local_job(nodes=2)
LAYOUT: Final = make_layout([Parameter("w", (4,), "float32"), Parameter("e", (0,), "float32")], 1)
OPTIONS: Final = '{"lr": 0.1}'
REFUSALS: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
STRATEGIES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "job": st.just("local"),
    "protocol": st.just(PROTOCOL),
    "ranks": st.just(2),
    "group": st.just(0),
    "shard": st.just(0),
    "run": st.just("one"),
    "start": st.just(START),
    "continues": st.just(START),
    "incarnation": st.just(0),
    "layout": st.just(LAYOUT.to_json()),
    "name": st.just("torch.optim.SGD"),
    "options": st.just(OPTIONS),
    "next_options": st.just(OPTIONS),
    "parameters": st.integers(0, 1),
    "parameter": st.integers(0, 1),
    "default_dtype": st.just("float32"),
    "dtype": st.sampled_from(["float32", "bfloat16", "int64"]),
    "timeout": st.floats(0, 0.01),
    "seconds": st.floats(0, 0.01),
    "iteration": st.integers(-1, 5),
    "first_iteration": st.just(0),
    "next_iteration": st.just(0),
    "position": st.integers(0, 1),
    "end": st.integers(0, 64),
    "RepairedRange_start": st.integers(0, 64),
    "stop": st.integers(0, 64),
    "digest": st.binary(min_size=16, max_size=16),
}
NUMBERS = st.sampled_from([0, 1, -1, 255, 1 << 31, 1 << 45, 1 << 63, 1 << 80]) | st.integers() | st.floats()
JSON: Final = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
CALLS: Final[dict[str, type[Message]]] = {
    "Status": pb.StatusRequest,
    "Fence": pb.FenceRequest,
    "Copy": pb.CopyRequest,
    "Settle": pb.SettleRequest,
    "Begin": pb.BeginRequest,
    "Refused": pb.RefusedRequest,
    "Reserve": pb.ReserveRequest,
    "Release": pb.ReleaseRequest,
}
STREAMED: Final[dict[str, type[Message]]] = {"Parts": pb.PartsRequest, "Fetch": pb.FetchRequest}


WAITING: Final = ("Fence", "Fetch")
"""Methods that may wait as long as their caller."""


@pytest.fixture
def channel(job: Job) -> Iterator[grpc.Channel]:
    with open_channel(job, 0, None) as opened_channel:
        yield opened_channel


def blob_of(data: st.DataObject, job: Job, kind: type[Message]) -> bytes:
    """Return any message of a type, often with what the node expects, and often damaged."""
    strategies = {**STRATEGIES, "job": st.just(job.job), "ranks": st.just(len(job.dp_groups[0].ranks))}
    blob: bytes = data.draw(messages(kind, **strategies)).SerializeToString()
    return damaged(data, blob) if data.draw(st.booleans()) else blob


@needs_buffers
@fuzz(150, data=st.data())
def test_any_request_is_answered_or_refused(job: Job, channel: grpc.Channel, data: st.DataObject) -> None:
    method, kind = data.draw(st.sampled_from([*CALLS.items(), *STREAMED.items()]))
    blob = blob_of(data, job, kind)
    refusals = (*REFUSALS, *([grpc.StatusCode.DEADLINE_EXCEEDED] if method in WAITING else []))
    path, limit = f"/checkmate.v1.Shadow/{method}", 0.3 if method in WAITING else 20
    calls: Any = channel.unary_stream if method in STREAMED else channel.unary_unary
    try:
        answer = calls(path, None, None)(blob, timeout=limit)
        assert all(isinstance(message, bytes) for message in (answer if method in STREAMED else [answer]))
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        assert error.code() in refusals, f"{method}: {error.code()} {error.details()}"


@needs_buffers
@fuzz(100, data=st.data())
def test_any_record_is_taken_or_refused(
    job: Job, channel: grpc.Channel, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    begin(job, channel)
    parts = [pack(blob_of(data, job, pb.RecordPart), ANSWER) for _ in range(data.draw(st.integers(1, 3)))]
    stream = GREETING + b"".join(parts)
    if data.draw(st.integers(0, 4)) == 0:
        stream = damaged(data, stream)
    with socket.create_connection(job.node(0).records_at, 5) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(stream)
        sock.shutdown(socket.SHUT_WR)
        replies = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        for frame in Unpacker(greeted=True).feed(replies):
            assert len(pb.RecordReply.FromString(frame.data).refused) < 1000
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert status(job, 0).holds


def begin(job: Job, channel: grpc.Channel) -> None:
    """Begin the start of training to which records belong; again is the same."""
    spec = pb.OptimizerSpec(name="torch.optim.SGD", groups=[pb.ParamGroup(parameters=[0], options=OPTIONS)])
    request = pb.BeginRequest(
        job=job.job,
        protocol=PROTOCOL,
        ranks=len(job.dp_groups[0].ranks),
        job_ranks=job_ranks(job),
        run="one",
        layout=LAYOUT.to_json(),
        optimizer=spec,
        start=START,
        continues=START,
    )
    ShadowStub(channel).Begin(request, timeout=20)


@fuzz(200, data=st.data())
def test_any_report_between_nodes_is_taken_or_refused(data: st.DataObject) -> None:
    job = JOB_OF_TWO
    try:
        if data.draw(st.booleans()):
            check_progress(job, 0, pb.Progress.FromString(blob_of(data, job, pb.Progress)), START, 3)
        else:
            check_decision(job, pb.Decision.FromString(blob_of(data, job, pb.Decision)), START, 3)
    except (CallRefused, DecodeError) as error:
        assert len(str(error)) < 1000


@fuzz(300, blob=st.binary(max_size=64), data=st.data())
def test_any_bytes_are_frames_or_not(blob: bytes, data: st.DataObject) -> None:
    blob = damaged(data, GREETING + pack(blob, ANSWER) * 2) if data.draw(st.booleans()) else blob
    unpacker, step = Unpacker(greeted=False), data.draw(st.integers(1, 70))
    try:
        for at in range(0, len(blob), step):
            list(unpacker.feed(blob[at : at + step]))
    except FrameError as error:
        assert len(str(error)) < 300


@fuzz(100, data=st.data())
def test_any_seeds_are_read_or_refused(data: st.DataObject) -> None:
    seeds = state.to_seeds(
        pb.SeedHeader(parameters=[0]), [(0, torch.ones(4), {"step": torch.tensor(1.0), "lr": 0.1})]
    )
    read_seeds = [pb.Seeds.FromString(seed.SerializeToString()) for seed in seeds]
    at = data.draw(st.integers(0, len(read_seeds) - 1))
    any_seeds = messages(pb.Seeds, **STRATEGIES).map(lambda seed: seed.SerializeToString())
    whole = data.draw(st.just(read_seeds[at].SerializeToString()) | any_seeds)
    try:
        read_seeds[at] = pb.Seeds.FromString(damaged(data, whole))
        state.SeedReader(read_seeds).read_all(LAYOUT.parameters)
    except (state.StateError, DecodeError) as error:
        assert len(str(error)) < 1000


@fuzz(200, value=JSON, data=st.data())
def test_any_json_is_a_layout_or_refused(value: Any, data: st.DataObject) -> None:
    try:
        layout = from_json(text_of(data, json.loads(LAYOUT.to_json()), value))
    except LayoutError as error:
        assert str(error)
    else:
        assert from_json(layout.to_json()) == layout


@fuzz(200, value=JSON, data=st.data())
def test_any_json_is_options_or_refused(value: Any, data: st.DataObject) -> None:
    document = json.loads(options_of({"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "foreach": None}))
    try:
        options = parse_options(text_of(data, document, value))
    except OptionsError as error:
        assert str(error)
    else:
        assert parse_options(options_of(options)).keys() == options.keys()


def text_of(data: st.DataObject, document: Any, value: Any) -> str:
    """Return `value`, `known` with `value` in one of its places, or its text with other characters."""
    match data.draw(st.integers(0, 2)):
        case 0:
            return json.dumps(value)
        case 1:
            return damaged(data, json.dumps(document).encode()).decode(errors="replace")
    place = document
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            place[key] = value
            break
        place = place[key]
    return json.dumps(document)
