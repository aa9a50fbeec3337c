"""Where an iteration ends: the state captured at that moment, and the warnings to scripts."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.loop import Loop as Batches
from checkmate.training.loop import generators_of
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import Capture, Watched
from checkmate.training.record.generators import MAX_CHECKS, FirstBatch, RestoredTensors, capture_generators
from checkmate.training.record.wrapped import SchedulerWatch
from checkmate.training.start.places import Start, place_of
from checkmate.training.start.plans import plan_without_state
from testbed.jobs import job
from tests.support.training.recorded_loop import RecordedLoop, adamw, loops


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with loops():
        yield


class EndScript:
    """A loop whose `work` changes everything that is captured, and notes the result."""

    def __init__(self, **watched: Any) -> None:
        self.position = {"at": 0}
        self.loop = RecordedLoop(
            adamw, scheduler=lambda o: StepLR(o, 2), extra=lambda: self.position, **watched
        )
        self.loop.model.register_buffer("average", torch.zeros(3))
        self.loop.model.register_parameter("teacher", nn.Parameter(torch.zeros(3), requires_grad=False))
        self.expected: dict[int, dict[str, Any]] = {}

    def work(self) -> None:
        """Do the work of an iteration; `note` its result."""
        torch.rand(3)
        self.position["at"] += 1
        with torch.no_grad():
            self.loop.model.get_buffer("average").add_(1)
            self.loop.model.get_parameter("teacher").data.add_(1)

    def note(self) -> None:
        """Note the state that a resumed run must have."""
        loop = self.loop
        buffers = {name: tensor.clone() for name, tensor in loop.model.named_buffers()}
        self.expected[loop.iteration] = {
            "torch": torch.get_rng_state(),
            "extra": dict(self.position),
            "scheduler": copy.deepcopy(loop.scheduler.state_dict()),
            "scaler": None if loop.scaler is None else loop.scaler.state_dict(),
            "buffers": buffers,
        }

    def draw(self) -> None:
        """Draw the next batch."""
        torch.rand(5)
        self.position["at"] += 100

    def check(self, parts: list[pb.RecordPart]) -> None:
        """Check that the parts have the state noted."""
        assert [part.iteration for part in parts] == list(self.expected)
        buffers: dict[str, torch.Tensor] = {}
        for part in parts:
            expected = self.expected[part.iteration]
            assert torch.equal(state.load_generators(part.rng)["torch"], expected["torch"])
            assert state.loads(part.extra) == expected["extra"]
            assert state.loads(part.step.scheduler) == expected["scheduler"]
            assert (state.loads(part.step.scaler) if part.step.scaler else None) == expected["scaler"]
            buffers |= state.loads(part.buffers) if part.buffers else {}
            for name, tensor in expected["buffers"].items():
                assert torch.equal(buffers[name], tensor), name


def test_without_marks_all_is_captured_where_the_scheduler_steps() -> None:
    script = EndScript()
    loop = script.loop
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        script.work()
        loop.scheduler.step()
        script.note()
        script.draw()
    script.check(loop.close())


@pytest.mark.parametrize("schedule", [False, True])
def test_without_marks_all_is_captured_where_the_scaler_has_been_updated(schedule: bool) -> None:
    script = EndScript(scaler=lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2))
    loop = script.loop
    for factor in (1.0, float("inf"), 1.0):
        loop.backward(factor=factor)
        loop.scaler.step(loop.optimizer)
        script.work()
        loop.scaler.update()
        if schedule:
            loop.scheduler.step()
        script.note()
        loop.optimizer.zero_grad()
        script.draw()
    script.check(loop.close())


def test_an_iteration_without_a_step_ends_with_its_backward() -> None:
    script = EndScript()
    loop = script.loop
    for skipped in (False, True, False):
        loop.backward()
        script.note()
        if not skipped:
            loop.optimizer.step()
            script.note()
        loop.optimizer.zero_grad()
        script.draw()
    script.check(loop.close())


def test_all_is_captured_at_the_mark(caplog: pytest.LogCaptureFixture) -> None:
    script = EndScript()
    loop = script.loop
    for _ in range(MAX_CHECKS + 2):
        loop.backward()
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        script.work()
        script.note()
        loop.recorder.mark()
        script.draw()
        script.work()
    script.check(loop.close())
    assert not caplog.records


def test_an_iteration_that_a_scaler_skips_ends_at_its_mark(caplog: pytest.LogCaptureFixture) -> None:
    script = EndScript(scaler=lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**12))
    loop = script.loop
    for factor in (1.0, float("inf"), 1.0):
        loop.backward(factor=factor)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()
        script.work()
        script.note()
        loop.recorder.mark()
        script.draw()
    parts = loop.close()
    script.check(parts)
    assert [part.step.skipped for part in parts] == [False, True, False]
    assert not caplog.records


def test_a_later_mark_counts_until_the_next_forward() -> None:
    script = EndScript()
    loop = script.loop
    loop.recorder.mark()  # no iteration has begun
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        loop.recorder.mark()
        script.work()
        loop.recorder.mark(left_loop=True)  # that work may be incomplete
        script.work()
        script.note()
        loop.recorder.mark()
        script.draw()
    script.check(loop.close())


def test_a_forward_for_other_ends_does_not_end_a_marked_iteration(caplog: pytest.LogCaptureFixture) -> None:
    script = EndScript()
    loop = script.loop
    loop.recorder.mark()
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.ddp(torch.randn(4, 8))
        script.work()
        script.note()
        loop.recorder.mark()
        script.draw()
    script.check(loop.close())
    assert not caplog.records


def test_an_iteration_without_a_step_whose_mark_is_missed_ends_at_the_next_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the first one: from then on, such an iteration ends with its backward."""
    script = EndScript()
    loop = script.loop
    expected = []
    for iteration in range(6):
        loop.backward()
        before = script.position["at"]
        if iteration not in (2, 4):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        script.work()
        expected.append({"at": before if iteration == 4 else script.position["at"]})
        if iteration not in (2, 4):
            loop.recorder.mark()
    assert [state.loads(part.extra) for part in loop.close()] == expected
    (message,) = caplog.messages
    assert message.startswith("iteration 2 ended without protection.mark()")


@pytest.mark.parametrize("last", [True, False])
def test_a_mark_that_fails_is_none(last: bool) -> None:
    """The iteration is kept only if training ends there, with its state at that time."""
    script = EndScript()
    loop = script.loop
    for iteration in range(2):
        loop.backward()
        loop.optimizer.step()
        if not iteration:
            loop.recorder.mark()
    generator: Any = (number for number in range(1))
    script.position["at"] = generator
    with pytest.raises(TypeError, match="generator"):
        loop.recorder.mark()
    script.position = {"at": 7}
    loop.recorder.close(last=last)
    assert [noted.end.extra for noted in loop.emitted][1:] == [{"at": 7}] * last


CHANGES: dict[str, Callable[[EndScript], object]] = {
    "extra()": lambda script: script.position.update(at=7),
    "the scheduler": lambda script: setattr(script.loop.scheduler, "last_epoch", 9),
    "the scaler": lambda script: script.loop.scaler._scale.mul_(2),
    "average": lambda script: script.loop.model.get_buffer("average").data.add_(1),
    "teacher": lambda script: script.loop.model.get_parameter("teacher").data.add_(1),
}


@pytest.mark.parametrize("part", list(CHANGES))
@pytest.mark.parametrize("at", [0, MAX_CHECKS - 1])
def test_what_changes_after_the_capture_is_said_once(
    part: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    script = EndScript(scaler=lambda _: torch.amp.GradScaler("cpu"))
    loop = script.loop
    for iteration in range(MAX_CHECKS + 1):
        loop.backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        torch.rand(3)
        if iteration >= at:
            CHANGES[part](script)
    loop.close()
    (message,) = caplog.messages
    assert message.startswith(f"iteration {at}: {part} changed between the optimizer's or scheduler's step")
    assert "protection.steps(loader)" in message


def test_later_iterations_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    script = EndScript()
    for iteration in range(MAX_CHECKS + 3):
        script.loop.backward()
        script.loop.optimizer.step()
        script.loop.optimizer.zero_grad()
        if iteration >= MAX_CHECKS:
            script.position["at"] += 1
    script.loop.close()
    assert not caplog.records


def emitted(loop: RecordedLoop) -> list[tuple[int, bool]]:
    return [(noted.iteration, noted.last) for noted in loop.emitted]


def test_what_is_marked_is_kept_after_an_error_too() -> None:
    """For example, if the loader fails."""
    for settled in (True, False):
        loop = RecordedLoop(adamw)
        for _ in range(2):
            loop.backward()
            loop.optimizer.step()
            loop.recorder.mark(left_loop=not settled)
        loop.recorder.close(last=False)
        assert emitted(loop) == [(0, False), (1, False)] if settled else [(0, False)]


def test_the_last_iteration_ends_at_its_mark_or_where_the_protection_is_closed() -> None:
    for marked in (True, False):
        script = EndScript()
        loop = script.loop
        loop.recorder.mark()
        for iteration in range(2):
            loop.backward()
            loop.optimizer.step()
            script.work()
            script.note()
            if marked or not iteration:
                loop.recorder.mark()
                script.draw()
        parts = loop.close()
        script.check(parts)
        assert [part.step.last for part in parts] == [False, True]


def iterate(loop: RecordedLoop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def test_a_loop_marks_after_each_batch_and_before_the_next_is_drawn() -> None:
    script = EndScript()
    loop = script.loop
    batches = Batches(loop.recorder, None, lambda: True)

    def drawing() -> Iterator[int]:
        for number in range(3):
            script.draw()
            yield number

    turns = []
    for epoch in range(2):
        for index, number in enumerate(batches.steps(drawing())):
            iterate(loop)
            script.work()
            script.note()
            turns.append((epoch, index, number))
    parts = loop.close()
    script.check(parts)
    assert turns == [(epoch, i, i) for epoch in range(2) for i in range(3)]
    assert all(state.load_generators(part.rng)["in_loop"] for part in parts)


def test_micro_batches_may_be_drawn_one_by_one() -> None:
    script = EndScript()
    loop = script.loop
    for number in Batches(loop.recorder, None, lambda: True).steps(range(1, 10)):
        if number % 3:
            with loop.ddp.no_sync():
                loop.ddp(torch.randn(4, 8)).sum().backward()
        else:
            iterate(loop)
        script.work()
        if number % 3 == 0:
            script.note()
    script.check(loop.close())


def test_a_loop_that_is_left_ends_its_iteration() -> None:
    """Training that ends there is resumed between two batches of that loop, training that goes on is not."""
    script = EndScript()
    loop = script.loop
    batches = Batches(loop.recorder, None, lambda: True)
    for _ in range(2):
        for number in batches.steps(range(9)):
            iterate(loop)
            script.work()
            script.note()
            if number == 1:
                break
        script.work()  # between the loops
        script.draw()
    parts = loop.close()
    script.check(parts)
    in_loop = [state.load_generators(part.rng).get("in_loop", False) for part in parts]
    assert in_loop == [True, False, True, True]


def test_an_error_in_a_loop_leaves_its_iteration_half_way() -> None:
    loop = RecordedLoop(adamw)
    with pytest.raises(ArithmeticError):
        for number in Batches(loop.recorder, None, lambda: True).steps(range(9)):
            iterate(loop)
            if number == 2:
                raise ArithmeticError
    loop.recorder.close(last=False)
    assert emitted(loop) == [(0, False), (1, False)]


def test_entering_the_loop_again_leaves_the_generators_as_they_were() -> None:
    """Even if no batch is left; then the next loop is a new one."""

    class Loader:
        def __init__(self, size: int) -> None:
            self.size = size

        def __iter__(self) -> Iterator[torch.Tensor]:
            torch.rand(1)  # as a DataLoader draws its base seed
            return iter(torch.arange(self.size))

    loop = RecordedLoop(adamw)
    torch.manual_seed(3)
    there = state.load_generators(state.dump_generators(capture_generators() | {"in_loop": True}))
    torch.rand(4)
    has_begun = False
    batches = Batches(loop.recorder, there, lambda: has_begun)
    for remaining in (0, 2):
        torch.manual_seed(8)
        numbers: list[torch.Tensor] = []
        for _ in batches.steps(Loader(remaining)):
            numbers.append(torch.rand(1))
        if not remaining:
            assert torch.equal(torch.get_rng_state(), there["torch"])
            continue
        torch.manual_seed(8)
        torch.rand(1)
        assert numbers == [torch.rand(1), torch.rand(1)]
    has_begun = True
    batches = Batches(loop.recorder, there, lambda: has_begun)
    torch.manual_seed(8)
    list(batches.steps(Loader(1)))
    assert not torch.equal(torch.get_rng_state(), there["torch"])


def test_generators_are_those_of_this_ranks_part() -> None:
    here = place_of(job(ranks=2), 1, 2, [0, 1])
    record = pb.IterationRecord(iteration=4)
    for position in range(2):
        torch.manual_seed(position)
        in_loop = state.dump_generators(capture_generators() | {"in_loop": True})
        record.parts.add(position=position, rng=in_loop)
    generators = generators_of(here, Start(plan_without_state(1, ""), record=record))
    assert generators["in_loop"]
    assert torch.equal(generators["torch"], torch.get_rng_state())
    record.parts[1].rng = state.dump_generators(capture_generators())
    assert "in_loop" not in generators_of(here, Start(plan_without_state(1, ""), record=record))
    assert generators_of(here, Start(plan_without_state(1, ""))) == {}


class FetchingLoop(RecordedLoop):
    """A loop that draws the next batch before the iteration's mark, as nanoGPT's."""

    def __init__(self, make: Any, **watched: Any) -> None:
        super().__init__(make, **watched)
        self.batch = torch.randn(4, 8)

    def turn(self, turns: int) -> None:
        """Train for a number of turns."""
        for _ in range(turns):
            self.backward_of(self.ddp(self.batch).sum())
            self.optimizer.step()
            self.batch = torch.randn(4, 8)
            self.recorder.mark()


@pytest.mark.parametrize("again", [False, True])
def test_a_batch_that_was_fetched_ahead_and_is_drawn_again_is_named(
    again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = FetchingLoop(adamw)
    before.turn(MAX_CHECKS + 2)
    *_, last = before.close()
    generators = state.load_generators(last.rng)
    assert generators["still"]
    resumed = FetchingLoop(adamw, resumed=generators)
    torch.set_rng_state(generators["torch"])  # as `restore` leaves it
    if again:
        resumed.batch = torch.randn(4, 8)
    resumed.turn(2)
    assert ("random generators moved between checkmate.restore" in caplog.text) == again
    assert all(state.load_generators(part.rng)["still"] for part in resumed.close())


@pytest.mark.parametrize(
    "order",
    [
        "before",
        "before, restored",
        "before, restored, no number",
        "in each turn",
        "in each turn, warmed up",
        "once for all",
    ],
)
def test_a_first_batch_that_was_drawn_before_is_named_unless_it_is_restored(
    order: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    batch: dict[str, Any] = {"rows": torch.randn(4, 3), "length": 4}
    if "no number" in order:
        batch["rows"][0, 0] = float("nan")
    globals()["named_batch"] = batch  # as a script's own module has it
    iterations = 0
    extra = {"ahead": (batch["rows"].clone() if "restored" in order else torch.randn(4, 3), 1)}
    first = FirstBatch(model, RestoredTensors(extra), lambda: iterations)
    with torch.no_grad():
        model(torch.randn(1, 3))  # an evaluation
    if "warmed up" in order:
        model(input=batch["rows"])
    for _ in range(3):
        if "in each turn" in order:
            batch = {"rows": torch.randn(4, 3), "length": 4}
        model(input=batch["rows"]).sum().backward()
        iterations += 1
        model.zero_grad()
        if "before" in order:
            batch = {"rows": torch.randn(4, 3), "length": 4}
    first.remove()
    assert ("the first batch was drawn before checkmate.protect" in caplog.text) == (order == "before")


def test_what_a_script_names_otherwise_does_not_disturb() -> None:
    """Mappings that fail, lists that contain themselves, sparse tensors, restored ones of another type."""

    class Closed(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise OSError("closed")

        def __iter__(self) -> Iterator[str]:
            raise OSError("closed")

        def __len__(self) -> int:
            return 1

    itself: list[Any] = []
    itself.append(itself)
    objects = [Closed(), itself, {"a": Closed()}, torch.eye(2).to_sparse()]
    model = nn.Linear(3, 2)
    batch = torch.ones(4, 3)
    first = FirstBatch(model, RestoredTensors([batch.double(), batch.to_sparse(), Closed()]), lambda: 0)
    model(batch).sum().backward()
    model(batch + 1)
    first.remove()
    assert len(objects) == 4


def test_generators_that_move_between_iterations_name_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop = FetchingLoop(adamw)
    loop.turn(1)
    torch.rand(1)
    loop.turn(MAX_CHECKS + 2)
    *_, last = loop.close()
    generators = state.load_generators(last.rng)
    assert "still" not in generators
    FetchingLoop(adamw, resumed=generators).turn(2)
    assert "random generators" not in caplog.text


@pytest.mark.parametrize("everything", [True, False])
def test_a_later_capture_adds_the_buffers_that_have_changed_since(everything: bool) -> None:
    model = nn.Module()
    for name in ("first", "second", "gone"):
        model.register_buffer(name, torch.zeros(3))
    buffers = Buffers(lambda: dict(model.named_buffers()), everything=everything)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    capture = Capture(Watched(DdpModel(ddp), adamw(nn.Linear(2, 2))), buffers, first=True)
    before = capture.buffers(None)
    assert set(before) == {"first", "second", "gone"}
    model.get_buffer("second").add_(1)
    del model.gone
    after = capture.buffers(before)
    assert {name: later().tolist() for name, later in after.items()} == {
        "first": [0.0] * 3,
        "second": [1.0] * 3,
    }
    assert capture.buffers(after) == after


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: StepLR(o, 2),
    "SequentialLR": lambda o: SequentialLR(o, [StepLR(o, 1), StepLR(o, 2)], [3]),
    "ChainedScheduler": lambda o: ChainedScheduler([StepLR(o, 1), StepLR(o, 2)]),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_a_scheduler_that_is_followed_is_as_it_was(kind: str) -> None:
    """Its state, its class except for identity, its copies and its behaviour."""
    scheduler, alike = (
        SCHEDULERS[kind](torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) for _ in range(2)
    )
    before = type(scheduler)
    steps: list[int] = []
    watch = SchedulerWatch(scheduler, lambda: steps.append(len(steps)))
    assert isinstance(scheduler, before)
    assert (type(scheduler).__name__, type(scheduler).__module__) == (before.__name__, before.__module__)
    arguments = [1.0] if kind == "ReduceLROnPlateau" else []
    for count in range(5):
        for follower in (scheduler, alike):
            follower.optimizer.step()
            follower.step(*arguments)
        assert len(steps) == count + 1
        assert scheduler.state_dict() == alike.state_dict()
    for duplicate in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert type(duplicate) is before
        duplicate.step(*arguments)
    assert len(steps) == 5
    watch.remove()
    assert type(scheduler) is before
    scheduler.step(*arguments)
    assert len(steps) == 5


def test_the_log_says_it_is_checkmate(caplog: pytest.LogCaptureFixture) -> None:
    script = EndScript()
    with caplog.at_level(logging.WARNING, logger="checkmate"):
        for _ in range(2):
            script.loop.backward()
            script.loop.optimizer.step()
            script.loop.optimizer.zero_grad()
            script.draw()
        script.loop.close()
    assert [record.name for record in caplog.records] == ["checkmate"]
