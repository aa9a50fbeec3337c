"""A trainer's messages to nodes besides records, over real gRPC: parameters, optimizer state, buffers."""

from __future__ import annotations

import logging
import threading
import time

import grpc
import pytest
import torch
from torch import nn

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import OPTIONS
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.exclusion import StepExclusion
from checkmate.training.lines.seeder import Seeder, SeedSource, values_of
from checkmate.training.record.buffers import Buffers
from checkmate.training.start.followers import give_buffers
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import plan_without_state
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.shadow.recording_node import SECONDS, RecordingNode
from tests.support.waiting import wait_until


class SeedingTraining:
    """Parameters that an optimizer steps on, and their values after each step."""

    def __init__(self) -> None:
        weights = [torch.randn(100, 100) for _ in range(8)]
        self.parameters = [nn.Parameter(w.t() if i % 2 else w) for i, w in enumerate(weights)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        self.steps = StepExclusion(0)
        self.history: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        self.note(-1)

    @property
    def source(self) -> SeedSource:
        parameters = [
            Parameter.of(f"p{i}", p.shape, p.stride(), "float32") for i, p in enumerate(self.parameters)
        ]
        return SeedSource(make_layout(parameters, 1), values_of(self.parameters, self.optimizer), self.steps)

    def note(self, iteration: int) -> None:
        averages = [self.optimizer.state.get(p, {}).get("exp_avg") for p in self.parameters]
        self.history[iteration] = [
            (p.detach().clone(), None if average is None else average.clone())
            for p, average in zip(self.parameters, averages, strict=True)
        ]

    def step(self, iteration: int) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.steps.begin()
        self.optimizer.step()
        self.note(iteration)
        self.steps.end(iteration)

    def check(self, header: pb.SeedHeader, seeds_by_parameter: dict[int, object]) -> None:
        assert sorted(header.parameters) == sorted(seeds_by_parameter)
        for number, seeds in seeds_by_parameter.items():
            assert isinstance(seeds, tuple)
            tensor, values = state.from_held(self.source.layout.parameters[number], *seeds)
            expected, average = self.history[header.iteration][number]
            assert torch.equal(tensor, expected), (header.iteration, number)
            assert (average is None) == ("exp_avg" not in values)
            if average is not None:
                found_average = values["exp_avg"]
                assert isinstance(found_average, torch.Tensor)
                assert torch.equal(found_average, average)


def header(shard: int, iteration: int) -> pb.SeedHeader:
    return pb.SeedHeader(job="demo", incarnation=7, shard=pb.Shard(group=0, shard=shard), iteration=iteration)


def test_seeds_are_of_the_iteration_that_they_name_while_training_goes_on(
    node: RecordingNode, stub: ShadowStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkmate.training.lines.seeder.BATCH_BYTES", 300_000)  # two or three parameters
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    node.again = lambda head: list(head.parameters)[:1] if head.iteration < 30 else []
    seeder.want(0, range(8))
    iteration = 0
    while not (seeder.idle and iteration > 30):
        training.step(iteration)
        iteration += 1
        time.sleep(0.002)
        assert iteration < 5000
    seeder.close()
    for head, seeds in node.seeds:
        training.check(head, seeds)
    assert {head.iteration for head, _ in node.seeds} > {head.iteration for head, _ in node.seeds[:1]}
    last = {number: head.iteration for head, seeds in node.seeds for number in seeds}
    assert sorted(last) == list(range(8))


def test_seeds_before_the_first_step(node: RecordingNode, stub: ShadowStub) -> None:
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    seeder.want(1, [3, 4])
    wait_until(lambda: seeder.idle)
    seeder.close()
    ((head, seeds),) = node.seeds
    assert (head.iteration, head.shard.shard, list(head.parameters)) == (-1, 1, [3, 4])
    training.check(head, seeds)


def records(*names: str) -> list[pb.IterationRecord]:
    return [pb.IterationRecord(iteration=-1, buffers={name: name.encode()}) for name in names]


def test_records_are_given_after_parameters(
    node: RecordingNode, stub: ShadowStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after parameters that are requested while records are left."""
    monkeypatch.setattr("checkmate.training.lines.seeder.BATCH_BYTES", 1)
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    assert seeder.records_done.is_set()

    def wanting(head: pb.SeedHeader) -> list[int]:
        if list(head.record.buffers) == ["a"]:
            seeder.want(1, [5])
        return []

    node.again = wanting
    seeder.want(1, [3, 4])
    seeder.give(1, records("a", "b"))
    seeder.give(1, [])
    assert seeder.records_done.wait(SECONDS)
    seeder.close()
    came = [[*seeds, *head.record.buffers] for head, seeds in node.seeds]
    assert came == [[3], [4], ["a"], [5], ["b"]]
    assert {(head.iteration, head.shard.shard) for head, _ in node.seeds} == {(-1, 1)}
    assert not seeder.given_up


class SlowEvent(threading.Event):
    """An event that is set at first, and later with a delay."""

    def __init__(self) -> None:
        super().__init__()
        super().set()

    def set(self) -> None:
        time.sleep(0.3)
        super().set()


def test_records_that_are_given_while_others_are_sent_are_not_passed_over(
    node: RecordingNode, stub: ShadowStub
) -> None:
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    seeder.records_done = SlowEvent()
    seeder.want(0, [1])
    time.sleep(0.1)
    seeder.give(0, records("a"))
    assert seeder.records_done.wait(SECONDS)
    assert [list(head.record.buffers) for head, _ in node.seeds] == [[], ["a"]]
    seeder.close()


def test_records_for_a_node_that_is_away_are_given_up(node: RecordingNode, stub: ShadowStub) -> None:
    node.stop()
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    seeder.give(0, records("a") * 100)
    assert seeder.records_done.wait(SECONDS)
    seeder.close()
    assert seeder.given_up.startswith("can't be reached")
    assert not node.seeds


def one_buffer() -> Buffers:
    model = nn.Module()
    model.register_buffer("mean", torch.ones(3))
    return Buffers(lambda: dict(model.named_buffers()), everything=True)


def start_with(*buffers: str) -> Start:
    """A start at iteration 5 from a checkpoint with these buffers."""
    record = pb.IterationRecord(iteration=4, buffers=dict.fromkeys(buffers, b""))
    return Start(plan_without_state(7, ""), next_iteration=5, record=record)


def test_nodes_that_are_not_given_all_buffers_are_named(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture
) -> None:
    """One node accepts them, one is away, one is slow."""
    away, slow = RecordingNode(), RecordingNode()
    away.stop()
    over_deadline = threading.Event()
    slow.again = lambda head: list(range(not over_deadline.wait(SECONDS)))
    training = SeedingTraining()
    source = training.source
    buffers, start = one_buffer(), start_with()
    place = Place(job(nodes=3), 0, 0, 0)
    with (
        grpc.insecure_channel(away.address, options=OPTIONS) as to_away,
        grpc.insecure_channel(slow.address, options=OPTIONS) as to_slow,
    ):
        stubs = [stub, ShadowStub(to_away), ShadowStub(to_slow)]
        seeders = {
            number: Seeder(number, node_stub, source, header) for number, node_stub in enumerate(stubs)
        }
        try:
            with caplog.at_level(logging.WARNING, "checkmate"):
                give_buffers(place, buffers, start, {0: seeders[0]}, time.monotonic() + SECONDS)
                assert not caplog.messages
                give_buffers(place, buffers, start, seeders, time.monotonic() + 2)
        finally:
            over_deadline.set()
            for seeder in seeders.values():
                seeder.close()
            slow.stop()
    (message,) = caplog.messages
    assert message.startswith(
        "buffers and frozen parameters have not all reached shadow node 1 (can't be reached"
    )
    assert ", shadow node 2 (not in time): step records carry 4 MiB each" in message
    assert "shadow node 0" not in message
    assert len(node.seeds) == 2
    for head, seeds in node.seeds:
        assert (head.iteration, head.record.iteration, seeds) == (4, 4, {})
        assert torch.equal(state.loads(head.record.buffers["mean"]), torch.ones(3))


@pytest.mark.parametrize(
    ("restored", "is_sent"), [((), True), (("other",), True), (("mean", "other"), False)]
)
def test_buffers_that_a_checkpoint_lacks_are_given(
    node: RecordingNode, stub: ShadowStub, restored: tuple[str, ...], is_sent: bool
) -> None:
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    deadline = time.monotonic() + SECONDS
    give_buffers(Place(job(), 0, 0, 0), one_buffer(), start_with(*restored), {0: seeder}, deadline)
    seeder.close()
    assert [list(head.record.buffers) for head, _ in node.seeds] == [["mean"]] * is_sent


def test_seeds_for_a_node_that_is_away_are_given_up(node: RecordingNode, stub: ShadowStub) -> None:
    node.stop()
    training = SeedingTraining()
    seeder = Seeder(0, stub, training.source, header)
    seeder.want(0, range(8))
    wait_until(lambda: seeder.idle)
    node.start()
    seeder.want(0, [1])  # the node requests parameters when it is back
    wait_until(lambda: bool(node.seeds))
    seeder.close()
    assert [list(head.parameters) for head, _ in node.seeds] == [[1]]
