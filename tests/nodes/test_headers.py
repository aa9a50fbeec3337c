"""Checks of a shard's header against the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkmate.nodes.reader import ShardRequest, check_header, record_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import StateError
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter

LAYOUT = make_layout([Parameter(f"p{i}", (4,), "float32") for i in range(4)], 2, 100)
REQUEST = ShardRequest("demo", "first", 7, 1, 0, 3)


def header(**changes: Any) -> pb.SeedHeader:
    fields: dict[str, Any] = {
        "job": "demo",
        "run": "first",
        "incarnation": 3,
        "iteration": 7,
        "shard": pb.Shard(group=1, shard=0),
        "layout": LAYOUT.to_json(),
        "parameters": LAYOUT.of_shard(0),
    }
    return pb.SeedHeader(**{**fields, **changes})


def test_what_was_asked_for_is_taken() -> None:
    assert check_header(header(), REQUEST).fingerprint == LAYOUT.fingerprint
    check_header(header(incarnation=4), replace(REQUEST, incarnation=None))
    check_header(header(start=b"one"), replace(REQUEST, start=b"one"))
    with pytest.raises(StateError, match="not of the requested start"):
        check_header(header(start=b"another"), replace(REQUEST, start=b"one"))


def test_some_parameters_are_asked_for() -> None:
    first, *rest = LAYOUT.of_shard(0)
    request = replace(REQUEST, parameters=(first,))
    check_header(header(parameters=[first]), request)
    check_header(header(parameters=[]), replace(REQUEST, parameters=()))
    for parameters in (LAYOUT.of_shard(0), rest):
        with pytest.raises(StateError, match="other parameters than requested"):
            check_header(header(parameters=parameters), request)
        with pytest.raises(StateError, match="other parameters than requested"):
            check_header(header(parameters=parameters), replace(REQUEST, parameters=()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": "other"}, "of job other, run first .*not shard 0 of DP group 1 at iteration 7 of job demo"),
        ({"run": "second"}, "run second"),
        ({"incarnation": 4}, "incarnation 4"),
        ({"iteration": 6}, "at iteration 6"),
        ({"shard": pb.Shard(group=1, shard=1)}, "shard 1 of DP group 1"),
        ({"shard": pb.Shard(group=0, shard=0)}, "shard 0 of DP group 0"),
        ({"layout": "{}"}, "not a layout"),
        ({"parameters": LAYOUT.of_shard(1)}, "other parameters than requested"),
        ({"parameters": [*LAYOUT.of_shard(0), *LAYOUT.of_shard(0)]}, "other parameters than requested"),
    ],
)
def test_what_was_not_asked_for_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        check_header(header(**changes), REQUEST)


def test_buffers_are_taken_from_whoever_has_them() -> None:
    parts = [pb.RecordPart(position=p) for p in range(2)]
    whole = header(buffers=["a", "b", "c"], record=pb.IterationRecord(parts=parts, buffers={"a": b"1"}))
    late = header(buffers=["a", "b", "c"], record=pb.IterationRecord(buffers={"a": b"2", "b": b"2"}))
    record, without = record_of([late, whole])
    assert (dict(record.buffers), without) == ({"a": b"1", "b": b"2"}, ["c"])
    assert len(record.parts) == 2
    assert dict(whole.record.buffers) == {"a": b"1"}
