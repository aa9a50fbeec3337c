"""Step records of real training loops, which a real replica follows bit for bit; refused scripts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import checkmate
from checkmate import state
from checkmate.optim.supported import apply_options
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.checks import check_kept
from checkmate.training.errors import RefusedError
from checkmate.training.record import windows
from checkmate.training.record.buffers import EXACT_BYTES, Buffers, fitting, frozen_state
from checkmate.training.record.capture import Watched
from checkmate.training.record.windows import Rotation, Window
from tests.support.training.recorded_loop import RecordedLoop, adamw, loops

TORCHS: dict[str, Any] = {
    name: getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "clip_grads_with_norm_")
}
imported, also_imported = TORCHS.values()


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with loops():
        yield


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_several_groups_a_schedule_clipping_and_missing_gradients(options: dict[str, bool]) -> None:
    loop = RecordedLoop(
        lambda model: adamw(model, **options),
        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=20),
    )
    for iteration in range(6):
        loop.backward(more=iteration % 3 == 1)
        norm = checkmate.clip_grad_norm_(loop.model.parameters(), 0.5)
        assert norm > 0.5
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
    parts = loop.close()
    assert [part.step.last for part in parts] == [False] * 5 + [True]
    assert all(len(part.step.scalings) == 1 for part in parts)
    assert parts[0].step.without_gradient
    assert not parts[1].step.without_gradient


def test_the_next_iteration_begins_with_what_schedulers_have_left() -> None:
    loop = RecordedLoop(adamw, scheduler=lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=20))
    starts, ends = [], []
    for _ in range(4):
        loop.backward()
        starts.append([dict(group) for group in loop.optimizer.param_groups])
        loop.optimizer.step()
        loop.scheduler.step()
        ends.append(([dict(g) for g in loop.optimizer.param_groups], loop.scheduler.state_dict()))
    for part, before, (after, scheduler) in zip(loop.close(), starts, ends, strict=True):
        for group, texts in ((before, part.step.options), (after, part.step.next_options)):
            for options, text in zip(group, texts, strict=True):
                restored: dict[str, Any] = {}
                apply_options(restored, text)
                assert restored == {key: value for key, value in options.items() if key != "params"}
        assert state.loads(part.step.scheduler) == scheduler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_that_scales_and_skips(fused: bool, unscale: bool) -> None:
    loop = RecordedLoop(
        lambda model: adamw(model, fused=fused),
        scaler=lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2),
    )
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0):
        loop.backward(factor=factor)
        if unscale:
            loop.scaler.unscale_(loop.optimizer)
            checkmate.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()
    parts = loop.close()
    assert [part.step.skipped for part in parts] == [False, False, True, False, False]
    assert state.loads(parts[-1].step.scaler) == loop.scaler.state_dict()
    scales = [part.step.scalings[0].factor for part in parts]
    assert scales == [f if fused and not unscale else 1 / f for f in (4096, 4096, 8192, 4096, 4096)]
    assert vars(loop.scaler).keys() & {"step", "unscale_"} == set()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_a_scaler_skips(fused: bool, unscale: bool) -> None:
    """A fused optimizer is called, creates its state, and skips by itself; others are not called."""
    loop = RecordedLoop(lambda m: adamw(m, fused=fused), scaler=lambda _: torch.amp.GradScaler("cpu"))
    loop.backward(factor=float("inf"))
    if unscale:
        loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()
    (part,) = loop.close()
    assert part.step.skipped
    assert bool(part.step.options) == bool(loop.optimizer.state) == fused


def test_a_script_that_leaves_a_step_out_after_unscaling() -> None:
    """The next fused step unscales by itself again."""
    loop = RecordedLoop(
        lambda m: adamw(m, fused=True), scaler=lambda _: torch.amp.GradScaler("cpu", init_scale=64.0)
    )
    for left_out in (False, True, False):
        loop.backward()
        if left_out:
            loop.scaler.unscale_(loop.optimizer)
        else:
            loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()
    assert [part.step.skipped for part in loop.close()] == [False, True, False]


def test_who_is_named_twice_is_clipped_twice() -> None:
    """Tied weights are, if a script lists the parameters of both modules."""
    loop = RecordedLoop(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    loop.backward()
    checkmate.clip_grad_norm_([*loop.model.parameters(), *loop.model.first.parameters()], 0.01)
    loop.optimizer.step()
    (part,) = loop.close()
    assert list(part.step.scalings[0].parameters).count(0) == 2


def test_accumulated_gradients_are_one_iteration() -> None:
    loop = RecordedLoop(adamw)
    for _ in range(3):
        with loop.ddp.no_sync():
            loop.ddp(torch.randn(4, 8)).sum().backward()
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert len(loop.close()) == 3


def test_a_backward_without_a_step_is_skipped_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    loop = RecordedLoop(adamw)
    for iteration in range(4):
        loop.backward()
        if iteration != 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    with caplog.at_level(logging.WARNING):
        parts = loop.close()
    assert [part.step.skipped for part in parts] == [False, True, False, False]
    assert "iteration 1: a backward without optimizer.step()" in caplog.text
    assert "use ddp.no_sync(), or with FSDP set_requires_gradient_sync(False)" in caplog.text


def test_an_iteration_without_its_step_is_not_resumed_from() -> None:
    """After an error between backward and step, "skipped" would lose its update."""
    for last in (True, False):
        loop = RecordedLoop(adamw)
        for iteration in range(3):
            loop.backward()
            if iteration < 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        loop.recorder.close(last)
        assert [noted.iteration for noted in loop.emitted] == [0, 1]


def test_an_iteration_after_an_error_is_not_resumed_from() -> None:
    """It has the optimizer's step, but perhaps not the scheduler's."""
    loop = RecordedLoop(adamw)
    for _ in range(2):
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.recorder.close(last=False)
    assert [noted.iteration for noted in loop.emitted] == [0]


def test_a_scaler_of_two_optimizers_says_what_ours_did() -> None:
    loop = RecordedLoop(adamw, scaler=lambda _: torch.amp.GradScaler("cpu"))
    parameter = nn.Parameter(torch.ones(3))
    second = torch.optim.SGD([parameter], lr=0.1)
    loop.backward()
    parameter.grad = torch.full((3,), math.inf)
    loop.scaler.step(loop.optimizer)
    loop.scaler.step(second)
    loop.scaler.update()
    loop.optimizer.zero_grad()
    assert [part.step.skipped for part in loop.close()] == [False]


def test_buffers_are_sent_as_they_change() -> None:
    loop = RecordedLoop(adamw)
    buffers = {}
    for iteration in range(3):
        loop.backward()
        loop.optimizer.step()
        if iteration == 1:
            loop.model.norm.eval()  # its statistics do not change
        buffers[iteration] = {name: tensor.clone() for name, tensor in loop.model.named_buffers()}
    parts = loop.close()
    for part in parts[:2]:
        changes = state.loads(part.buffers)
        assert changes.keys() == buffers[0].keys()
        assert all(torch.equal(changes[name], buffers[part.iteration][name]) for name in changes)
    assert parts[2].buffers == b""


def test_random_states_and_extra_are_those_after_the_step() -> None:
    position = {"at": 0}
    loop = RecordedLoop(adamw, extra=lambda: position)
    expected = []
    for at in range(3):
        loop.backward()
        position["at"] = at
        loop.optimizer.step()
        expected.append(torch.get_rng_state())
        torch.rand(7)  # the next batch
        position["at"] = 99
    for at, part in enumerate(loop.close()):
        assert torch.equal(state.load_generators(part.rng)["torch"], expected[at])
        assert state.loads(part.extra) == {"at": at}
        assert [(end.channel, end.shard, end.end) for end in part.ends] == [(0, 0, 100 * at)]


def test_slices_come_round_all_parameters_and_their_state() -> None:
    loop = RecordedLoop(adamw)
    for more in (False, True):
        loop.backward(more=more)
        loop.optimizer.step()
    numbers, entries = range(len(loop.parameters)), ("", "step", "exp_avg", "exp_avg_sq")
    first, second = ({(piece.parameter, piece.state) for piece in part.step.slices} for part in loop.close())
    assert {number for number, _ in first} == set(numbers)
    assert second == {(number, entry) for number in numbers for entry in entries}


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: TORCHS["clip_grad_norm_"](loop.model.parameters(), 1e-3),
        lambda loop: torch.nn.utils.clip_grad_value_(loop.model.parameters(), 1e-9),
        lambda loop: [p.grad.data.mul_(0.5) for p in loop.parameters if p.grad is not None],
        lambda loop: loop.model.first.weight.grad.numpy().fill(3),
        lambda loop: setattr(loop.model.first.weight, "grad", torch.ones_like(loop.model.first.weight)),
        lambda loop: setattr(loop.model.first.weight.grad, "data", torch.ones_like(loop.model.first.weight)),
        lambda loop: setattr(loop.model.first.weight, "grad", None),
    ],
)
def test_gradients_changed_behind_our_back_are_refused(change: Callable[[RecordedLoop], object]) -> None:
    loop = RecordedLoop(adamw)
    loop.backward()
    change(loop)
    with pytest.raises(RefusedError, match=r"gradient of .* was changed .* checkmate\.clip_grad_norm_"):
        loop.optimizer.step()


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: torch.nn.utils.clip_grad.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: imported(parameters, 1e-3),
        lambda parameters: torch.nn.utils.clip_grads_with_norm_(parameters, 1e-3, torch.tensor(2.0)),
        lambda parameters: also_imported(parameters, 1e-3, torch.tensor(2.0)),
    ],
)
def test_torchs_own_clipping_is_followed(clip: Callable[..., object]) -> None:
    loop = RecordedLoop(adamw)
    loop.backward()
    clip(list(loop.model.parameters()))
    loop.optimizer.step()
    (part,) = loop.close()
    (scaling,) = part.step.scalings
    assert 0 < scaling.factor < 1


def test_torchs_names_are_torchs_again_after_the_end() -> None:
    loop = RecordedLoop(adamw)
    assert imported is torch.nn.utils.clip_grad_norm_ is checkmate.clip_grad_norm_
    loop.close()
    for name, function in TORCHS.items():
        assert getattr(torch.nn.utils, name) is function
    assert (imported, also_imported) == tuple(TORCHS.values())


@pytest.mark.parametrize("name", TORCHS)
def test_our_clipping_may_take_the_place_of_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a framework that clips by itself, such as torchtitan."""
    monkeypatch.setattr(torch.nn.utils, name, getattr(checkmate, name))
    loop = RecordedLoop(adamw)
    loop.backward()
    parameters = list(loop.model.parameters())
    norms = {"total_norm": torch.tensor(2.0)} if name == "clip_grads_with_norm_" else {}
    getattr(torch.nn.utils, name)(parameters, 1e-3, **norms)
    loop.optimizer.step()
    (part,) = loop.close()
    (scaling,) = part.step.scalings
    assert 0 < scaling.factor < 1


def test_clipping_that_clips_nothing_is_no_change() -> None:
    loop = RecordedLoop(adamw)
    loop.backward()
    TORCHS["clip_grad_norm_"](loop.model.parameters(), 1e9)
    loop.optimizer.step()
    loop.close()


def test_a_scaler_that_was_not_given_is_noticed() -> None:
    loop = RecordedLoop(adamw)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.ddp(torch.randn(4, 8)).sum()).backward()
    loop.recorder.reduced(0)
    with pytest.raises(RefusedError, match="pass scaler= to checkmate.restore and checkmate.protect"):
        scaler.step(loop.optimizer)


def test_other_things_that_cannot_be_followed() -> None:
    loop = RecordedLoop(adamw)
    with pytest.raises(RefusedError, match="without a backward of its own"):
        loop.optimizer.step()
    loop = RecordedLoop(adamw)
    with pytest.raises(RefusedError, match="call backward.. before step.., and step.. without a closure"):
        loop.optimizer.step(lambda: 1.0)
    loop = RecordedLoop(adamw)
    loop.backward()
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RefusedError, match="parameter groups were changed"):
        loop.optimizer.step()


def test_no_closure_may_be_given_as_an_argument() -> None:
    """Like Accelerate's `step(self, closure=None)`, which hands it on."""
    loop = RecordedLoop(adamw)
    loop.backward()
    loop.optimizer.step(None)
    loop.backward()
    loop.optimizer.step(closure=None)


def test_a_second_step_on_the_same_gradients() -> None:
    loop = RecordedLoop(adamw)
    loop.backward()
    loop.optimizer.step()
    with pytest.raises(RefusedError, match="without a backward of its own"):
        loop.optimizer.step()


def test_what_the_background_finds_is_raised_in_the_script() -> None:
    loop = RecordedLoop(adamw)
    loop.error = state.StateError("extra: a generator can't be kept")
    loop.backward()
    with pytest.raises(state.StateError, match="a generator"):
        loop.optimizer.step()


def test_without_protection_clipping_is_torchs() -> None:
    torch.manual_seed(1)
    first, second = ([nn.Parameter(torch.zeros(30)) for _ in range(3)] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        a.grad = torch.randn(30)
        b.grad = a.grad.clone()
    norm = checkmate.clip_grad_norm_(iter(first), 1.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(second, 1.0))
    for a, b in zip(first, second, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_buffers_that_no_record_can_hold_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    for name, size in (("small", 10), ("large", 1000), ("middle", 100)):
        model.register_buffer(name, torch.zeros(size))
    find = fitting(lambda: dict(model.named_buffers()), most=4 * 200)
    assert list(find()) == ["small", "middle"]
    assert "to restore them itself: large" in caplog.text
    assert list(fitting(lambda: dict(model.named_buffers()))()) == ["small", "large", "middle"]


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.ones(3).as_subclass(type("Labelled", (torch.Tensor,), {})), "Labelled"),
        (torch.ones(3, dtype=torch.complex64).conj(), ""),
        (torch.ones(1).expand(5), ""),
        (torch.ones(2).half(), ""),
    ],
)
def test_buffers_that_cannot_be_kept_are_refused(tensor: torch.Tensor, kind: str) -> None:
    """Before training begins, and not with the first record."""
    loop = RecordedLoop(adamw)
    loop.model.last.register_buffer("odd", tensor)
    watched = Watched(loop.wrapped, loop.optimizer)
    if not kind:
        check_kept(watched)
        return
    with pytest.raises(state.StateError, match=f"last.odd, a buffer .* can't be kept because it is {kind}: "):
        check_kept(watched)


def test_buffers_are_sent_again_for_a_node_that_comes_back() -> None:
    model = nn.Module()
    for name in ("running", "frozen"):
        model.register_buffer(name, torch.zeros(3))
    buffers = Buffers(lambda: dict(model.named_buffers()), everything=True)
    assert set(buffers.take()) == {"running", "frozen"}
    assert not buffers.take()
    buffers.again()
    assert set(buffers.take()) == {"running", "frozen"}
    assert not buffers.take()


def test_all_buffers_at_once_are_as_they_are_now() -> None:
    model = nn.Module()
    for number in range(5):
        model.register_buffer(f"b{number}", torch.full((10,), float(number)))
    buffers = Buffers(lambda: dict(model.named_buffers()), everything=True)
    lots = list(buffers.all(most=80))  # two of them have as many bytes
    assert [sorted(lot) for lot in lots] == [["b0", "b1"], ["b2", "b3"], ["b4"]]
    buffers.take()
    model.get_buffer("b3").add_(1)
    assert lots[1]["b3"]().tolist() == [3.0] * 10  # it is a copy
    assert set(buffers.take()) == {"b3"}


def test_a_buffer_that_the_model_drops_is_not_promised_any_more() -> None:
    model = nn.Module()
    for name in ("running", "warmup"):
        model.register_buffer(name, torch.zeros(3))
    buffers = Buffers(lambda: dict(model.named_buffers()), everything=True)
    assert buffers.names == {"running", "warmup"}
    assert set(buffers.take()) == {"running", "warmup"}
    del model.warmup
    buffers.take()
    assert buffers.names == {"running"}
    buffers.again()
    assert set(buffers.take()) == {"running"}
    model.register_buffer("warmup", torch.zeros(3))
    assert set(buffers.take()) == {"warmup"}
    assert buffers.names == {"running", "warmup"}


def test_buffers_of_a_rank_of_its_own_come_again_and_again() -> None:
    """If DDP doesn't share them, each record has all that ever changed: a node keeps one record only."""
    model = nn.Module()
    for name in ("once", "before", "never"):
        model.register_buffer(name, torch.zeros(EXACT_BYTES))
    model.register_buffer("number", torch.tensor(7))  # small: recorded whether changed or not
    buffers = Buffers(lambda: dict(model.named_buffers()), everything=False, changed_before=["before"])
    assert set(buffers.take()) == {"before", "number"}
    dict(model.named_buffers())["once"].add_(1)
    assert set(buffers.take()) == {"before", "number", "once"}
    assert set(buffers.take()) == {"before", "number", "once"}


def test_state_of_frozen_parameters_is_said_when_it_changes() -> None:
    """Detected by version, except for values as small as a number."""
    frozen, trained = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([trained, frozen])
    buffers = Buffers(lambda: frozen_state(optimizer, {trained}, lambda: {"body.w": frozen}), everything=True)
    total, count = (f'optimizer.state[1][{n}]["body.w"].{e} (tensor)' for n, e in ((1, "sum"), (0, "step")))
    assert buffers.names == {total, count}
    assert set(buffers.take()) == {total, count}
    assert set(buffers.take()) == set()
    optimizer.state[frozen]["sum"].add_(1)
    assert set(buffers.take()) == {total}
    optimizer.state[frozen]["step"].data.add_(1)
    assert set(buffers.take()) == {count}
    optimizer.state[frozen]["step"] = 7  # as torch once had it
    now = buffers.take()
    assert {name: later().item() for name, later in now.items()} == {count.replace("tensor", "int"): 7}
    assert buffers.names == {total, count.replace("tensor", "int")}
    optimizer.state[frozen]["step"] = None
    assert set(buffers.take()) == {count.replace("tensor", "NoneType")}
    assert set(buffers.take()) == set()


SIZES = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4)


@given(st.lists(SIZES, max_size=6), st.integers(8, 100), st.sampled_from([1, 20, 1000]))
def test_windows_go_round_every_element_once(
    sizes: list[list[tuple[int, int]]], nbytes: int, least: int
) -> None:
    """Every element of each parameter, and of each entry of its state."""
    entries = [[(f"entry{i}", *size) for i, size in enumerate(states)] for states in sizes]
    elements = [
        (number, name, i) for number, states in enumerate(entries) for name, n, _ in states for i in range(n)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_BYTES", least)
        rotation = Rotation(range(len(sizes)), entries.__getitem__, nbytes)
        visited: list[tuple[int, str, int]] = []
        while len(visited) < len(elements):
            chunk = rotation.next()
            width = {
                (number, name): size for number, states in enumerate(entries) for name, _, size in states
            }
            sizes_sent = [(w.stop - w.start) * width[w.parameter, w.state] for w in chunk]
            assert 0 < sum(sizes_sent) <= nbytes
            assert sum(max(n, least) for n in sizes_sent[:-1]) < nbytes
            visited += [(w.parameter, w.state, i) for w in chunk for i in range(w.start, w.stop)]
        assert visited == elements
        again = rotation.next()  # the rest is empty, or it has begun again
        assert not elements or (again or rotation.next())[0].start == 0


def test_suspects_come_first_and_leave_the_others_their_turn() -> None:
    entries = {0: [("", 10_000, 4)], 1: [("", 10_000, 4), ("step", 1, 1)]}
    rotation = Rotation([0, 1], entries.__getitem__, 16_384)
    rotation.next()
    rotation.look_first(
        [
            pb.Suspect(parameter=1, start=8_001, stop=20_000),
            pb.Suspect(parameter=1, state="step", stop=1),
            pb.Suspect(parameter=1, state="gone", stop=8),
        ]
    )
    assert rotation.next() == [Window(1, "", 2_000, 4_048), Window(0, "", 4_096, 6_144)]
    rotation.look_first([pb.Suspect(parameter=0, stop=4)])  # these follow all of the first ones
    assert rotation.next()[:-1] == [Window(1, "", 4_048, 5_000), Window(1, "step", 0, 1)]
    assert rotation.next()[0] == Window(0, "", 0, 1)
    assert len(rotation.next()) == 1


def test_suspects_of_other_shards_replace_none_of_these() -> None:
    rotation = Rotation([0], {0: [("", 10_000, 4)]}.__getitem__, 16_384)
    rotation.look_first([pb.Suspect(parameter=0, start=30_000, stop=30_004)])
    rotation.look_first([])
    assert rotation.next()[0] == Window(0, "", 7_500, 7_501)


def test_windows_follow_state_that_comes_and_goes() -> None:
    entries = {0: [("", 10, 4)], 1: [("", 1, 4)]}
    rotation = Rotation([0, 1], entries.__getitem__, 32)
    assert rotation.next() == [Window(0, "", 0, 8)]
    entries[0] = [("", 10, 4), ("step", 1, 1)]
    assert rotation.next() == [Window(0, "", 8, 10)]  # it counts as all bytes of a record
    assert rotation.next() == [Window(0, "step", 0, 1)]
    entries[0] = [("", 10, 4)]
    assert rotation.next() == [Window(1, "", 0, 1)]
    assert rotation.next() == [Window(0, "", 0, 8)]
