"""Scripts and jobs that do not fit the stored state are refused before anything is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from checkmate.nodes.other_ranks import OtherRanks
from checkmate.nodes.reader import States
from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.start import from_nodes, places
from checkmate.training.start.from_nodes import Fetched
from checkmate.training.start.install import InstallError, check_record, install_record, restored_parts
from checkmate.training.start.plans import FromNodes
from testbed.jobs import job
from tests.support.training.recorded_loop import RecordedLoop, adamw, loops

PLACE = places.place_of(job(ranks=2), 0, 2, [0, 1])
Make = Callable[[Optimizer], Any]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with loops():
        yield


def record(loop: RecordedLoop, ranks: int = 2) -> pb.IterationRecord:
    """Return the record after three iterations of a loop."""
    for _ in range(3):
        loop.backward()
        if loop.scaler is None:
            loop.optimizer.step()
        else:
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        if loop.scheduler is not None:
            loop.scheduler.step(*([1.0] if isinstance(loop.scheduler, ReduceLROnPlateau) else []))
        loop.optimizer.zero_grad()
    part = loop.close()[-1]
    other_parts = [
        pb.RecordPart(position=position, iteration=2, rng=part.rng) for position in range(1, ranks)
    ]
    return pb.IterationRecord(iteration=2, parts=[part, *other_parts])


def record_of(ranks: int = 2, **watched: Make) -> pb.IterationRecord:
    return record(RecordedLoop(adamw, **watched), ranks)


def script(**watched: Make) -> Watched:
    loop = RecordedLoop(adamw)
    arguments = {name: make(loop.optimizer) for name, make in watched.items()}
    return Watched(loop.wrapped, loop.optimizer, **arguments)


class Lazy(LRScheduler):
    """A scheduler whose state has more keys once it has stepped."""

    def get_lr(self) -> list[float | torch.Tensor]:
        """Halve the learning rate."""
        if self.last_epoch:
            self.halved = self.last_epoch
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


SAME: dict[str, Make] = {
    "StepLR": lambda o: StepLR(o, 2),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: SequentialLR(o, [StepLR(o, 1), ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: ChainedScheduler([StepLR(o, 1), ExponentialLR(o, 0.9)]),
    "Lazy": Lazy,
}


@pytest.mark.parametrize("kind", list(SAME))
def test_the_same_scheduler_fits(kind: str) -> None:
    loop = RecordedLoop(adamw, scheduler=SAME[kind])
    saved_record = record(loop)
    resumed = script(scheduler=SAME[kind])
    check_record(saved_record, resumed, PLACE)
    install_record(resumed, saved_record, 0)
    assert resumed.scheduler.state_dict() == loop.scheduler.state_dict()


MISFITS: list[tuple[Make | None, Make | None, str]] = [
    (
        lambda o: StepLR(o, 2),
        lambda o: ExponentialLR(o, 0.9),
        "is a StepLR, but the script's is an ExponentialLR",
    ),
    (
        SAME["SequentialLR"],
        lambda o: SequentialLR(o, [StepLR(o, 1), StepLR(o, 2)], [2]),
        r"is a SequentialLR\(StepLR, ExponentialLR\), but the script's is a SequentialLR\(StepLR, StepLR\)",
    ),
    (
        None,
        lambda o: StepLR(o, 2),
        "has no scheduler, but the script has a StepLR, .*create it after restore",
    ),
    (lambda o: StepLR(o, 2), None, "has a scheduler, a StepLR: pass scheduler= to checkmate.restore"),
    (
        lambda o: StepLR(o, 2),
        lambda o: type("StepLR", (CosineAnnealingLR,), {})(o, 5),
        r"StepLR has .*gamma, step_size, and the script's StepLR has .*T_max, eta_min",
    ),
]


@pytest.mark.parametrize(("before", "after", "words"), MISFITS)
def test_another_scheduler_is_named(before: Make | None, after: Make | None, words: str) -> None:
    saved_record = record(RecordedLoop(adamw, **({"scheduler": before} if before else {})))
    resumed = script(**({"scheduler": after} if after else {}))
    with pytest.raises(InstallError, match=words):
        check_record(saved_record, resumed, PLACE)


def test_of_a_scheduler_whose_class_is_not_known_the_keys_are_compared() -> None:
    """For example in an old checkpoint on disk."""
    saved_record = record_of(scheduler=SAME["StepLR"])
    saved_record.parts[0].step.scheduler_class = ""
    check_record(saved_record, script(scheduler=SAME["StepLR"]), PLACE)
    with pytest.raises(InstallError, match="the state's scheduler has .*step_size, and the script's"):
        check_record(saved_record, script(scheduler=lambda o: ExponentialLR(o, 0.9)), PLACE)


def scaler(**options: Any) -> Make:
    return lambda _: torch.amp.GradScaler("cpu", **options)


def test_another_scaler_is_named() -> None:
    check_record(record_of(scaler=scaler()), script(scaler=scaler()), PLACE)
    check_record(record_of(), script(scaler=scaler(enabled=False)), PLACE)
    check_record(record_of(scaler=scaler(enabled=False)), script(), PLACE)
    with pytest.raises(InstallError, match="has no enabled scaler, but the script has one"):
        check_record(record_of(), script(scaler=scaler()), PLACE)
    with pytest.raises(InstallError, match="has no enabled scaler, but the script has one"):
        check_record(record_of(scaler=scaler(enabled=False)), script(scaler=scaler()), PLACE)
    for less in (script(), script(scaler=scaler(enabled=False))):
        with pytest.raises(
            InstallError, match="has an enabled scaler: pass an enabled scaler= to checkmate.restore"
        ):
            check_record(record_of(scaler=scaler()), less, PLACE)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_is_told(ranks: int) -> None:
    words = f"has {ranks} rank.* in DP group 0, but the job now has 2"
    with pytest.raises(OtherRanks, match=words):
        check_record(record_of(ranks), script(), PLACE)


def test_before_the_first_iteration_anything_fits() -> None:
    check_record(pb.IterationRecord(iteration=-1), script(scheduler=SAME["StepLR"]), PLACE)


def test_what_is_missing_is_told_of_a_record_only() -> None:
    """Before the first iteration there is nothing to restore yet."""
    assert restored_parts(record_of()).endswith("; no scheduler, no scaler, no extra()")
    assert restored_parts(pb.IterationRecord(iteration=-1)) == "with parameters, optimizer"


def test_nothing_is_installed_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = RecordedLoop(adamw, scheduler=SAME["StepLR"])
    spec = spec_of(loop.optimizer, {parameter: number for number, parameter in enumerate(loop.parameters)})
    saved_record = record(loop)
    resumed_loop = RecordedLoop(adamw)
    before = {name: tensor.clone() for name, tensor in resumed_loop.model.state_dict().items()}
    states: States = {
        number: (tensor.detach() + 1, {}) for number, tensor in enumerate(resumed_loop.parameters)
    }

    def fetched(*_: object, **__: object) -> Fetched:
        return Fetched(loop.layout.parameters, states, saved_record, spec, True)

    monkeypatch.setattr(from_nodes, "fetch", fetched)
    resumed = Watched(
        resumed_loop.wrapped, resumed_loop.optimizer, ExponentialLR(resumed_loop.optimizer, 0.9)
    )
    plan = FromNodes(incarnation=1, run="run", iteration=2, holders={})
    with pytest.raises(InstallError, match="is a StepLR"):
        from_nodes.read(PLACE, resumed, Stubs(PLACE.job, None), plan, 1.0, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in resumed_loop.model.state_dict().items())
    assert not resumed_loop.optimizer.state
