"""A shard's optimizer step on the shadow node, in turns with PyTorch's own and bare traffic of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.figures import Figure, Result, ratios
from checkmate.base.wording import counted
from checkmate.optim.kernel import Arithmetic
from checkmate.optim.supported import options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import DTYPES, bytes_of
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter

TITLE = "Shadow node, stepping: a shard of 25 million parameters / torch's own step, pair by pair"
ROUNDS = 15
WIDTH, BLOCKS, WORDS, LENGTH = 384, 10, 18_000, 256
SLICE_BYTES = 64 * 1024

KINDS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters, **flags: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=0.01, **flags
    ),
    "Adam": lambda parameters, **flags: torch.optim.Adam(parameters, lr=1e-4, **flags),
    "AdamW": lambda parameters, **flags: torch.optim.AdamW(parameters, lr=1e-4, **flags),
}
FLAGS: Mapping[str, dict[str, Any]] = {"": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ADAMW_TENSORS = 7
"""How many tensors of the shard's size a step of AdamW reads or writes."""


def shapes() -> list[tuple[int, ...]]:
    """Return a GPT's parameters: embeddings, attention, MLPs, norms and biases."""
    result: list[tuple[int, ...]] = [(WORDS, WIDTH), (LENGTH, WIDTH)]
    for _ in range(BLOCKS):
        for rows in (3, 1, 4):
            result += [(rows * WIDTH, WIDTH), (rows * WIDTH,)]
        result += [(WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)]
    return result


class SteppedShard:
    """The same parameters twice: stepped by PyTorch, and held by a replica. Gradients are shared."""

    def __init__(self, kind: str, flags: str, dtype: str = "float32", arithmetic: Arithmetic = "cpu") -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter((torch.randn(shape) * 0.02).to(DTYPES[dtype])) for shape in shapes()]
        parameters = [Parameter(f"p{i}", tuple(p.shape), dtype) for i, p in enumerate(self.parameters)]
        self.layout: Layout = make_layout(parameters, 1)
        self.optimizer = KINDS[kind](self.parameters, **FLAGS[flags])
        spec = spec_of(self.optimizer, {p: i for i, p in enumerate(self.parameters)})
        self.replica = Replica(self.layout, 0, spec, exact=arithmetic == "cpu", arithmetic=arithmetic)
        self.gradients = {
            index: (torch.randn(bucket.elements) * 1e-3).to(DTYPES[dtype])
            for index, bucket in enumerate(self.layout.buckets)
        }
        for number, parameter in enumerate(self.parameters):
            self.replica.load(number, parameter.detach().clone(), {}, -1)
            index, place = self.layout.where[number]
            parameter.grad = self.gradients[index][place.start : place.stop].view(parameter.shape)
        self.iteration = -1

    def torch_step(self) -> float:
        """Return the seconds of PyTorch's own step."""
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def shadow_step(self) -> float:
        """Return the seconds of the replica's step, with hyperparameters and a comparison of 64 KB."""
        self.iteration += 1
        step = pb.Step(options=[options_of(group) for group in self.optimizer.param_groups])
        if self.replica.comparison.exact:
            step.slices.add(parameter=3, data=bytes(bytes_of(self.parameters[3])[:SLICE_BYTES]))
        start = time.perf_counter()
        self.replica.step(self.iteration, self.gradients, step)
        return time.perf_counter() - start

    def check(self) -> None:
        """Check that both have the same bits, so that they are comparable."""
        for number, tensor, _ in self.replica.read(self.iteration):
            if not torch.equal(tensor, self.parameters[number]):
                raise RuntimeError(f"parameter {number} differs")


class BareSums:
    """Sums of tensors in place: traffic of memory like a step's, with hardly any arithmetic."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._gradient = torch.zeros(elements, dtype=dtype)
        self._tensors = [torch.zeros(elements, dtype=dtype) for _ in range(3)]

    @property
    def nbytes(self) -> int:
        """The bytes that `run` reads and writes."""
        return 3 * len(self._tensors) * self._gradient.nbytes

    def run(self) -> float:
        """Return the seconds that the sums take."""
        start = time.perf_counter()
        for tensor in self._tensors:
            tensor.add_(self._gradient)
        return time.perf_counter() - start


def measure() -> list[Result]:
    """Return every figure of this module."""
    results: list[Result] = []
    for kind in KINDS:
        for flags in FLAGS:
            results += _times(kind, flags)
    for dtype, arithmetic in _TYPES:
        for threads in sorted({1, torch.get_num_threads()}):
            results += _bandwidth(dtype, arithmetic, threads)
    return results


_TYPES: Sequence[tuple[str, Arithmetic]] = (("float32", "cpu"), ("float32", "gpu"), ("bfloat16", "gpu"))


def _bandwidth(dtype: str, arithmetic: Arithmetic, threads: int) -> list[Result]:
    """Return what a step of AdamW takes beside PyTorch's fused one, and its traffic beside bare traffic."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shard, fused = (
            SteppedShard("AdamW", "foreach", dtype, arithmetic),
            SteppedShard("AdamW", "fused", dtype),
        )
        elements = sum(parameter.numel() for parameter in shard.parameters)
        sums = BareSums(elements, DTYPES[dtype])
        times: dict[str, list[float]] = {"step": [], "fused": [], "sums": []}
        works = {"step": shard.shadow_step, "fused": fused.torch_step, "sums": sums.run}
        for round_ in range(ROUNDS + 2):
            for name, work in list(works.items())[:: 1 if round_ % 2 else -1]:
                seconds = work()
                if round_ >= 2:  # the first step creates the state
                    times[name].append(seconds)
    finally:
        torch.set_num_threads(before)
    nbytes = ADAMW_TENSORS * elements * DTYPES[dtype].itemsize
    step_rates = [nbytes / seconds for seconds in times["step"]]
    sum_rates = [sums.nbytes / seconds for seconds in times["sums"]]
    words = f"AdamW for a {arithmetic.upper()}, {dtype}, {counted(threads, 'thread')}"
    note = f"{1e3 * statistics.median(times['step']):.1f} ms"
    return [
        Figure(
            f"{words} / PyTorch's fused",
            ratios(times["step"], times["fused"]),
            "",
            1.1,
            1.3,
            smaller=True,
            note=note,
        ),
        Figure(
            f"{words}: bytes/s / a sum's",
            ratios(step_rates, sum_rates),
            "",
            0.8,
            0.6,
            note=f"{statistics.median(sum_rates) / 1e9:.1f} GB/s",
        ),
    ]


def _times(kind: str, flags: str) -> list[Result]:
    shard = SteppedShard(kind, flags)
    for _ in range(2):  # the first step creates the state
        shard.torch_step()
        shard.shadow_step()
    torch_times, shadow_times = [], []
    for round_ in range(ROUNDS):
        if round_ % 2:
            shadow_times.append(shard.shadow_step())
            torch_times.append(shard.torch_step())
        else:
            torch_times.append(shard.torch_step())
            shadow_times.append(shard.shadow_step())
    shard.check()
    name = f"{kind}, {flags}" if flags else kind
    threads = counted(torch.get_num_threads(), "thread")
    return [
        Figure(
            name,
            ratios(shadow_times, torch_times),
            "",
            aim=1.05,
            floor=1.2,
            smaller=True,
            note=f"torch {1e3 * statistics.median(torch_times):.0f} ms, {threads}",
        )
    ]
