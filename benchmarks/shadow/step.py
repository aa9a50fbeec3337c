"""A shard's optimizer step on the shadow node against PyTorch's own on the same tensors, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.figures import Figure, Result, ratios
from checkmate.base.wording import counted
from checkmate.optim.supported import options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import bytes_of
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter

TITLE = "Shadow node, stepping: a shard of 25 million fp32 parameters / torch's own step, pair by pair"
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

    def __init__(self, kind: str, flags: str) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes()]
        parameters = [Parameter(f"p{i}", tuple(p.shape), "float32") for i, p in enumerate(self.parameters)]
        self.layout: Layout = make_layout(parameters, 1)
        self.optimizer = KINDS[kind](self.parameters, **FLAGS[flags])
        spec = spec_of(self.optimizer, {p: i for i, p in enumerate(self.parameters)})
        self.replica = Replica(self.layout, 0, spec, exact=True)
        self.gradients = {
            index: torch.randn(bucket.elements) * 1e-3 for index, bucket in enumerate(self.layout.buckets)
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
        step.slices.add(parameter=3, data=bytes(bytes_of(self.parameters[3])[:SLICE_BYTES]))
        start = time.perf_counter()
        self.replica.step(self.iteration, self.gradients, step)
        return time.perf_counter() - start

    def check(self) -> None:
        """Check that both have the same bits, so that they are comparable."""
        for number, tensor, _ in self.replica.read(self.iteration):
            if not torch.equal(tensor, self.parameters[number]):
                raise RuntimeError(f"parameter {number} differs")


def measure() -> list[Result]:
    """Return every figure of this module."""
    results: list[Result] = []
    for kind in KINDS:
        for flags in FLAGS:
            results += _times(kind, flags)
    return results


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
