"""A DP group's shards read from real nodes. Incomplete state is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from checkmate import state
from checkmate.nodes.other_ranks import OtherRanks
from checkmate.nodes.reader import ShardRequest
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.from_nodes import (
    Fetched,
    FetchError,
    _check_model,
    different,
    fetch,
    in_other_parts,
)
from checkmate.training.start.places import Place
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.small_training import RUN
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, settle
from tests.support.shadow.world import fence as fenced

pytestmark = needs_buffers


def fetched(names: Sequence[str], *, iterations: int = 2) -> Fetched:
    """Fetch a model with two buffers, after iterations whose records had those of `said`."""
    with ExitStack() as stack:
        here = World(stack, nodes=2, ranks=2)
        training = here.training()
        training.buffers = {"mean": torch.ones(3), "variance": torch.full((3,), 2.0)}
        training.begin([0, 1])
        training.seed_all()
        here.ready()
        training.saying = list(names)
        for _ in range(iterations):
            training.iterate()
        here.stepped(iterations - 1)
        fenced(here, training)
        settle(here, training, iterations - 1)
        stubs = Stubs(here.job, None)
        stack.callback(stubs.close)
        requests = {ShardRequest(here.job.job, RUN, iterations - 1, 0, shard): [shard] for shard in range(2)}
        return fetch(requests, {0: training.layout}, stubs, Place(here.job, 0, 0, 0), 10.0)


def test_all_buffers_come_with_the_shards() -> None:
    buffers = fetched(["mean", "variance"]).record.buffers
    assert torch.equal(state.loads(buffers["variance"]), torch.full((3,), 2.0))
    assert sorted(buffers) == ["mean", "variance"]


def test_an_iteration_that_lacks_buffers_is_not_whole() -> None:
    lacks = (
        "no holder of shard 0 of DP group 0, shard 1 of DP group 0 has 1 of the model's buffers .*: variance"
    )
    with pytest.raises(FetchError, match=lacks):
        fetched(["mean"])


def test_before_the_first_iteration_no_buffer_has_come() -> None:
    assert not fetched([], iterations=0).record.buffers


def test_another_number_of_shards_or_another_shard_is_another_model() -> None:
    """The type of gradients may change, and so may the memory order."""
    chunk = Parameter("w", (4, 2), "float32", whole=(7, 2), offset=(0, 0))
    layout = make_layout([chunk], 1)
    assert different(make_layout([replace(chunk, gradient="bfloat16")], 1), layout) == ""
    resized = make_layout([replace(chunk, whole=(8, 2))], 1)
    words = "it has w [4, 2] at [0, 0] of [8, 2] float32 in place of w [4, 2] at [0, 0] of [7, 2] float32"
    assert different(resized, layout) == words
    whole = make_layout([Parameter("w", (4, 2), "float32")], 1)
    assert different(whole, layout).startswith("it has w [4, 2] float32 in place of w [4, 2] at")


@pytest.mark.parametrize(
    ("foreign", "is_moved"),
    [
        (Parameter("w", (3, 2), "float32", whole=(7, 2), offset=(4, 0)), True),
        (Parameter("w", (7, 2), "float32"), True),
        (Parameter("w", (4, 2), "float32"), False),
        (Parameter("v", (4, 2), "float32", whole=(7, 2), offset=(0, 0)), False),
    ],
    ids=["another chunk", "not sharded", "another shape", "another name"],
)
def test_other_parts_of_the_same_model_are_told_from_another_model(
    foreign: Parameter, is_moved: bool
) -> None:
    layout = make_layout([Parameter("w", (4, 2), "float32", whole=(7, 2), offset=(0, 0))], 1)
    assert in_other_parts(make_layout([foreign], 1), layout) == is_moved
    assert different(make_layout([foreign], 1), layout)
    header = pb.SeedHeader(shard=pb.Shard(group=0))
    with pytest.raises(
        OtherRanks if is_moved else FetchError, match="other parts" if is_moved else "another model"
    ):
        _check_model({0: layout}, False, header, make_layout([foreign], 1))
