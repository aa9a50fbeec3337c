"""Scripts whose gradients hosts copy as optimizers step: each iteration counts once, with what its step uses.

A replica repeats what is recorded and copied, and must have the model's bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import DTYPES
from checkmate.training.checks import watched_of
from checkmate.training.errors import RefusedError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.gradients.ddp_hook import resumed_reduction
from checkmate.training.gradients.part_copies import StepFront
from checkmate.training.loop import Loop
from checkmate.training.model.choosing import model_of
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import RecordDraft
from checkmate.training.record.publisher import to_part
from checkmate.training.record.recorder import Recorder
from checkmate.training.record.windows import Slices
from tests.support.training.alone import alone
from tests.training.test_part_copies import KeptStream, copies_of

AUTHOR: Final = pb.RecordPart(job="a", run="first", start=b"start")
TURNS: Final = 4


class Followed:
    """A script's objects, and a replica of its model that repeats what is recorded and copied."""

    def __init__(self, model: nn.Module, optimizers: Any, folder: Path, **more: Any) -> None:
        self.wrapped = model_of(model, "host", optimizers)
        names = self.wrapped.trained()
        self.parameters = list(names.values())
        self._copies = copies_of(self.wrapped, 1, 0, folder)
        self.copies, streams = self._copies.__enter__()
        self.stream: KeptStream = streams[0]
        watched = watched_of(self.wrapped, optimizers, more.get("scheduler"), None, more.get("extra"))
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        self.layout = self.copies.layout
        self.replica = Replica(self.layout, 0, spec_of(watched.optimizer, numbers), exact=True)
        for number in self.replica.numbers:
            self.replica.load(number, self.parameters[number].detach().clone(), {}, -1)
        self.drafts: list[RecordDraft] = []
        self.recorder = Recorder(
            watched,
            names,
            StepExclusion(0),
            self.drafts.append,
            self.copies.stream_ends,
            Slices(self.layout, self.parameters, watched.optimizer),
            Buffers(self.wrapped.kept_beside, everything=True),
            copies=self.copies,
        )
        front = StepFront(self.wrapped.outer, self.copies, None)
        front.register(self.recorder.reduced, self.recorder.on_backward)
        self._loop = Loop(self.recorder, None, lambda: False)

    def steps(self, turns: Iterable[int]) -> Iterator[int]:
        """Mark the end of each turn."""
        return self._loop.steps(turns)

    def end(self) -> list[str]:
        """End the script, and repeat it. Return what each iteration was; fail if the replica differs."""
        self.recorder.close(last=True)
        kinds = []
        for draft in self.drafts:
            kinds.append("skipped" if draft.skipped() else "stepped")
            gradients, offset = {}, 0
            data = self.stream.iterations[draft.iteration]
            for index, bucket in enumerate(self.layout.buckets):
                dtype = DTYPES[bucket.dtype]
                end = offset + bucket.elements * torch.empty(0, dtype=dtype).element_size()
                gradients[index] = torch.frombuffer(bytearray((data or b"")[offset:end]), dtype=dtype)
                offset = end
            assert self.replica.step(draft.iteration, gradients, to_part(AUTHOR, draft).step) == []
        assert [draft.iteration for draft in self.drafts] == list(range(len(kinds)))
        for number, tensor, _ in self.replica.read(len(kinds) - 1):
            assert torch.equal(tensor, self.parameters[number])
        return kinds


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    torch.manual_seed(0)
    with alone():
        yield


def batch() -> torch.Tensor:
    return torch.randn(8, 4)


class Pair(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.d(self.g(x))
        return result


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.1)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_turn_with_two_backwards_and_two_steps_is_one_iteration(parallel: bool, tmp_path: Path) -> None:
    pair = Pair()
    model: nn.Module = DistributedDataParallel(pair) if parallel else pair
    optimizers = [adam(pair.d), adam(pair.g)]
    script = Followed(model, optimizers, tmp_path)
    for _ in script.steps(range(TURNS)):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            model.zero_grad()
            (sign * model(batch()).mean()).backward()
            optimizer.step()
    assert script.end() == ["stepped"] * TURNS


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("way", ["container", "another method", "eval mode"])
def test_no_forward_of_the_whole_model_is_needed(way: str, marked: bool, tmp_path: Path) -> None:
    pair = Pair()
    model: nn.Module = nn.ModuleDict({"pair": pair}) if way == "container" else pair
    if way == "eval mode":
        model = DistributedDataParallel(pair.eval())
    optimizer = adam(model)
    count = 0
    script = Followed(model, optimizer, tmp_path, extra=lambda: count)
    forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "container": pair,
        "another method": lambda x: pair.d(pair.g(x)),
        "eval mode": model,
    }
    forward = forwards[way]
    for _ in script.steps(range(TURNS)) if marked else range(TURNS):
        optimizer.zero_grad()
        torch.autograd.backward(forward(batch()).mean())
        optimizer.step()
        count += 1
    assert script.end() == ["stepped"] * TURNS
    if marked:
        assert [draft.end.extra for draft in script.drafts] == [1, 2, 3, 4]


def test_micro_batches_after_a_step_do_not_mark_it_again(tmp_path: Path) -> None:
    """Each is drawn from `steps`, and the model's own forward is not called."""
    pair = Pair()
    optimizer, drawn = adam(pair), 0
    script = Followed(pair, optimizer, tmp_path, extra=lambda: drawn)
    for micro in script.steps(range(3 * TURNS)):
        drawn += 1
        pair.d(pair.g(batch())).mean().backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert script.end() == ["stepped"] * TURNS
    assert [draft.end.extra for draft in script.drafts] == [3, 6, 9, 12]


@pytest.mark.parametrize("marked", [False, True])
def test_gradients_that_do_not_accumulate_are_no_iteration(marked: bool, tmp_path: Path) -> None:
    """Such as those of adversarial inputs, which `torch.autograd.grad` returns."""
    model = DistributedDataParallel(Pair())
    optimizer = adam(model)
    script = Followed(model, optimizer, tmp_path)
    for _ in script.steps(range(TURNS)) if marked else range(TURNS):
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).mean(), x)
        optimizer.zero_grad()
        model((x + slope.sign()).detach()).mean().backward()
        optimizer.step()
    assert script.end() == ["stepped"] * TURNS


@pytest.mark.parametrize("left_out", [{1}, {1, 2}, {0}, {3}])
def test_a_mark_that_is_passed_over_ends_the_iteration_before_it(left_out: set[int], tmp_path: Path) -> None:
    model = DistributedDataParallel(Pair())
    optimizer = adam(model)
    script = Followed(model, optimizer, tmp_path)
    script.recorder._mark_from_now_on(looping=False)
    for turn in range(TURNS):
        model(batch()).mean().backward()
        if turn in left_out:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        script.recorder.mark()
    assert script.end() == ["skipped" if turn in left_out else "stepped" for turn in range(TURNS)]


def test_a_step_that_fails_may_be_tried_again_with_other_gradients(tmp_path: Path) -> None:
    pair = Pair()
    optimizer = adam(pair)
    script = Followed(pair, optimizer, tmp_path)
    for turn in script.steps(range(TURNS)):
        optimizer.zero_grad()
        pair(batch()).mean().backward()
        if turn == 2:
            failing = mock.patch("torch.optim.adam.adam", side_effect=RuntimeError("out of memory"))
            with failing, pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step()
            for parameter in pair.parameters():
                assert parameter.grad is not None
                parameter.grad *= 0.5
        optimizer.step()
    assert script.end() == ["stepped"] * TURNS


def test_a_second_step_in_a_turn_is_refused(tmp_path: Path) -> None:
    pair = Pair()
    optimizer = adam(pair)
    script = Followed(pair, optimizer, tmp_path)
    with pytest.raises(RefusedError, match="one turn of the loop has 2"):
        for _ in script.steps(range(TURNS)):
            for _ in range(2):
                optimizer.zero_grad()
                pair(batch()).mean().backward()
                optimizer.step()


def test_outputs_may_be_a_dataclass_and_a_turn_may_lack_its_step(tmp_path: Path) -> None:
    @dataclass
    class Output:
        loss: torch.Tensor

    class Model(Pair):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(super().forward(x).mean())

    model = DistributedDataParallel(Model())
    optimizer = adam(model)
    script = Followed(model, optimizer, tmp_path)
    for turn in script.steps(range(TURNS)):
        optimizer.zero_grad()
        model(batch()).loss.backward()
        if turn != 1:
            optimizer.step()
    assert script.end() == ["stepped", "skipped", "stepped", "stepped"]


def test_a_compiled_model_has_the_names_of_the_script() -> None:
    pair = Pair()
    compiled = torch.compile(pair, backend="eager")
    assert model_of(compiled, "host").trained().keys() == dict(pair.named_parameters()).keys()


RANKS: Final = 3


class Branches(nn.Module):
    """Layers whose gradients get ready in another order on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        layers = list(self.layers)
        return sum(
            (layer(x).square().sum() for layer in (layers[::-1] if turned else layers)), x.new_zeros(())
        )


def _gradients(rank: int, *, resumed: bool, static: bool, micro: int) -> list[torch.Tensor]:
    """Return the reduced gradients of some iterations, of a run or of one that goes on with its fifth."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.03, static_graph=static)
    if resumed:
        reduction = resumed_reduction(ddp, 4)
        assert reduction is not None
        reduction.register()
    torch.manual_seed(rank + 1)
    batches = [torch.randn(8, 64) for _ in range(micro)]
    result = []
    for _ in range(4):
        ddp.zero_grad()
        for number, x in enumerate(batches):
            with nullcontext() if number == micro - 1 else ddp.no_sync():
                ddp(x, not static and rank % 2 == 1).backward()
        gradients = [parameter.grad for parameter in ddp.parameters()]
        result.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]))
    return result


def _compare(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dist.barrier()  # so that no rank disconnects from one that still connects
    for static, micro in ((False, 1), (False, 3), (True, 1)):
        expected = _gradients(rank, resumed=False, static=static, micro=micro)[-1]
        for gradients in _gradients(rank, resumed=True, static=static, micro=micro):
            assert torch.equal(gradients, expected), (static, micro)
    dist.barrier()
    dist.destroy_process_group()


def test_a_resumed_ddp_has_an_uninterrupted_ones_sums(tmp_path: Path) -> None:
    """Whatever the order in which ranks' gradients get ready, with micro-batches, and with a static graph."""
    spawn(_compare, (str(tmp_path / "store"),), nprocs=RANKS)  # type: ignore[no-untyped-call]
