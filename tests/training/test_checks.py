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
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

from checkmate.state import StateError
from checkmate.training.checks import check_ddp, check_kept, check_model, check_schedulers, check_script
from checkmate.training.errors import RefusedError
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.capture import Watched
from checkmate.training.record.step_checks import StateWatch
from checkmate.training.record.windows import Slices
from tests.support.training.recorded_loop import RecordedLoop, adamw, loops


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with loops():
        yield


def model_and_optimizer() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
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
    ddp, _ = model_and_optimizer()
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
    ddp, optimizer = model_and_optimizer()
    with pytest.raises(RefusedError, match=f"^{option}= {words}"):
        check_script(Watched(DdpModel(ddp), optimizer, **{option: make(optimizer)}))
    check_script(Watched(DdpModel(ddp), optimizer, StepLR(optimizer, 1), torch.amp.GradScaler("cpu")))


def test_a_scheduler_that_was_not_given_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Its schedule would begin again at each restart."""
    ddp, optimizer = model_and_optimizer()
    check_schedulers(Watched(DdpModel(ddp), optimizer))
    scheduler = StepLR(optimizer, 1)
    with pytest.raises(RefusedError, match=r"not given.*restore\(model, optimizer, scheduler=scheduler\)"):
        check_schedulers(Watched(DdpModel(ddp), optimizer))
    check_schedulers(Watched(DdpModel(ddp), optimizer, scheduler))
    second = StepLR(optimizer, 2)
    with pytest.raises(RefusedError, match=r"has a StepLR beside scheduler=.*SequentialLR.*ChainedScheduler"):
        check_schedulers(Watched(DdpModel(ddp), optimizer, scheduler))
    check_schedulers(Watched(DdpModel(ddp), optimizer, ChainedScheduler([scheduler, second])))
    first = ChainedScheduler([scheduler, second])

    class Warm:
        def __init__(self) -> None:
            self.phases = [first]

    check_schedulers(Watched(DdpModel(ddp), optimizer, Warm()))
    second.state_dict()  # from now on, its attributes are a dictionary of their own
    with pytest.raises(RefusedError, match="has a StepLR beside scheduler="):
        check_schedulers(Watched(DdpModel(ddp), optimizer, scheduler))
    check_schedulers(Watched(DdpModel(ddp), optimizer, None, None, dict))
    assert "unless extra() has its state" in caplog.text


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    ddp = DistributedDataParallel(model)
    with pytest.raises(RefusedError, match=r"^0 has sparse=True.*sparse=False"):
        check_model(Watched(DdpModel(ddp), torch.optim.SGD(ddp.parameters(), lr=0.1)))


def test_a_parameter_unfrozen_after_ddp_was_constructed_is_refused() -> None:
    """DDP does not reduce it, so its bucket would never be complete."""
    linear = nn.Linear(4, 2)
    linear.bias.requires_grad_(False)
    model = DdpModel(DistributedDataParallel(linear))
    check_ddp(model)
    linear.bias.requires_grad_(True)
    with pytest.raises(RefusedError, match="2 parameters need gradients, but 1 did"):
        check_ddp(model)


def test_extra_state_that_cannot_be_stored_is_refused_with_its_module() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return iter(())

        def set_extra_state(self, state: object) -> None: ...

    ddp = DistributedDataParallel(nn.Sequential(Odd(2, 2)))
    with pytest.raises(StateError, match=r"^get_extra_state\(\) of 0: only tensors, .* can be stored"):
        check_kept(Watched(DdpModel(ddp), torch.optim.SGD(ddp.parameters(), lr=0.1)))


def test_extra_state_without_a_way_back_is_refused() -> None:
    class Half(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    ddp = DistributedDataParallel(nn.Sequential(Half(2, 2)))
    with pytest.raises(StateError, match=r"^0 has get_extra_state\(\), but not set_extra_state\(\)"):
        check_kept(Watched(DdpModel(ddp), torch.optim.SGD(ddp.parameters(), lr=0.1)))


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
    with pytest.raises(
        RefusedError, match=r"^iteration 1: parameter \S+\.(weight|bias) was changed, .* optimizer"
    ):
        loop.backward()
    assert [noted.iteration for noted in loop.emitted] == [0]


def test_parameters_may_be_swapped_for_others_until_the_next_step() -> None:
    """For example with an EMA's, for validation."""
    loop = RecordedLoop(adamw)
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        values = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.model.load_state_dict({name: torch.full_like(tensor, 2) for name, tensor in values.items()})
        loop.model.load_state_dict(values)
    assert len(loop.close()) == 3


@pytest.mark.parametrize("on_host", [True, False])
def test_a_change_since_the_last_step_is_seen_in_the_copies(on_host: bool) -> None:
    """On a GPU, too, where copies arrive later: what is compared is as it was."""
    loop = RecordedLoop(adamw)
    slices = Slices(loop.layout, loop.parameters, loop.optimizer)
    watch = StateWatch(slices, on_host=on_host)
    compared = []
    for change in (0.0, 1.0, 0.0, 0.0):
        watch.note(slices.take())
        with torch.no_grad():
            loop.parameters[2].add_(change)
        compared.append(watch.compare())
    assert [{window.parameter for window in windows()} for windows in compared] == [set(), {2}, set(), set()]
