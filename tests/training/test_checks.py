"""Refusals of `protect` before it fences anything, and later refusals during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from checkmate.training.checks import check_ddp, check_script
from checkmate.training.errors import RefusedError
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.capture import Watched
from checkmate.training.record.step_checks import ParameterWatch
from checkmate.training.record.windows import Slices
from tests.support.training.alone import alone
from tests.support.training.recorded_loop import RecordedLoop, adamw


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with alone():
        yield


def made() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "BuiltinCommHookType.FP16_COMPRESS": lambda ddp: ddp._register_builtin_comm_hook(  # type: ignore[no-untyped-call]
        BuiltinCommHookType.FP16_COMPRESS
    ),
}


@pytest.mark.parametrize("name", list(HOOKS))
def test_another_communication_hook_is_named(name: str) -> None:
    ddp, _ = made()
    check_ddp(DdpModel(ddp))
    HOOKS[name](ddp)
    with pytest.raises(
        RefusedError, match=f"already has the communication hook {name} .*remove the other one"
    ):
        check_ddp(DdpModel(ddp))


class Meter:
    """An object with a state but without `step`."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    load_state_dict = update = state_dict


@pytest.mark.parametrize(
    ("option", "make", "words"),
    [
        ("scheduler", lambda o: [StepLR(o, 1), StepLR(o, 2)], r"is a list: .*SequentialLR.*ChainedScheduler"),
        ("scheduler", lambda o: [], r"is a list: .*SequentialLR"),
        ("scheduler", lambda o: (StepLR(o, 1),), r"is a tuple: .*SequentialLR"),
        ("scheduler", lambda o: StepLR, r"is the class StepLR: pass an instance"),
        ("scheduler", lambda o: Meter(), r"is a Meter, which has no step\(\)"),
        ("scheduler", lambda o: lambda step: 1.0, r"is a function, which has no step\(\), state_dict\(\)"),
        ("scaler", lambda o: Meter(), r"is a Meter, which has no unscale_\(\), step\(\)"),
        ("scaler", lambda o: [], r"is a list, which has no "),
    ],
)
def test_what_is_no_scheduler_and_no_scaler(
    option: str, make: Callable[[torch.optim.Optimizer], Any], words: str
) -> None:
    ddp, optimizer = made()
    with pytest.raises(RefusedError, match=f"^{option}= {words}"):
        check_script(Watched(DdpModel(ddp), optimizer, **{option: make(optimizer)}))
    check_script(Watched(DdpModel(ddp), optimizer, StepLR(optimizer, 1), torch.amp.GradScaler("cpu")))


def test_uneven_inputs_are_refused() -> None:
    loop = RecordedLoop(adamw)
    with loop.ddp.join(enable=False):
        loop.backward()
    check_ddp(loop.wrapped)
    with pytest.raises(RefusedError, match=r"ddp\.join\(\).*the same number of batches"), loop.ddp.join():
        loop.ddp(torch.randn(4, 8))
    with pytest.raises(RefusedError, match=r"ddp\.join\(\)"):
        check_ddp(loop.wrapped)


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: loop.model.first.weight.data.clamp_(-0.01, 0.01),
        lambda loop: loop.model.last.bias.detach().numpy().fill(3),
        lambda loop: loop.model.load_state_dict({k: v + 1 for k, v in loop.model.state_dict().items()}),
    ],
)
def test_a_parameter_changed_behind_the_optimizer_is_not_taken_for_a_gradient(
    change: Callable[[RecordedLoop], object],
) -> None:
    loop = RecordedLoop(adamw)
    for _ in range(2):
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    change(loop)
    loop.backward()
    with pytest.raises(RefusedError, match=r"^parameter \S+\.(weight|bias) was changed .* optimizer"):
        loop.optimizer.step()
    assert [noted.iteration for noted in loop.emitted] == [0, 1]


def test_parameters_may_be_swapped_for_others_until_the_next_step() -> None:
    """For example with an EMA's, for validation."""
    loop = RecordedLoop(adamw)
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        own = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.model.load_state_dict({name: torch.full_like(tensor, 2) for name, tensor in own.items()})
        loop.model.load_state_dict(own)
    assert len(loop.close()) == 3


@pytest.mark.parametrize("on_host", [True, False])
def test_without_waiting_for_a_gpu_a_changed_parameter_is_seen_a_step_later(on_host: bool) -> None:
    loop = RecordedLoop(adamw)
    slices = Slices(loop.layout, loop.parameters, loop.optimizer)
    watch = ParameterWatch(slices, on_host=on_host)
    seen = []
    for change in (0.0, 1.0, 0.0, 0.0):
        watch.stepped(slices.take())
        with torch.no_grad():
            loop.parameters[2].add_(change)
        seen.append(watch.changed())
    assert seen == ([[], [2], [], []] if on_host else [[], [], [2], []])
