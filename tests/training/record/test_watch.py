"""Detection of changed gradients, in any memory format."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from checkmate.training.record.step_checks import SAMPLE_BYTES, SAMPLED, GradientWatch

LAYOUTS = {
    "contiguous": torch.ones(6, 4, 2, 2),
    "channels last": torch.ones(6, 4, 2, 2).to(memory_format=torch.channels_last),
    "transposed": torch.ones(2, 2, 4, 6).permute(3, 2, 1, 0),
    "bfloat16": torch.ones(6, 4, 2, 2, dtype=torch.bfloat16),
    "one number": torch.ones(()),
    "one element of a column": torch.ones(1, 2)[:, 1],
    "every other element": torch.ones(12)[::2],
}
BY_SUMS = pytest.mark.parametrize(
    "sums", [False, True], ids=["bytes", "sums"]
)  # sums are used on CUDA devices


@BY_SUMS
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_change_in_place_is_seen_and_a_noted_one_is_right(kind: str, sums: bool) -> None:
    parameter = nn.Parameter(torch.ones_like(LAYOUTS[kind]))
    parameter.grad = LAYOUTS[kind]
    assert parameter.grad.stride() == LAYOUTS[kind].stride()
    watch = GradientWatch([("one", parameter)])
    watch._on_host = not sums
    for _ in range(2):
        watch.start()
        assert watch.compare()() == []
        parameter.grad.data.neg_()
        assert watch.compare()() == ["one"]
        watch.note()
        assert watch.compare()() == []
        watch.forget()
        assert watch.compare()() == []


@BY_SUMS
def test_a_gradient_that_is_turned_round_in_place_is_seen(sums: bool) -> None:
    parameter = nn.Parameter(torch.zeros(SAMPLE_BYTES // 64, SAMPLE_BYTES // 64))
    parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
    watch = GradientWatch([("one", parameter)])
    watch._on_host = not sums
    watch.start()
    parameter.grad.data = parameter.grad.data.t()
    assert watch.compare()() == ["one"]


@pytest.mark.parametrize("count", [SAMPLED - 1, SAMPLED + 1, 2 * SAMPLED])
def test_in_time_all_parts_of_all_parameters_are_looked_at(count: int) -> None:
    parameters = [nn.Parameter(torch.zeros(SAMPLE_BYTES // 2)) for _ in range(count)]
    watch = GradientWatch([(str(number), parameter) for number, parameter in enumerate(parameters)])
    halves = set()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(4 * len(parameters)):
        watch.start()
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad
            assert gradient is not None
            for half in range(2):
                at = half * len(gradient) // 2
                gradient[at] = 1
                if watch.compare()():
                    assert watch.compare()() == [str(number)]
                    halves.add((number, half))
                gradient[at] = 0
    assert halves == {(number, half) for number in range(len(parameters)) for half in range(2)}


def test_a_gradient_that_is_let_go_is_not_kept() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.zeros(3)
    reference = weakref.ref(parameter.grad)
    watch = GradientWatch([("one", parameter)])
    watch.start()
    watch.forget()
    parameter.grad = None
    assert reference() is None


def test_no_gradient_and_an_empty_one() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0))]
    parameters[1].grad = torch.zeros(0)
    watch = GradientWatch([("none", parameters[0]), ("empty", parameters[1])])
    watch.start()
    assert watch.compare()() == []
    parameters[0].grad = torch.zeros(3)
    assert watch.compare()() == ["none"]
