"""A training loop with a recorder, and replicas that follow it, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.errors import CheckmateError
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.training.exclusion import StepExclusion
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import RecordDraft, Watched
from checkmate.training.record.publisher import to_part
from checkmate.training.record.recorder import Recorder
from checkmate.training.record.windows import Slices
from checkmate.training.start import places
from tests.support.training.alone import alone

_LOOPS: list[RecordedLoop] = []


@contextmanager
def loops() -> Iterator[None]:
    """Yield a process group for loops, whose recorders end with it: their hooks are those of all of torch."""
    with alone():
        try:
            yield
        finally:
            while _LOOPS:
                with suppress(CheckmateError):  # the refusal that the test was about
                    _LOOPS.pop().recorder.close(last=False)


AUTHOR = pb.RecordPart(job="job", incarnation=3, run="first", start=b"start")


class LoopModel(nn.Module):
    """Two layers with BatchNorm between, and one that is skipped in every other iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.sometimes = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return y + self.sometimes(x) if more else y


class RecordedLoop:
    """A training loop with a recorder, and a replica for each shard that follows it like a shadow node."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer], **watched: Any) -> None:
        torch.manual_seed(5)
        self.model = LoopModel()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.wrapped = DdpModel(self.ddp)
        self.optimizer = make(self.model)
        self.names = self.wrapped.trained()
        self.parameters = list(self.names.values())
        numbers = {p: i for i, p in enumerate(self.parameters)}
        self.layout = places.lay_out(self.wrapped, 2)
        spec = spec_of(self.optimizer, numbers)
        self.replicas = [Replica(self.layout, shard, spec, exact=True) for shard in range(2)]
        for replica in self.replicas:
            for number in replica.numbers:
                replica.load(number, self.parameters[number].detach().clone(), {}, -1)
        self.emitted: list[RecordDraft] = []
        self.steps = StepExclusion(0)
        scheduler, scaler = (
            watched.get(name, lambda _: None)(self.optimizer) for name in ("scheduler", "scaler")
        )
        self.scheduler, self.scaler = scheduler, scaler
        self.error: Exception | None = None
        """Raised by the next step, like an error of the publisher."""
        self.recorder = Recorder(
            Watched(self.wrapped, self.optimizer, scheduler, scaler, watched.get("extra")),
            self.names,
            self.steps,
            self.emitted.append,
            lambda iteration: {(0, 0): 100 * iteration},
            slices=Slices(self.layout, self.parameters, self.optimizer),
            buffers=Buffers(self.wrapped.kept_beside, everything=True),
            await_departed=self._await_departed,
            first=watched.get("first", True),
            marking=watched.get("marking", False),
            resumed=watched.get("resumed"),
        )
        self.gradients: dict[int, dict[int, torch.Tensor]] = {}
        self.iteration = -1
        _LOOPS.append(self)

    def _await_departed(self) -> None:
        if self.error is not None:
            raise self.error

    def backward(self, *, factor: float = 1.0, more: bool = False) -> None:
        """Run forward and backward, and keep the final gradients for the replicas."""
        self.backward_of((self.ddp(torch.randn(4, 8), more=more) ** 2).sum() * factor)

    def backward_of(self, loss: torch.Tensor) -> None:
        """Run backward, and keep the final gradients for the replicas."""
        self.recorder.on_backward()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.iteration += 1
        flats = {}
        for index, bucket in enumerate(self.layout.buckets):
            parts = [self.parameters[place.parameter] for place in bucket.places]
            flats[index] = torch.cat(
                [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in parts]
            )
        self.gradients[self.iteration] = flats
        self.recorder.reduced(self.iteration)

    def follow(self) -> list[pb.RecordPart]:
        """Step the replicas with the records, and check that their state equals the loop's."""
        parts = []
        while self.emitted:
            part = to_part(AUTHOR, self.emitted.pop(0))
            parts.append(part)
            for replica in self.replicas:
                own_gradients = {
                    i: g.clone()
                    for i, g in self.gradients[part.iteration].items()
                    if self.layout.buckets[i].shard == replica.shard
                }
                assert replica.step(part.iteration, own_gradients, part.step) == []
        for replica in self.replicas:
            for number, tensor, values in replica.read(self.iteration):
                parameter = self.parameters[number]
                assert torch.equal(tensor, parameter), self.layout.parameters[number].name
                optimizer_state = self.optimizer.state.get(parameter, {})
                assert values.keys() == optimizer_state.keys()
                for name, value in values.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer_state[name])), name
        return parts

    def close(self, *, last: bool = True) -> list[pb.RecordPart]:
        """End the recording, and follow to the end."""
        self.recorder.close(last)
        return self.follow()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)
