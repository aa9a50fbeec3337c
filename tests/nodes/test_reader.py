"""A shard, or a part of one, read from a real node, as by another holder or a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from checkmate.nodes.reader import NotReserved, ShardReading, ShardRequest, read_shard, read_shards, reserved
from checkmate.nodes.standing import Lacking
from checkmate.nodes.stubs import Stubs
from checkmate.state import StateError
from testbed.small_training import RUN, SmallTraining
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World

pytestmark = needs_buffers


class ReaderPlace:
    """Two shadow nodes that hold both shards, a training after iteration 1, and a client."""

    def __init__(self, stack: ExitStack) -> None:
        self.world = World(stack, nodes=2, replicas=2, ranks=2)
        self.training: SmallTraining = self.world.started()
        for _ in range(2):
            self.training.iterate()
        self.world.stepped(1)
        self.stubs = stack.enter_context(Stubs(self.world.job, None))
        self.bytes = 0

    def reading(self, seconds: float = 10.0, step_seconds: float | None = None) -> ShardReading:
        return ShardReading(time.monotonic() + seconds, step_seconds, self.progress)

    def progress(self, nbytes: int) -> None:
        self.bytes += nbytes

    def reservations(self) -> list[dict[int, list[float]]]:
        return [serving.node.state.reserved for serving in self.world.nodes.values()]


@pytest.fixture
def place() -> Iterator[ReaderPlace]:
    with ExitStack() as stack:
        yield ReaderPlace(stack)


def request_of(iteration: int, **changes: object) -> ShardRequest:
    return replace(ShardRequest("demo", RUN, iteration, 0, 0, 0), **changes)  # type: ignore[arg-type]


def test_a_piece_of_a_shard_from_its_other_holder(place: ReaderPlace) -> None:
    """Reserve, fetch some parameters, release."""
    first, *rest = place.training.layout.of_shard(0)
    assert rest
    with reserved(place.stubs, [1], 10.0) as reservation:
        assert reservation.iteration == 1
        piece = read_shard(place.stubs.to(1), request_of(1, parameters=(first,)), place.reading())
        assert place.reservations()[1].keys() == {1}
        without = read_shard(place.stubs.to(1), request_of(1, parameters=()), place.reading())
        for wrong in (
            request_of(1, run="other"),
            request_of(1, incarnation=9),
            request_of(1, start=b"another"),
        ):
            with pytest.raises(StateError):
                read_shard(place.stubs.to(1), wrong, place.reading())
    assert place.reservations() == [{}, {}]
    assert list(piece.states) == [first]
    assert not without.states
    assert without.header.record == piece.header.record
    tensor, values = piece.states[first]
    expected, expected_state = place.training.states[1][first]
    assert torch.equal(tensor, expected)
    assert piece.layout.fingerprint == place.training.layout.fingerprint
    assert place.bytes == tensor.nbytes + sum(expected_state[name].nbytes for name in values)


def test_shards_come_from_whoever_gives_them(place: ReaderPlace) -> None:
    requests = {request_of(1, shard=0): [0, 1], request_of(1, shard=1): [1, 0]}
    place.world.stop(0)
    with reserved(place.stubs, [0, 1], 10.0, enough=lambda granted: 1 in granted) as reservation:
        assert reservation.granted == {1}
        assert reservation.refusals == {0: "can't be reached (Connection refused)"}
        shards = read_shards(place.stubs, requests, place.reading())
    assert shards.keys() == {(0, 0), (0, 1)}
    numbers = sorted(number for shard_state in shards.values() for number in shard_state.states)
    assert numbers == list(range(len(place.training.parameters)))


def test_an_iteration_that_does_not_come_is_given_up(place: ReaderPlace) -> None:
    """Training has stopped, so a later iteration that is reserved is never stepped."""
    with reserved(place.stubs, [0, 1], 10.0, at_least=2) as reservation:
        start = time.monotonic()
        with pytest.raises(Lacking) as info:
            read_shards(place.stubs, {request_of(reservation.iteration): [0, 1]}, place.reading(9.0, 0.3))
        assert time.monotonic() - start < 5
    assert str(info.value).count("the iteration was not stepped within 0.3 s") == 2
    assert not info.value.wrong


def test_a_node_without_anything_grants_nothing(place: ReaderPlace) -> None:
    place.world.stop(1)
    place.world.start(1)
    with pytest.raises(NotReserved, match="shadow node 1: "), reserved(place.stubs, [1], 5.0):
        pytest.fail("nothing can be had there")
    assert place.reservations() == [{}, {}]
