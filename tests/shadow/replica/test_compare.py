"""Slices of trainers' state against replicas: differences are found, named, and suspect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from checkmate.shadow.replica.replica import Replica
from checkmate.state import bytes_of
from checkmate.training.record.windows import Window, to_message
from checkmate.wire.parts import PartSlicing
from tests.support.training.optimizer_steps import MAKERS, Trainer, buckets_of, follow


def test_a_changed_gradient_is_found_and_named() -> None:
    trainer = Trainer(MAKERS["adam"], shards=1)
    replica = trainer.replica(0)
    for _ in range(3):
        follow(trainer, [replica], trainer.backward())
    gradients = trainer.backward()
    trainer.parameters[4].grad.mul_(0.5)  # type: ignore[union-attr]
    step = trainer.update()
    slices = {part.parameter: part for part in step.slices if not part.state}
    del step.slices[:]
    assert replica.step(3, buckets_of(gradients, replica), step) == []  # its turn comes later
    gradients = trainer.backward()
    step = trainer.update()
    assert slices[4].data != step.slices[4].data
    trouble, *more = replica.step(4, buckets_of(gradients, replica), step)
    assert [part.partition(" differs")[0] for part in more] == [
        f"{name} of parameter layer4.weight" for name in ("exp_avg", "exp_avg_sq")
    ]
    assert "layer4.weight differs from the trainers' after iteration 4" in trouble
    assert "last found equal after iteration 2" in trouble
    assert "Clip gradients by norm" in trouble
    assert replica.comparison.doubtful == {4: 2}
    trainer.seed(replica, [4])
    assert replica.comparison.doubtful == {}
    follow(trainer, [replica], trainer.backward())


def test_with_copies_by_hosts_ranks_with_other_gradients_are_named_as_the_cause() -> None:
    trainer = Trainer(MAKERS["adam"], shards=1)
    trainer.layout = replace(trainer.layout, slicing=PartSlicing())
    replica = trainer.replica(0)
    gradients = trainer.backward()
    trainer.parameters[4].grad.mul_(0.5)  # type: ignore[union-attr]
    trouble, *more = replica.step(0, buckets_of(gradients, replica), trainer.update())
    assert "average their gradients, as DDP does" in trouble
    assert "GradScaler" not in trouble
    assert more and not any("Possible causes" in part for part in more), "causes are named once"


def test_what_was_found_wrong_is_suspect_until_it_is_right_after_two_steps_of_our_own() -> None:
    """Seeds are correct: changes in each iteration outside the step show after them."""
    trainer = Trainer(MAKERS["adam"], shards=1)
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())

    def troubles_after_change() -> list[str]:
        gradients = trainer.backward()
        trainer.parameters[4].grad.mul_(0.5)  # type: ignore[union-attr]
        return replica.step(trainer.iteration, buckets_of(gradients, replica), trainer.update())

    suspects = replica.comparison.suspects
    wrong = {(4, ""), (4, "exp_avg"), (4, "exp_avg_sq")}
    assert troubles_after_change()
    assert set(suspects) == wrong
    trainer.seed(replica, [4])
    assert set(suspects) == wrong
    follow(trainer, [replica], trainer.backward())
    assert set(suspects) == wrong
    assert troubles_after_change()
    trainer.seed(replica, [4])
    for remaining in (3, 0, 0):
        follow(trainer, [replica], trainer.backward())
        assert len(suspects) == remaining


def test_a_slice_is_compared_where_it_stands() -> None:
    trainer = Trainer(MAKERS["sgd"], shards=1)
    replica = trainer.replica(0)
    for offset, change, troubled in (
        (0, 0, False),
        (400, 0, False),
        (400, 1, True),
        (4795, 0, True),
        (4, 0, False),
    ):
        gradients = trainer.backward()
        step = trainer.update()
        del step.slices[:]
        data = bytearray(bytes(bytes_of(trainer.parameters[0])[offset : offset + 8]).ljust(8, b"\0"))
        data[-1] ^= change
        step.slices.add(parameter=0, offset=offset, data=bytes(data))
        assert bool(replica.step(trainer.iteration, buckets_of(gradients, replica), step)) == troubled
        trainer.seed(replica, [0])


def test_trainers_on_another_device_are_compared_with_a_tolerance() -> None:
    trainer = Trainer(MAKERS["sgd"], shards=1, dtypes=(torch.float32, torch.bfloat16))
    replica = trainer.replica(0, exact=False)
    for factor, troubled in ((1 + 1e-6, False), (1.5, True)):
        gradients = trainer.backward()
        step = trainer.update()
        near = trainer.parameters[0].detach() * factor
        del step.slices[:]
        step.slices.add(parameter=0, data=bytes(bytes_of(near)[:1024]))
        assert bool(replica.step(trainer.iteration, buckets_of(gradients, replica), step)) == troubled


@pytest.mark.parametrize(
    ("change", "troubled"),
    [
        (lambda average: average * (1 + 1e-6), False),
        (
            lambda average: average + 1e-5 * average.abs().max(),
            False,
        ),  # sums of values that cancel out keep the error of their terms
        (lambda average: average * 1.5, True),
        (lambda average: average.roll(1), True),
    ],
)
def test_state_of_trainers_on_another_device_is_compared_with_a_tolerance(
    change: Callable[[torch.Tensor], torch.Tensor], troubled: bool
) -> None:
    trainer = Trainer(MAKERS["sgd-momentum"], shards=1)
    replica = trainer.replica(0, exact=False)
    gradients, step = trainer.backward(), trainer.update()
    del step.slices[:]
    near = change(trainer.optimizer.state[trainer.parameters[0]]["momentum_buffer"].reshape(-1))
    step.slices.append(to_message(Window(0, "momentum_buffer", 0, near.numel()), near))
    assert bool(replica.step(0, buckets_of(gradients, replica), step)) == troubled


def spoil(replica: Replica, entry: str) -> None:
    """Change the first value of an entry of parameter 4's state."""
    value = replica._parameters[4].entry(entry)
    assert isinstance(value, torch.Tensor)
    value.view(-1)[0] += 1


def lose(replica: Replica, entry: str) -> None:
    """Remove an entry of parameter 4's state."""
    number, tensor, state = next(replica.read(replica.at[4], (4,)))
    replica.load(number, tensor, {name: value for name, value in state.items() if name != entry}, 0)


@pytest.mark.parametrize("harm", [spoil, lose])
@pytest.mark.parametrize("entry", ["exp_avg", "exp_avg_sq", "step"])
def test_state_that_differs_is_found_and_named(entry: str, harm: Callable[[Replica, str], None]) -> None:
    """Long before it would show in the parameter's first bytes."""
    trainer = Trainer(MAKERS["adam"], shards=1)
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    gradients = trainer.backward({4})  # which leaves parameter 4 as it is
    harm(replica, entry)
    (trouble,) = replica.step(1, buckets_of(gradients, replica), trainer.update())
    assert trouble.startswith(
        f"{entry} of parameter layer4.weight differs from the trainers' after iteration 1"
    )
    trainer.seed(replica, [4])
    for remaining in (1, 0):
        follow(trainer, [replica], trainer.backward())
        assert len(replica.comparison.suspects) == remaining


@pytest.mark.parametrize("node_value", [0, 3.0, True, None])
def test_state_that_is_no_tensor_is_compared_by_kind_and_value(node_value: object) -> None:
    trainer = Trainer(lambda groups: torch.optim.Adam(groups[:1], lr=0.1), shards=1)
    replica = trainer.replica(0)
    replica.load(1, trainer.state()[1][0], {"age": node_value}, -1)  # which no optimizer steps
    for trainer_value in (0, 3.0, True, None):
        gradients, step = trainer.backward(), trainer.update()
        del step.slices[:]
        step.slices.append(to_message(Window(1, "age", 0, 1), trainer_value))
        troubles = replica.step(trainer.iteration, buckets_of(gradients, replica), step)
        assert bool(troubles) == ((type(node_value), node_value) != (type(trainer_value), trainer_value))


def test_only_what_was_found_wrong_need_be_found_right() -> None:
    """For any position of the windows in the next cycle."""
    trainer = Trainer(MAKERS["sgd"], shards=1)
    replica = trainer.replica(0)

    def compare(start: int, stop: int, *, wrong: bool = False) -> bool:
        gradients, step = trainer.backward(), trainer.update()
        del step.slices[:]
        copy = trainer.parameters[0].detach().view(-1)[start:stop] + wrong
        step.slices.append(to_message(Window(0, "", start, stop), copy))
        return not replica.step(trainer.iteration, buckets_of(gradients, replica), step)

    suspects = replica.comparison.suspects
    assert compare(0, 100) and compare(0, 100)
    assert not compare(300, 400, wrong=True)
    assert not compare(350, 500, wrong=True)
    assert suspects == {(0, ""): range(1200, 2000)}
    for start, stop, remaining in ((0, 250, 300), (250, 420, 420), (430, 900, 420), (400, 490, 490)):
        assert compare(start, stop)
        assert suspects == {(0, ""): range(4 * remaining, 2000)}
    assert compare(450, 510)
    assert suspects == {}


def test_suspect_state_that_trainers_no_longer_have_is_forgotten() -> None:
    trainer = Trainer(MAKERS["sgd-momentum"], shards=1)
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    gradients = trainer.backward()
    momentum = replica._parameters[4].entry("momentum_buffer")
    assert isinstance(momentum, torch.Tensor)
    momentum += 1
    assert replica.step(1, buckets_of(gradients, replica), trainer.update())
    assert (4, "momentum_buffer") in replica.comparison.suspects
    trainer.optimizer.state[trainer.parameters[4]].clear()
    trainer.seed(replica, [4])
    assert (4, "momentum_buffer") not in replica.comparison.suspects
