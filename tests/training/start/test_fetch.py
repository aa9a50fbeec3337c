"""A DP group's shards read from real nodes. Incomplete state is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch

from checkmate import state
from checkmate.nodes.reader import Asked
from checkmate.nodes.stubs import Stubs
from checkmate.training.start.fetch import Fetched, FetchError, fetch
from testbed.small_training import RUN
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, settle
from tests.support.shadow.world import fence as fenced

pytestmark = needs_buffers


def fetched(said: Sequence[str], *, iterations: int = 2) -> Fetched:
    """Fetch a model with two buffers, after iterations whose records had those of `said`."""
    with ExitStack() as stack:
        here = World(stack, nodes=2, ranks=2)
        training = here.training()
        training.buffers = {"mean": torch.ones(3), "variance": torch.full((3,), 2.0)}
        training.begin([0, 1])
        training.seed_all()
        here.ready()
        training.saying = list(said)
        for _ in range(iterations):
            training.iterate()
        here.stepped(iterations - 1)
        fenced(here, training)
        settle(here, training, iterations - 1)
        stubs = Stubs(here.job, None)
        stack.callback(stubs.close)
        wanted = {Asked(here.job.job, RUN, iterations - 1, 0, shard): [shard] for shard in range(2)}
        return fetch(wanted, training.layout, stubs, 0, 10.0)


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
