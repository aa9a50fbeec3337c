"""The DDP hook, in real processes: `.grad` is the ring's defined average afterwards, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.state import dtype_name, from_held, in_memory_order
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.ddp_hook import GradientHook
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from testbed.ports import free_port
from tests.support.rings import averaged, loopback, same_bits
from tests.support.training.rank_processes import RankProcesses, failing_backward

FIRST_ITERATION = 7


class HookNet(nn.Module):
    """Parameters of several types and memory formats: one empty, one frozen, and perhaps unused ones."""

    def __init__(self, dtype: torch.dtype, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(33, 65)
        self.conv = nn.Conv2d(5, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.deep = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(9, 13).t())
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.middle = nn.Linear(65, 129).to(dtype)
        self.last = nn.Linear(129, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Linear(5, 5) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        image = self.conv(hidden[:, :60].reshape(-1, 5, 4, 3)).tanh().mean()
        image = image + self.deep(hidden[:, :60].reshape(-1, 2, 2, 3, 5)).tanh().mean()
        image = image + (hidden.view(-1, 13) @ self.turned).tanh().mean()
        hidden = torch.tanh(self.middle(hidden.to(self.middle.weight.dtype))).float()
        out: torch.Tensor = (self.last(hidden) * self.frozen).sum() * image
        return out + self.scale.sum() + self.empty.sum()


@dataclass(frozen=True)
class HookCase:
    """The configuration of a run of the hook."""

    channels: int = 1
    dtype: torch.dtype = torch.float32
    shards: int = 2
    unused: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: bool = False
    device: str = "cpu"


def layout_of(model: nn.Module, shards: int) -> tuple[Layout, list[nn.Parameter]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    described = [Parameter.of(name, p.shape, p.stride(), dtype_name(p.dtype)) for name, p in trained]
    return make_layout(described, shards, bucket_bytes=9000), [p for _, p in trained]


@contextlib.contextmanager
def hooked(
    ddp: DistributedDataParallel, case: HookCase, rank: int, count: int, port: int
) -> Iterator[tuple[GradientHook, Ring]]:
    layout, parameters = layout_of(ddp.module, case.shards)
    place = RingPlace(rank, loopback(count), case.channels, port=port, fingerprint=layout.fingerprint)
    with connect_ring(place, timeout=20) as ring:
        reducer = RingReducer(ring, layout, pinned=case.device == "cuda")
        hook = GradientHook(ddp, GradientBuckets(layout, parameters, reducer, FIRST_ITERATION))
        hook.register()
        try:
            yield hook, ring
        finally:
            hook.close()


def batch(rank: int, iteration: int, part: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * iteration + part)
    return torch.randn(6, 33, generator=generator).to(device)


def expected_gradients(model: nn.Module, layout: Layout, channels: int) -> dict[int, torch.Tensor]:
    """Return the defined average by parameter, from each rank's own gradients, gathered by gloo."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients_by_parameter = {}
    for bucket in layout.buckets:
        local = torch.cat(
            [
                in_memory_order(
                    torch.zeros_like(p) if p.grad is None else p.grad, layout.parameters[number].dim_order
                )
                .reshape(-1)
                .cpu()
                for number, p in ((place.parameter, parameters[place.parameter]) for place in bucket.places)
            ]
        )
        everyone = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, local)
        mean = averaged(everyone, channels)
        for place in bucket.places:
            parameter = layout.parameters[place.parameter]
            run = mean[place.start : place.stop].view(parameter.memory_shape)
            gradients_by_parameter[place.parameter], _ = from_held(parameter, run, {})
    return gradients_by_parameter


def train(rank: int, count: int, port: int, case: HookCase) -> list[int]:
    """Run five iterations, comparing each with the defined average; return DDP's numbers of buckets."""
    torch.manual_seed(1)
    model = HookNet(case.dtype, case.unused).to(case.device)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **case.ddp)
    calls_seen: list[int] = []
    reduced: list[tuple[int, list[torch.Tensor | None]]] = []
    with hooked(ddp, case, rank, count, port) as (hook, _):
        layout, parameters = layout_of(model, case.shards)
        calls = count_calls(hook)
        hook.on_reduced = lambda t: reduced.append(
            (t, [None if p.grad is None else p.grad.clone() for p in parameters])
        )
        assert hook.buckets.iteration == FIRST_ITERATION - 1
        for iteration in range(5):
            ddp.zero_grad()
            alone.zero_grad()
            if case.accumulate:
                with ddp.no_sync():
                    ddp(batch(rank, iteration, 1, case.device)).backward()
                assert len(reduced) == iteration and hook.buckets.iteration == FIRST_ITERATION + iteration - 1
                alone(batch(rank, iteration, 1, case.device)).backward()
            calls.clear()
            ddp(batch(rank, iteration, 0, case.device)).backward()
            calls_seen.append(len(calls))
            alone(batch(rank, iteration, 0, case.device)).backward()
            assert hook.buckets.iteration == FIRST_ITERATION + iteration
            assert hook.buckets.stream_ends(hook.buckets.iteration) == {} and hook.buckets.has_passed(
                0, 0, {}
            )
            expected = expected_gradients(alone, layout, case.channels)
            for number, parameter in enumerate(parameters):
                if parameter.grad is not None and parameter.numel():
                    assert torch.equal(parameter.grad.cpu(), expected[number]), (iteration, number)
                    run = in_memory_order(expected[number], layout.parameters[number].dim_order)
                    assert same_bits(hook.buckets.flats[number], run.flatten())
            t, at_callback = reduced[-1]
            assert t == hook.buckets.iteration and len(reduced) == iteration + 1
            for parameter, gradient in zip(parameters, at_callback, strict=True):
                if parameter.grad is None:
                    assert gradient is None
                else:
                    assert gradient is not None and torch.equal(parameter.grad, gradient)
        assert (model.unused is None) or model.unused.weight.grad is None
    return calls_seen


def count_calls(hook: GradientHook) -> list[int]:
    """Count the buckets that DDP passes to the hook."""
    calls: list[int] = []
    original = hook._gradients_of

    def counting(bucket: Any) -> dict[int, torch.Tensor]:
        calls.append(bucket.index())
        return original(bucket)

    hook._gradients_of = counting  # type: ignore[method-assign]
    return calls


CASES = {
    "plain": (2, HookCase()),
    "four ranks": (4, HookCase(channels=2, dtype=torch.bfloat16)),
    "three ranks, half precision": (3, HookCase(channels=4, dtype=torch.float16, shards=1)),
    "views": (2, HookCase(ddp={"gradient_as_bucket_view": True})),
    "static graph": (2, HookCase(ddp={"static_graph": True})),
    "static graph, views": (2, HookCase(ddp={"static_graph": True, "gradient_as_bucket_view": True})),
    "unused": (3, HookCase(unused=True, ddp={"find_unused_parameters": True})),
    "accumulated": (2, HookCase(accumulate=True)),
    "accumulated, views": (2, HookCase(accumulate=True, ddp={"gradient_as_bucket_view": True})),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_defined_average(ranks: RankProcesses, name: str) -> None:
    count, case = CASES[name]
    counts_by_rank = ranks.run(count, train, free_port(), case)
    assert all(counts == counts_by_rank[0] for counts in counts_by_rank)
    assert counts_by_rank[0][-1] == 3
    if not case.unused and case.dtype == torch.float32:
        assert counts_by_rank[0][0] == 2, "DDP's buckets didn't change on the way"


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_gradients_of_seven_ranks_are_the_defined_average(ranks: RankProcesses, channels: int) -> None:
    case = HookCase(channels, unused=True, shards=3, ddp={"find_unused_parameters": True})
    ranks.run(7, train, free_port(), case)


def lose_a_rank(rank: int, count: int, port: int) -> str:
    ddp = DistributedDataParallel(HookNet(torch.float32, unused=False), bucket_cap_mb=0.01)
    case = HookCase(channels=2)
    with hooked(ddp, case, rank, count, port) as (hook, ring):
        ddp(batch(rank, 0)).backward()
        loss = ddp(batch(rank, 1))
        if rank == 1:
            ring.abort()
            dist.barrier()
            return ""
        words = failing_backward(loss)
        assert str(hook.buckets.error) == words
        return words


def test_backward_ends_when_a_rank_is_gone(ranks: RankProcesses) -> None:
    words = ranks.run(3, lose_a_rank, free_port())
    assert "rank 1" in words[0] + words[2]


def close_under_way(rank: int, count: int, port: int) -> tuple[str, str]:
    """Rank 1 never reduces, so rank 0 waits in backward until another thread closes its hook."""
    ddp = DistributedDataParallel(HookNet(torch.float32, unused=False), bucket_cap_mb=0.01)
    with hooked(ddp, HookCase(), rank, count, port) as (hook, _):
        if rank == 1:
            dist.barrier()
            return "", ""
        timer = threading.Timer(0.3, hook.close)
        timer.start()
        with pytest.raises(RingError) as excinfo:
            ddp(batch(rank, 0)).backward()
        timer.join()
        dist.barrier()
        return str(hook.buckets.error), str(excinfo.value)


def test_closing_ends_a_backward_under_way(ranks: RankProcesses) -> None:
    error, backward_error = ranks.run(2, close_under_way, free_port())[0]
    assert re.fullmatch(r"rank 0: closed with \d buckets? in progress", error)
    assert backward_error == error


def change_format(rank: int, count: int, port: int, changed_tensor: str, views: bool) -> str:
    """Return backward's error if a memory format differs from that of DDP's buckets."""
    convolution = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(convolution, nn.Linear(2, 2))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    weight = convolution.weight
    if changed_tensor == "parameter":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif changed_tensor == "gradient":
        weight.grad = torch.zeros_like(weight, memory_format=torch.channels_last)
    with hooked(ddp, HookCase(shards=1), rank, count, port):
        message = ""
        try:
            ddp(torch.randn(2, 3, 4, 4)).sum().backward()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("changed_tensor", ["parameter", "gradient", ""])
def test_a_gradient_in_another_memory_format_is_refused(
    ranks: RankProcesses, changed_tensor: str, views: bool
) -> None:
    """The format was changed after DDP was constructed, or the script's own .grad has another one."""
    for message in ranks.run(2, change_format, free_port(), changed_tensor, views):
        if not changed_tensor or (
            changed_tensor == "gradient" and views
        ):  # then DDP has replaced it by its own
            assert message == ""
        else:
            assert "the gradient of 0.weight has another memory format than the parameter" in message
            assert "before DistributedDataParallel is constructed" in message


def refuse(rank: int, count: int, port: int) -> list[str]:
    words = []
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model)
    with hooked(ddp, HookCase(shards=1), rank, count, port):
        with pytest.raises(RuntimeError) as excinfo:
            ddp(torch.tensor([1, 2])).sum().backward()
        words.append(str(excinfo.value))
    dist.barrier()
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    layout, parameters = layout_of(model, 1)
    ddp = DistributedDataParallel(model)
    with connect_ring(RingPlace(rank, loopback(count), 1, port=port), timeout=20) as ring:
        less = make_layout(layout.parameters[1:], 1)
        hook = GradientHook(ddp, GradientBuckets(less, parameters[1:], RingReducer(ring, less), 0))
        hook.register()
        with pytest.raises(RuntimeError) as excinfo:
            ddp(torch.ones(1, 4)).sum().backward()
        words.append(str(excinfo.value))
        hook.close()
    return words


def test_gradients_that_have_no_place_are_refused(ranks: RankProcesses) -> None:
    sparse, stranger = ranks.run(2, refuse, free_port())[1]
    assert "sparse=False" in sparse
    assert "a parameter that was not protected: (2, 4)" in stranger


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies by way of pinned memory need a CUDA device")
@pytest.mark.parametrize("name", ["plain", "four ranks", "views", "static graph", "accumulated"])
def test_gradients_on_a_gpu_are_the_defined_average(ranks: RankProcesses, name: str) -> None:
    count, case = CASES[name]
    ranks.run(count, train, free_port(), replace(case, device="cuda"))
