"""Scripts that shadow nodes can't follow are refused before the record of what they did leaves."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

import checkmate
from checkmate import state
from checkmate.job.schema import ShadowNode
from checkmate.optim.several import SeveralOptimizers, members_of
from checkmate.optim.supported import kind_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.checks import check_schedulers, watched_of
from checkmate.training.errors import RefusedError
from checkmate.training.loop import Loop as Batches
from checkmate.training.record import windows
from checkmate.training.record.capture import RecordDraft, same
from checkmate.training.record.publisher import Publisher, to_part
from checkmate.training.record.step_checks import LeftGradients
from checkmate.training.record.wrapped import class_of
from checkmate.training.start.install import InstallError, install_buffers, install_gradients
from tests.support.training.recorded_loop import AUTHOR, LoopModel, RecordedLoop, adamw, loops


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with loops():
        yield


def iterate(loop: RecordedLoop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def emitted(loop: RecordedLoop) -> list[int]:
    return [draft.iteration for draft in loop.emitted]


def change_by_hand(loop: RecordedLoop) -> None:
    with torch.no_grad():
        for parameter in loop.parameters:
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("marked", [False, True])
def test_updates_by_hand_instead_of_a_step_are_refused_in_their_iteration(marked: bool) -> None:
    """No step of the protected optimizer follows, in which the change could be noticed later."""
    loop = RecordedLoop(adamw)
    for _ in range(2):
        iterate(loop)
        if marked:
            loop.recorder.mark()
    loop.backward()
    change_by_hand(loop)
    loop.optimizer.zero_grad()
    with pytest.raises(RefusedError, match=r"^iteration 2: parameter \S+ was changed, and not by the step"):
        if marked:
            loop.recorder.mark()
        else:
            loop.backward()
    assert emitted(loop) == [0, 1]
    loop.recorder.close(last=True)
    assert emitted(loop) == [0, 1]


@pytest.mark.parametrize("place", ["before forward", "before step", "after step"])
@pytest.mark.parametrize("marked", [False, True])
def test_weights_that_are_clamped_now_and_then(place: str, marked: bool) -> None:
    """Wherever in the loop, the record of the iteration that has the change does not leave."""
    loop = RecordedLoop(adamw)
    with pytest.raises(RefusedError, match=r"^iteration \d: parameter \S+ was changed"):
        for iteration in range(6):
            for now in ("before forward", "before step", "after step"):
                if iteration == 3 and now == place:
                    loop.model.first.weight.data.clamp_(-0.01, 0.01)
                if now == "before forward":
                    loop.backward()
                elif now == "before step":
                    loop.optimizer.step()
            if marked:
                loop.recorder.mark()
    assert max(emitted(loop)) == (1 if place == "before forward" else 2)


def test_another_optimizer_of_the_same_parameters_is_refused_before_it_steps() -> None:
    loop = RecordedLoop(adamw)
    optimizer = torch.optim.SGD(loop.model.last.parameters(), lr=0.1)
    loop.backward()
    before = loop.model.last.weight.detach().clone()
    with pytest.raises(
        RefusedError,
        match=r"^an SGD is about to step last\.weight \(.*test_refusals\.py:\d+\), but .* an AdamW",
    ):
        optimizer.step()
    assert torch.equal(loop.model.last.weight, before)
    loop.recorder.close(last=False)
    optimizer.step()
    assert not torch.equal(loop.model.last.weight, before)


@pytest.mark.parametrize("extra", [None, dict])
def test_other_optimizers_of_other_parameters_are_the_scripts_business(
    extra: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A second model is not restored. If `extra()` keeps nothing, a warning says so."""
    loop = RecordedLoop(adamw, extra=extra)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2)).sum().backward()
    for _ in range(2):
        iterate(loop)
        optimizer.step()
    assert len(loop.close()) == 2
    assert loop.recorder._checks._named_foreign == (extra is None)
    assert extra or "an SGD steps parameters that are not of the protected model" in caplog.text


CHANGES: dict[str, Callable[[RecordedLoop], object]] = {
    "cleared": lambda loop: loop.optimizer.state.clear(),
    "one entry": lambda loop: loop.optimizer.state[loop.parameters[0]]["exp_avg"].zero_(),
    "a count": lambda loop: loop.optimizer.state[loop.parameters[0]]["step"].add_(1),
    "a parameter's": lambda loop: loop.optimizer.state.pop(loop.parameters[0]),
}


def test_a_change_on_another_rank_alone_is_refused_there() -> None:
    """Its part of the record does not leave, so the iteration is on no node as a whole."""
    loop = RecordedLoop(adamw, first=False)
    iterate(loop)
    loop.model.last.weight.data.mul_(2)
    with pytest.raises(RefusedError, match=r"^iteration 0: parameter last\.weight was changed"):
        loop.recorder.mark()
    loop.recorder.close(last=False)
    assert emitted(loop) == []


@pytest.mark.parametrize("change", list(CHANGES))
def test_optimizer_state_changed_by_hand_is_refused(change: str) -> None:
    loop = RecordedLoop(adamw)
    for _ in range(2):
        iterate(loop)
    CHANGES[change](loop)
    with pytest.raises(RefusedError, match=r"^iteration 1: \w+ of parameter \S+ was changed"):
        loop.backward()
    assert emitted(loop) == [0]


def test_a_script_that_goes_on_is_refused_again() -> None:
    """A refusal is a RuntimeError, which scripts may catch around a batch."""
    refusals: list[tuple[int, Exception]] = []
    loop = RecordedLoop(adamw)
    loop.recorder._on_refused = lambda iteration, error, marks: refusals.append((iteration, error))
    iterate(loop)
    loop.model.first.weight.data.zero_()
    errors = []
    for _ in range(3):
        with pytest.raises(RefusedError) as excinfo:
            loop.backward()
        errors.append(excinfo.value)
    with pytest.raises(RefusedError) as excinfo:
        loop.recorder.mark()
    assert {id(error) for error in [*errors, excinfo.value]} == {id(loop.recorder.refusal)}
    assert refusals == [(0, loop.recorder.refusal)]
    loop.recorder.close(last=True)
    assert emitted(loop) == []


def test_nodes_compare_slices_of_iterations_without_a_step_too() -> None:
    loop = RecordedLoop(adamw)
    for stepped in (True, False, True):
        loop.backward()
        if stepped:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert all(part.step.slices for part in loop.close())


def test_one_element_of_a_large_model_is_compared_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows cover a part of it; a write that PyTorch counts brings that parameter's turn forward."""
    monkeypatch.setattr(windows, "SLICE_BYTES", 512)
    monkeypatch.setattr(windows, "PARAMETER_BYTES", 64)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 64)
    loop = RecordedLoop(adamw)
    for rotation in loop.recorder._slices._rotations:
        rotation._nbytes = 512
    for _ in range(3):
        iterate(loop)
    number = next(n for n, p in enumerate(loop.parameters) if p is loop.model.first.weight)
    with torch.no_grad():
        loop.model.first.weight[15, 7] += 0.0  # written, and not changed
    iterate(loop)
    iterate(loop)
    parts = loop.close()
    assert {piece.parameter for piece in parts[3].step.slices if not piece.state} >= {number}


@pytest.mark.parametrize("loops", ["steps", "mark"])
def test_two_backwards_in_one_turn_are_refused(loops: str) -> None:
    """`restore` returns a number of backwards, and the loop would leave out as many turns."""
    loop = RecordedLoop(adamw)
    turns = Batches(loop.recorder, None, lambda: True).steps(range(9)) if loops == "steps" else range(9)
    with pytest.raises(RefusedError, match=r"one turn of the loop has 2 or more synchronising backwards"):
        for turn in turns:
            iterate(loop)
            if turn == 2:
                iterate(loop)
            if loops == "mark":
                loop.recorder.mark()
    assert emitted(loop) == [0, 1]


@pytest.mark.parametrize("cleared", [False, True])
def test_two_backwards_with_one_step_in_one_turn(cleared: bool) -> None:
    """Added up, or the first one thrown away."""
    loop = RecordedLoop(adamw)
    with pytest.raises(RefusedError, match=r"one turn of the loop has 2 or more synchronising backwards"):
        for _ in Batches(loop.recorder, None, lambda: True).steps(range(9)):
            loop.backward()
            if cleared:
                loop.optimizer.zero_grad()
            iterate(loop)
    assert emitted(loop) == []


def test_a_first_mark_after_two_iterations() -> None:
    loop = RecordedLoop(adamw)
    iterate(loop)
    iterate(loop)
    with pytest.raises(RefusedError, match=r"one turn of the loop has 2 or more synchronising backwards"):
        loop.recorder.mark()


def test_a_loop_without_marks_before_one_with_steps() -> None:
    loop = RecordedLoop(adamw)
    for _ in range(2):
        iterate(loop)
    for _ in Batches(loop.recorder, None, lambda: True).steps(range(2)):
        iterate(loop)
    assert len(loop.close()) == 4


def test_without_marks_two_places_of_a_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    loop = RecordedLoop(adamw)
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    warnings = [text for text in caplog.messages if "optimizer.step() is called at" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith("iteration 1: ")
    assert warnings[0].count("test_refusals.py:") == 2
    assert len(loop.close()) == 6


def test_places_are_told_apart_by_their_callers(caplog: pytest.LogCaptureFixture) -> None:
    loop = RecordedLoop(adamw)
    for turn in range(4):
        for step in (iterate, iterate)[turn % 2 :]:
            step(loop)
    assert not [text for text in caplog.messages if "optimizer.step() is called at" in text]
    iterate(loop)
    assert [text for text in caplog.messages if "optimizer.step() is called at" in text]
    loop.close()


def test_options_changed_after_an_unmarked_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """In any iteration: the record has the options as they were after the step."""
    loop = RecordedLoop(adamw)
    loop.model.norm.eval()
    for iteration in range(12):
        iterate(loop)
        if iteration == 9:
            loop.optimizer.param_groups[0]["lr"] = 1e-4
    (text,) = [text for text in caplog.messages if "an option of the optimizer changed" in text]
    assert text.startswith("iteration 9: ")
    loop.close()


class Sink:
    """A node that notes which iterations it is sent."""

    node = ShadowNode(id=0, mgmt="127.0.0.1:7000", nics=())

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def send(self, iteration: int, data: bytes) -> None:
        self.iterations.append(iteration)

    def departed(self, iteration: int) -> bool:
        return True


def as_on_a_device(loop: RecordedLoop) -> RecordedLoop:
    """Have its checks take the way of a GPU, on which nothing is known before copies have arrived."""
    checks = loop.recorder._checks
    checks._on_host = checks.gradients._on_host = False
    checks._state._on_host = False
    return loop


DEVICE_CHANGES: dict[str, tuple[Callable[[RecordedLoop], object], str]] = {
    "parameter": (
        lambda loop: loop.model.first.weight.data.zero_(),
        r"^iteration 1: parameter first\.weight was",
    ),
    "state": (lambda loop: loop.optimizer.state.clear(), r"^iteration 1: \w+ of parameter \S+ was changed"),
    "gradient": (
        lambda loop: [p.grad.mul_(2) for p in loop.parameters if p.grad is not None],
        "the gradient of",
    ),
}


@pytest.mark.parametrize("kind", list(DEVICE_CHANGES))
def test_an_answer_of_a_device_holds_its_record_back(kind: str) -> None:
    """It is known when its copies have arrived, in the publisher's thread; the next step has the error."""
    change, words = DEVICE_CHANGES[kind]
    loop = as_on_a_device(RecordedLoop(adamw))
    for turn in range(3):
        loop.backward()
        if turn == 1 and kind == "gradient":
            change(loop)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if turn == 1 and kind != "gradient":
            change(loop)
        loop.recorder.mark()
    loop.recorder.close(last=True)
    sink = Sink()
    publisher = Publisher(pb.RecordPart.FromString(AUTHOR.SerializeToString()), [sink], lambda *_: True)
    for draft in loop.emitted:
        publisher.put(draft)
    publisher.close(5.0)
    assert sink.iterations == [0]
    with pytest.raises(RefusedError, match=words) as caught:
        publisher.await_departed()
    # The script is in a later one by now: nodes, `restore` and `report` show the iteration that was refused.
    assert (caught.value.iteration, publisher.failed_iteration) == (1, 1)


def test_on_a_device_too_optimizers_in_turns_clear_what_they_do_not_step() -> None:
    loop = as_on_a_device(RecordedLoop(two))
    for turn in range(4):
        loop.backward()
        stepping, waiting = members_of(loop.optimizer)[:: 1 if turn % 2 else -1]
        waiting.zero_grad()
        stepping.step()
        stepping.zero_grad()
        loop.recorder.mark()
    for draft in loop.emitted:
        for check in draft.checks:
            check()
    loop.recorder.close(last=False)


def test_marks_of_micro_batches_and_turns_without_a_backward() -> None:
    loop = RecordedLoop(adamw)
    for turn in Batches(loop.recorder, None, lambda: True).steps(itertools.islice(itertools.count(), 9)):
        if turn % 3 == 2:
            iterate(loop)
        elif turn % 3 == 1:
            with loop.ddp.no_sync():
                loop.ddp(torch.randn(4, 8)).sum().backward()
    assert len(loop.close()) == 3


def test_a_mark_passed_over_after_a_backward_that_was_thrown_away(caplog: pytest.LogCaptureFixture) -> None:
    loop = RecordedLoop(adamw)
    with caplog.at_level(logging.WARNING):
        for turn in range(4):
            loop.backward()
            if turn == 1:
                loop.optimizer.zero_grad()
                continue
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.recorder.mark()
    assert len(loop.close()) == 4
    assert "iteration 1 ended without protection.mark(), which others had" in caplog.text


@pytest.mark.parametrize("boundary", ["none", "mark", "missed"])
@pytest.mark.parametrize(("discarded", "training"), [(False, True), (True, True), (False, False)])
def test_gradients_of_a_skipped_step_may_be_cleared_as_late_as_before_the_backward(
    boundary: str, discarded: bool, training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = RecordedLoop(adamw)
    loop.ddp.train(training)  # type: ignore[no-untyped-call]
    with caplog.at_level(logging.WARNING):
        for turn in range(4):
            if discarded:
                loop.ddp(torch.randn(4, 8))
            loss = (loop.ddp(torch.randn(4, 8)) ** 2).sum()
            loop.optimizer.zero_grad()
            loop.backward_of(loss)
            if turn % 2:
                loop.optimizer.step()
            if boundary == "mark" or (boundary == "missed" and turn % 2):
                loop.recorder.mark()
    parts = loop.close()
    assert [part.step.skipped for part in parts] == [True, False] * 2
    ends = [text.split(",")[0] for text in caplog.messages if text.startswith("iteration")]
    assert ends == ["iteration 2 ended without protection.mark()"] * (boundary == "missed")


@pytest.mark.parametrize(
    ("stepped", "warning"), [(False, "a backward without"), (True, "gradients are added")]
)
def test_a_sharded_parameter_has_no_hook_that_sees_a_backward_begin(
    stepped: bool, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = fully_shard(nn.Linear(8, 4), mesh=DeviceMesh("cpu", [0]))
    optimizer = torch.optim.SGD(model.parameters())
    watch = LeftGradients(list(model.parameters()), several=False)
    model.set_all_reduce_hook(lambda flat: watch.on_backward())  # as `ShardedHooks` does
    for iteration in range(4):
        loss = model(torch.randn(4, 8)).sum()
        if iteration < 3:
            optimizer.zero_grad()
        assert not [text for text in caplog.messages if text.startswith("iteration")]
        loss.backward()
        watch.watch(RecordDraft(iteration, {}, stepped_by=[optimizer] * stepped), watch.on_backward)
    (text,) = [text for text in caplog.messages if text.startswith("iteration")]
    assert text.startswith(f"iteration {3 if stepped else 2}: {warning}")


def test_a_parameter_frozen_in_mid_training_is_named_and_one_unfrozen_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = RecordedLoop(adamw)
    iterate(loop)
    loop.model.last.bias.requires_grad_(False)
    for _ in range(3):
        iterate(loop)
    (text,) = [text for text in caplog.messages if "requires_grad=False after" in text]
    assert text.startswith("iteration 0: last.bias got requires_grad=False after checkmate.protect")
    loop.close()


def test_a_parameter_that_is_replaced_is_refused() -> None:
    """The optimizer would go on to step the old one."""
    loop = RecordedLoop(adamw)
    iterate(loop)
    loop.model.last.weight = nn.Parameter(loop.model.last.weight.detach().clone())
    with pytest.raises(
        RefusedError, match=r"^iteration 0: the model has another parameter in the place of last\.weight"
    ):
        loop.backward()
    assert emitted(loop) == []


def test_a_parameter_unfrozen_in_mid_training_is_refused() -> None:
    def freezing(model: nn.Module) -> torch.optim.Optimizer:
        model.get_parameter("last.bias").requires_grad_(False)
        return adamw(model)

    loop = RecordedLoop(freezing)
    iterate(loop)
    loop.model.last.bias.requires_grad_(True)
    with pytest.raises(RefusedError, match=r"^last\.bias got requires_grad=True after checkmate\.protect"):
        loop.backward()


def test_what_is_restored_of_a_buffer_has_its_type_and_bits() -> None:
    """Changes that `torch.equal` does not see: another type, and the sign of a zero."""
    loop = RecordedLoop(adamw)
    loop.model.register_buffer("count", torch.zeros(3, dtype=torch.int32))
    expected: list[torch.Tensor] = []
    for value in (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3),
        -torch.zeros(3),
        torch.zeros(3, dtype=torch.float64),
    ):
        loop.model.count = value
        expected.append(value)
        iterate(loop)
        loop.recorder.mark()
    parts = loop.close()
    for part, value in zip(parts, expected, strict=True):
        recorded = state.loads(part.buffers)["count"]
        assert same(recorded, value), part.iteration
        resumed = RecordedLoop(adamw)
        resumed.model.register_buffer("count", torch.ones(3, dtype=torch.int32))
        install_buffers(resumed.wrapped, {"count": recorded})
        assert same(resumed.model.get_buffer("count"), value)
        resumed.recorder.close(last=False)


class Scaled(nn.Linear):
    """A layer with state of its own, as layers in FP8 have."""

    amax = 0.0

    def get_extra_state(self) -> dict[str, float]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.amax = state["amax"]


def test_extra_state_of_modules_is_recorded_as_it_changes_and_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithScaled(LoopModel):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled(2, 2).requires_grad_(False)

    def model() -> tuple[RecordedLoop, Scaled]:
        with monkeypatch.context() as patch:
            patch.setattr("tests.support.training.recorded_loop.LoopModel", WithScaled)
            loop = RecordedLoop(adamw)
        layer = loop.model.get_submodule("scaled")
        assert isinstance(layer, Scaled)
        return loop, layer

    loop, layer = model()
    for iteration in range(4):
        iterate(loop)
        layer.amax = float(iteration // 2)
        loop.recorder.mark()
    name = "scaled._extra_state"
    recorded = [state.loads(part.buffers) for part in loop.close()]
    assert [state.unpacked(changes[name]) if name in changes else None for changes in recorded] == [
        {"amax": 0.0},
        None,
        {"amax": 1.0},
        None,
    ]
    assert loop.wrapped.state_names()[name] == name
    resumed, layer = model()
    install_buffers(resumed.wrapped, {name: recorded[2][name]})
    assert layer.amax == 1.0
    resumed.recorder.close(last=False)
    with pytest.raises(InstallError, match="no such module"):
        install_buffers(RecordedLoop(adamw).wrapped, {name: recorded[2][name]})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["after", "before", "in place", "never", "accumulated"])
def test_gradients_of_the_iteration_before_are_named(
    how: str, training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run begins without gradients."""
    loop = RecordedLoop(adamw)
    loop.ddp.train(training)  # type: ignore[no-untyped-call]
    for _ in range(4):
        if how == "accumulated":
            with loop.ddp.no_sync():
                loop.ddp(torch.randn(4, 8)).sum().backward()
        x = (loop.ddp(torch.randn(4, 8)) ** 2).sum()
        if how == "before":
            loop.optimizer.zero_grad()
        x.backward()
        loop.iteration += 1
        loop.recorder.reduced(loop.iteration)
        loop.optimizer.step()
        loop.recorder.mark()
        if how in ("after", "in place", "accumulated"):
            loop.optimizer.zero_grad(set_to_none=how != "in place")
    warnings = [text for text in caplog.messages if "which no zero_grad() has cleared" in text]
    assert len(warnings) == (how == "never")
    assert not warnings or warnings[0].startswith("iteration 1: ")
    loop.recorder.close(last=True)


def two(model: nn.Module) -> SeveralOptimizers:
    """Return optimizers of different kinds, each of some of the parameters."""
    names = dict(model.named_parameters())
    head = [p for name, p in names.items() if name.startswith("last")]
    body = [p for name, p in names.items() if not name.startswith("last")]
    groups: list[dict[str, Any]] = [{"params": body[:2]}, {"params": body[2:], "lr": 2e-3}]
    return SeveralOptimizers(
        [torch.optim.AdamW(groups, lr=1e-2), torch.optim.SGD(head, lr=0.1, momentum=0.9)]
    )


def test_several_optimizers_step_in_turns_or_together() -> None:
    """A replica follows each of them; parameters that are not stepped keep their gradients for later."""
    loop = RecordedLoop(two)
    body, head = members_of(loop.optimizer)
    for turn in range(9):
        loop.backward(more=bool(turn % 2))
        stepping = {0: [body], 1: [head], 2: [body, head]}[turn % 3]
        checkmate.clip_grad_norm_([p for stepped in stepping for p in stepped.param_groups[0]["params"]], 0.1)
        for optimizer in stepping:
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
        loop.recorder.mark()
    parts = loop.close()
    assert [len(part.step.options) for part in parts] == [3] * 9
    assert len(parts[0].step.without_gradient) > len(parts[2].step.without_gradient)


@pytest.mark.parametrize("turned", [False, True])
def test_options_of_each_optimizer_are_those_of_its_own_step(turned: bool) -> None:
    """Its scheduler may change them before the other one steps, whichever comes first."""
    loop = RecordedLoop(two)
    for _ in range(3):
        loop.backward()
        for optimizer in members_of(loop.optimizer)[:: -1 if turned else 1]:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.zero_grad()
        loop.recorder.mark()
    loop.close()


def test_with_several_optimizers_nodes_compare_everything_in_time() -> None:
    loop = RecordedLoop(two)
    for rotation in loop.recorder._slices._rotations:
        rotation._nbytes = 64
    compared = set[tuple[int, str, int]]()
    for _ in range(300):
        loop.backward(more=True)
        for optimizer in members_of(loop.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        loop.recorder.mark()
    for part in loop.close():
        for piece in part.step.slices:
            places = range(piece.offset, piece.offset + max(len(piece.data), 1))
            compared |= {(piece.parameter, piece.state, place) for place in places}
    whole = sum(p.nbytes for p in loop.parameters)
    assert len({window for window in compared if not window[1]}) == whole


def test_a_turn_that_a_break_ends_is_checked() -> None:
    """The script goes on after its loop, so the iteration counts."""
    loop = RecordedLoop(adamw)
    turns = Batches(loop.recorder, None, lambda: True)
    for turn in turns.steps(range(9)):
        iterate(loop)
        if turn == 2:
            loop.model.first.weight.data.clamp_(-0.01, 0.01)
            break
    with pytest.raises(RefusedError, match=r"^iteration 2: parameter first\.weight was changed"):
        for _ in turns.steps(range(9)):
            iterate(loop)
    assert emitted(loop) == [0, 1]


def test_an_error_that_leaves_the_loop_is_the_scripts_own() -> None:
    loop = RecordedLoop(adamw)
    with pytest.raises(ArithmeticError):
        for turn in Batches(loop.recorder, None, lambda: True).steps(range(9)):
            iterate(loop)
            if turn == 2:
                loop.model.first.weight.data.clamp_(-0.01, 0.01)
                raise ArithmeticError
    loop.recorder.close(last=False)
    assert emitted(loop) == [0, 1]
    assert loop.recorder.refusal is None


def test_a_last_iteration_without_a_step_is_checked_at_the_end() -> None:
    loop = RecordedLoop(adamw)
    iterate(loop)
    loop.backward()
    change_by_hand(loop)
    loop.optimizer.zero_grad()
    with pytest.raises(RefusedError, match=r"^iteration 1: "):
        loop.recorder.close(last=True)
    assert emitted(loop) == [0]


def test_hooks_of_the_script_come_before_ours() -> None:
    """Whenever it registers them: what they do to gradients and options is seen."""
    loop = RecordedLoop(adamw)

    def warm_up(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 1.5

    loop.optimizer.register_step_pre_hook(warm_up)
    for _ in range(3):
        iterate(loop)

    def double(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        for parameter in loop.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    loop.optimizer.register_step_pre_hook(double)
    loop.backward()
    with pytest.raises(RefusedError, match="gradient of"):
        loop.optimizer.step()
    loop.recorder.close(last=False)
    loop.iteration -= 1  # which was refused
    loop.follow()


def test_hooks_after_a_step_come_after_ours() -> None:
    """Even if they were registered before: what they do to parameters is seen."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        def shift(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
            model.get_parameter("last.bias").data.add_(1)

        hooked = adamw(model)
        hooked.register_step_post_hook(shift)
        return hooked

    loop = RecordedLoop(make)
    loop.backward()
    loop.optimizer.step()
    with pytest.raises(RefusedError, match=r"^iteration 0: parameter last\.bias was changed"):
        loop.recorder.mark()


class Container(torch.optim.Optimizer):
    """Optimizers in one, as torchtitan has them: with groups of its own, and a step that calls theirs."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__(
            [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]], {}
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_of_the_optimizer_may_step() -> None:
    loop = RecordedLoop(adamw)
    container = Container([loop.optimizer])
    for _ in range(2):
        loop.backward()
        container.step()
        container.zero_grad()
    assert len(loop.close()) == 2


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_not_enabled_need_not_be_given(enabled: bool, fused: bool) -> None:
    loop = RecordedLoop(lambda model: adamw(model, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled)
    loop.backward()
    scaler.scale(torch.ones(()))

    def library(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)

    if enabled:
        with pytest.raises(RefusedError, match="a GradScaler steps the AdamW, but was not given"):
            library(loop.optimizer)
    else:
        library(loop.optimizer)


def test_one_of_several_optimizers_steps_twice() -> None:
    loop = RecordedLoop(two)
    body, head = members_of(loop.optimizer)
    loop.backward()
    body.step()
    head.step()
    with pytest.raises(RefusedError, match="without a backward of its own"):
        body.step()


def test_between_steps_of_several_optimizers_seeds_wait() -> None:
    """Otherwise, they would have half of an iteration."""
    loop = RecordedLoop(two)
    cancelled = threading.Event()
    cancelled.set()
    for number, optimizer in enumerate(members_of(loop.optimizer)):
        if not number:
            loop.backward()
        optimizer.step()
        with loop.steps.still(cancelled) as iteration:
            assert iteration is None
        optimizer.zero_grad()
    loop.recorder.mark()
    loop.backward()  # which begins the next iteration
    cancelled.clear()
    with loop.steps.still(cancelled) as iteration:
        assert iteration == 0
    loop.recorder.close(last=False)


def test_changes_between_the_steps_of_two_optimizers_are_refused() -> None:
    loop = RecordedLoop(two)
    body, head = members_of(loop.optimizer)
    loop.backward()
    body.step()
    loop.model.first.weight.data.mul_(2)
    with pytest.raises(RefusedError, match=r"^iteration 0: parameter first\.weight was changed"):
        head.step()


def test_the_state_of_several_optimizers_is_that_of_one_with_all_groups() -> None:
    loop = RecordedLoop(two)
    for _ in range(2):
        loop.backward()
        for optimizer in members_of(loop.optimizer):
            optimizer.step()
    several = loop.optimizer
    saved_state = copy.deepcopy(several.state_dict())
    count = len(list(loop.model.parameters()))
    assert sorted(n for group in saved_state["param_groups"] for n in group["params"]) == [*range(count)]
    restored = two(copy.deepcopy(loop.model))
    restored.load_state_dict(saved_state)
    assert same(restored.state_dict(), saved_state)
    assert same(
        [member.state_dict() for member in restored.members],
        [member.state_dict() for member in members_of(several)],
    )
    with pytest.raises(ValueError, match="2 parameter groups, not 3"):
        restored.load_state_dict({**saved_state, "param_groups": saved_state["param_groups"][:2]})
    loop.recorder.close(last=False)


def test_what_several_optimizers_must_be() -> None:
    loop = RecordedLoop(adamw)
    loop.recorder.close(last=False)
    model, parameters = loop.wrapped, list(loop.model.parameters())
    first, second = torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:])
    watched = watched_of(model, [first, second], None, None)
    assert members_of(watched.optimizer) == (first, second)
    for wrong in ([], [first, "second"]):
        with pytest.raises(RefusedError, match="^optimizer= is a list of .*: pass an optimizer, or several"):
            watched_of(model, wrong, None, None)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="each must step parameters of its own"):
        watched_of(model, [first, torch.optim.SGD(parameters, lr=0.1)], None, None)
    with pytest.raises(RefusedError, match="use bfloat16"):
        watched_of(model, [first, second], None, torch.amp.GradScaler("cpu"))
    schedulers = [StepLR(first, 1), StepLR(second, 2)]
    with pytest.raises(RefusedError, match="not given|beside scheduler="):
        check_schedulers(watched_of(model, [first, second], schedulers[0], None))
    watched = watched_of(model, [first, second], schedulers, None)
    check_schedulers(watched)
    assert class_of(watched.scheduler) == "SeveralSchedulers(StepLR, StepLR)"
    saved_state = copy.deepcopy(watched.scheduler.state_dict())
    for optimizer, scheduler in zip((first, second), schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    assert not same(watched.scheduler.state_dict(), saved_state)
    watched.scheduler.load_state_dict(saved_state)
    assert same(watched.scheduler.state_dict(), saved_state)
    spec = spec_of(watched.optimizer, {p: n for n, p in enumerate(parameters)})
    assert [kind_of(spec, group) for group in spec.groups] == ["torch.optim.SGD", "torch.optim.Adam"]


def test_a_teacher_that_is_changed_through_data_is_recorded() -> None:
    """PyTorch's version counter does not show it; a few elements do."""
    loop = RecordedLoop(adamw)
    teachers = [nn.Parameter(torch.zeros(50), requires_grad=False) for _ in range(20)]
    for number, teacher in enumerate(teachers):
        loop.model.register_parameter(f"teacher{number}", teacher)
    recorded = dict[str, torch.Tensor]()
    for iteration in range(8):
        iterate(loop)
        if iteration >= 4:
            for teacher in teachers:
                teacher.data.add_(1)
        loop.recorder.mark()
        if iteration > 4:
            part = to_part(AUTHOR, loop.emitted[-1])
            recorded |= state.loads(part.buffers)
            for number in range(len(teachers)):
                assert set(recorded[f"teacher{number}"].tolist()) == {iteration - 4.0}
    loop.close()


def test_a_scheduler_made_after_protect_is_refused_at_the_next_step() -> None:
    loop = RecordedLoop(adamw)
    iterate(loop)
    StepLR(loop.optimizer, 1)
    loop.backward()
    with pytest.raises(
        RefusedError, match=r"scheduler that was not given.*make it before checkmate\.restore"
    ):
        loop.optimizer.step()


def test_a_backward_that_does_not_reach_all_parameters_is_explained() -> None:
    """Without find_unused_parameters, DDP does not finish the reduction."""
    loop = RecordedLoop(adamw)
    loop.ddp(torch.randn(4, 8)).sum().backward()  # without `sometimes`, so no `reduced` follows
    with pytest.raises(
        RefusedError, match=r"sometimes\.weight has no gradient: .*find_unused_parameters=True"
    ):
        loop.optimizer.step()


@pytest.mark.parametrize("part", ["a parameter", "state", "a group"])
def test_a_change_after_the_mark_holds_that_record_back(part: str) -> None:
    """A restart would go on without it."""
    loop = RecordedLoop(adamw)
    for _ in range(2):
        iterate(loop)
        loop.recorder.mark()
    if part == "a parameter":
        loop.model.first.weight.data.mul_(2)
    elif part == "state":
        loop.optimizer.state.clear()
    else:
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RefusedError):
        loop.backward()
    assert emitted(loop) == [0]


def test_a_buffer_that_the_first_forward_makes_is_installed() -> None:
    loop = RecordedLoop(adamw)
    loop.model.norm.register_buffer("lazy", None)
    install_buffers(loop.wrapped, {"norm.lazy": torch.ones(3)})
    assert torch.equal(loop.model.norm.get_buffer("lazy"), torch.ones(3))
    with pytest.raises(InstallError, match="the state has a buffer other, which the model lacks"):
        install_buffers(loop.wrapped, {"other": torch.ones(3)})


def test_what_changes_after_an_unmarked_backward_without_a_step_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    position = {"at": 0}
    loop = RecordedLoop(adamw, extra=lambda: position)
    loop.model.norm.eval()
    loop.backward()
    loop.optimizer.zero_grad()
    position["at"] = 1
    loop.backward()
    (text,) = caplog.messages
    assert text.startswith("iteration 0: extra() changed between")


def test_a_first_turn_may_run_another_forward_before_its_mark() -> None:
    """Nobody knows yet that the script marks its iterations."""
    loop = RecordedLoop(adamw)
    for turn in range(3):
        iterate(loop)
        loop.ddp(torch.randn(4, 8))
        assert turn or emitted(loop) == []
        loop.recorder.mark()
    parts = loop.close()
    assert [part.iteration for part in parts] == [0, 1, 2]
    assert all(state.load_generators(part.rng)["marks"] for part in parts)


def test_a_first_turn_may_run_another_forward_before_its_step() -> None:
    loop = RecordedLoop(adamw)
    loop.backward()
    loop.ddp(torch.randn(4, 8))
    checkmate.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    iterate(loop)
    parts = loop.close()
    assert [part.step.skipped for part in parts] == [False, False]
    assert len(parts[0].step.scalings) == 1


def test_without_marks_the_first_record_leaves_with_the_next_backward() -> None:
    loop = RecordedLoop(adamw)
    iterate(loop)
    loop.ddp(torch.randn(4, 8)).sum()
    assert emitted(loop) == []
    iterate(loop)
    assert emitted(loop) == [0]
    assert len(loop.close()) == 2


def test_a_resumed_script_is_known_to_mark_its_turns() -> None:
    """So the first of its turns with two backwards is refused before the record of its first half leaves."""
    refusals: list[tuple[int, bool]] = []
    loop = RecordedLoop(adamw, marking=True)
    loop.recorder._on_refused = lambda iteration, error, marks: refusals.append((iteration, marks))
    iterate(loop)
    with pytest.raises(RefusedError, match="one turn of the loop has 2 or more"):
        iterate(loop)
    assert emitted(loop) == []
    assert refusals == [(0, True)]


@pytest.mark.parametrize("marked", [False, True])
def test_gradients_of_zeros_are_recorded_because_optimizers_step_them(marked: bool) -> None:
    loop = RecordedLoop(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for turn in range(4):
        loop.backward(more=turn == 0)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=turn == 2)
        if marked:
            loop.recorder.mark()
    numbers = [*range(len(loop.parameters))]
    parts = loop.close()
    assert [list(part.step.with_gradient) for part in parts[:3]] == [numbers, numbers, []]
    install_gradients(loop.parameters, {0})
    gradient = loop.parameters[0].grad
    assert gradient is not None and not gradient.any()
    assert all(parameter.grad is None for parameter in loop.parameters[1:])
