"""The DDP hook, in real processes: `.grad` holds the ring's defined average afterwards, to the bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.layout import Layout, Parameter, make_layout
from checkmate.ring import Place, connect_ring
from checkmate.training.hook import GradientHook
from tests.rank_processes import RankProcesses
from tests.rings import free_port, loopback
from tests.test_allreduce import averaged, same_bits

FIRST_ITERATION = 7


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


class Net(nn.Module):
    """Parameters of several types, one in channels_last, one empty, one frozen, and maybe unused ones."""

    def __init__(self, dtype: torch.dtype, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(33, 65)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.middle = nn.Linear(65, 129).to(dtype)
        self.last = nn.Linear(129, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Linear(5, 5) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        image = self.conv(hidden.view(-1, 1, 5, 13)).mean()
        hidden = torch.tanh(self.middle(hidden.to(self.middle.weight.dtype))).float()
        out: torch.Tensor = (self.last(hidden) * self.frozen).sum() * image
        return out + self.scale.sum() + self.empty.sum()


@dataclass(frozen=True)
class Case:
    """What a run of the hook looks like."""

    channels: int = 1
    dtype: torch.dtype = torch.float32
    shards: int = 2
    unused: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: bool = False


def layout_of(model: nn.Module, shards: int) -> tuple[Layout, list[nn.Parameter]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    described = [Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trained]
    return make_layout(described, shards, bucket_bytes=9000), [p for _, p in trained]


@contextlib.contextmanager
def hooked(
    ddp: DistributedDataParallel, case: Case, rank: int, count: int, port: int
) -> Iterator[GradientHook]:
    layout, parameters = layout_of(ddp.module, case.shards)
    place = Place(rank, loopback(count), case.channels, port=port, fingerprint=layout.fingerprint)
    with connect_ring(place, timeout=20) as ring:
        hook = GradientHook(ddp, layout, parameters, ring, FIRST_ITERATION)
        try:
            yield hook
        finally:
            hook.close()


def batch(rank: int, iteration: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * iteration + part)
    return torch.randn(6, 33, generator=generator)


def expected_gradients(model: nn.Module, layout: Layout, channels: int) -> dict[int, torch.Tensor]:
    """From each rank's own gradients, gathered by gloo: the defined average, by parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = {}
    for bucket in layout.buckets:
        own = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                for p in (parameters[place.parameter] for place in bucket.places)
            ]
        )
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        mean = averaged(everyone, channels)
        for place in bucket.places:
            shape = layout.parameters[place.parameter].shape
            found[place.parameter] = mean[place.start : place.stop].view(shape)
    return found


def train(rank: int, count: int, port: int, case: Case) -> list[int]:
    """Five iterations, each compared with the defined average; how many buckets DDP had in each."""
    torch.manual_seed(1)
    model = Net(case.dtype, case.unused)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **case.ddp)
    seen: list[int] = []
    reduced: list[tuple[int, list[torch.Tensor | None]]] = []
    with hooked(ddp, case, rank, count, port) as hook:
        layout, parameters = layout_of(model, case.shards)
        calls = count_calls(hook)
        hook.on_reduced = lambda t: reduced.append(
            (t, [None if p.grad is None else p.grad.clone() for p in parameters])
        )
        assert hook.iteration == FIRST_ITERATION - 1
        for iteration in range(5):
            ddp.zero_grad()
            alone.zero_grad()
            if case.accumulate:
                with ddp.no_sync():
                    ddp(batch(rank, iteration, 1)).backward()
                assert len(reduced) == iteration and hook.iteration == FIRST_ITERATION + iteration - 1
                alone(batch(rank, iteration, 1)).backward()
            calls.clear()
            ddp(batch(rank, iteration)).backward()
            seen.append(len(calls))
            alone(batch(rank, iteration)).backward()
            assert hook.iteration == FIRST_ITERATION + iteration
            assert hook.stream_ends(hook.iteration) == {} and hook.passed({})
            expected = expected_gradients(alone, layout, case.channels)
            for number, parameter in enumerate(parameters):
                if parameter.grad is not None and parameter.numel():
                    assert torch.equal(parameter.grad, expected[number]), (iteration, number)
                    assert same_bits(hook._flats[number].flatten(), expected[number].flatten())
            t, at_callback = reduced[-1]
            assert t == hook.iteration and len(reduced) == iteration + 1
            for parameter, gradient in zip(parameters, at_callback, strict=True):
                if parameter.grad is None:
                    assert gradient is None
                else:
                    assert gradient is not None and torch.equal(parameter.grad, gradient)
        assert (model.unused is None) or model.unused.weight.grad is None
    return seen


def count_calls(hook: GradientHook) -> list[int]:
    """Grows by one with each bucket that DDP hands over."""
    calls: list[int] = []
    taken = hook._gradients_of

    def counting(bucket: Any) -> dict[int, torch.Tensor]:
        calls.append(bucket.index())
        return taken(bucket)

    hook._gradients_of = counting  # type: ignore[method-assign]
    return calls


CASES = {
    "plain": (2, Case()),
    "four ranks": (4, Case(channels=2, dtype=torch.bfloat16)),
    "three ranks, half precision": (3, Case(channels=4, dtype=torch.float16, shards=1)),
    "views": (2, Case(ddp={"gradient_as_bucket_view": True})),
    "static graph": (2, Case(ddp={"static_graph": True})),
    "static graph, views": (2, Case(ddp={"static_graph": True, "gradient_as_bucket_view": True})),
    "unused": (3, Case(unused=True, ddp={"find_unused_parameters": True})),
    "accumulated": (2, Case(accumulate=True)),
    "accumulated, views": (2, Case(accumulate=True, ddp={"gradient_as_bucket_view": True})),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_defined_average(ranks: RankProcesses, name: str) -> None:
    count, case = CASES[name]
    seen = ranks.run(count, train, free_port(), case)
    assert all(one == seen[0] for one in seen)
    assert seen[0][-1] == 3
    if not case.unused and case.dtype == torch.float32:
        assert seen[0][0] == 2, "DDP's buckets didn't change on the way"
