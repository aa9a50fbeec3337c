"""Measurement of a model's optimizer step in a shadow node's replica, by number of threads.

A model that does not fit in memory is stepped layer by layer: as many layers of each kind (the same shapes
and types) as fit, scaled to their number in the model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from checkmate.base.machine_memory import trim
from checkmate.base.wording import counted
from checkmate.planner.models.named import Model, layers_of
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.scaling import StepTimes, dtype_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter

MIN_STEPS: Final = 3
"""Minimum number of timed steps, after one that creates the state. The result is their median."""
SAMPLE_BYTES: Final = 1 << 30
"""Maximum size of a sample, which is much larger than caches."""
_RANDOM: Final = 1 << 20


class TooLittleMemory(RuntimeError):
    """Memory does not suffice even for part of one layer."""

    exit_code = 1


@dataclass(frozen=True)
class Sample:
    """Parameters that are stepped together. The step of their kind takes `weight` times as long."""

    parameters: tuple[Parameter, ...]
    weight: float


def measure(
    model: Model,
    optimizer: NamedOptimizer,
    threads: Sequence[int],
    seconds: float,
    memory: int,
    progress: Callable[[str, float], None],
) -> StepTimes:
    """Step times for each number of threads, each measured for about `seconds`, in `memory` bytes.

    `progress` gets what is measured, and which part of a number of threads has been done since.
    """
    samples = samples_of(model, optimizer, memory)
    by_layer = len(samples) > 1 or samples[0].parameters != model.parameters
    times = {}
    for count in threads:
        times[count] = 0.0
        for index, sample in enumerate(samples):
            part = f", layer {index + 1} of {len(samples)}" if by_layer else ""
            progress(f"{model.name}, {counted(count, 'thread')}{part}", 0.0)
            times[count] += sample.weight * _measure(
                sample.parameters, optimizer, count, seconds / len(samples)
            )
            progress(f"{model.name}, {counted(count, 'thread')}{part}", 1 / len(samples))
    return StepTimes(model.name, optimizer.name, dtype_of(model), model.elements, times, by_layer)


def samples_of(model: Model, optimizer: NamedOptimizer, memory: int) -> list[Sample]:
    """Return the whole model if it fits in `memory` bytes, otherwise layers of each kind."""
    if required_bytes(model.parameters, optimizer) <= memory:
        return [Sample(model.parameters, 1.0)]
    kinds: dict[tuple[tuple[tuple[int, ...], str], ...], list[list[Parameter]]] = {}
    for layer in layers_of(model.parameters):
        kinds.setdefault(tuple((p.shape, p.dtype) for p in layer), []).append(layer)
    return [_sample(layers, optimizer, memory) for layers in kinds.values()]


def required_bytes(parameters: Sequence[Parameter], optimizer: NamedOptimizer) -> int:
    """Return the bytes that a measured step uses: parameters, one iteration's gradients and state."""
    return sum(2 * p.nbytes + p.elements * optimizer.state_bytes(p.dtype) for p in parameters)


def _sample(layers: Sequence[Sequence[Parameter]], optimizer: NamedOptimizer, memory: int) -> Sample:
    layer_bytes = required_bytes(layers[0], optimizer)
    together = min(len(layers), max(1, min(SAMPLE_BYTES, memory) // max(layer_bytes, 1)))
    sample = [parameter for layer in layers[:together] for parameter in layer]
    if required_bytes(sample, optimizer) > memory:
        sample = _shrink(sample, memory / required_bytes(sample, optimizer))
    elements = sum(parameter.elements for parameter in sample)
    if required_bytes(sample, optimizer) > memory or not elements:
        raise TooLittleMemory(
            f"{counted(memory, 'byte')} of memory: too little to step even part of {sample[0].name}"
        )
    return Sample(tuple(sample), sum(p.elements for layer in layers for p in layer) / elements)


def _shrink(parameters: Sequence[Parameter], part: float) -> list[Parameter]:
    """Return parameters with fewer elements."""
    return [replace(p, shape=(math.floor(p.elements * part),)) for p in parameters]


def _measure(
    parameters: Sequence[Parameter], optimizer: NamedOptimizer, threads: int, seconds: float
) -> float:
    """Return the median time of some steps, in seconds."""
    layout = make_layout(parameters, 1)
    with _threads(threads):
        # Like a node for trainers with GPUs.
        spec = optimizer.spec(len(parameters), threads)
        replica = Replica(layout, 0, spec, exact=False, arithmetic="gpu")
        for number in layout.of_shard(0):
            parameter = parameters[number]
            replica.load(number, torch.zeros(parameter.shape, dtype=DTYPES[parameter.dtype]), {}, -1)
        gradients = _gradients(layout)
        times: list[float] = []
        end = time.monotonic() + seconds
        for iteration in range(1 << 20):
            start = time.perf_counter()
            replica.step(iteration, gradients, pb.Step())
            if iteration:
                times.append(time.perf_counter() - start)
            if len(times) >= MIN_STEPS and time.monotonic() > end:
                break
    del replica, gradients
    trim()
    return statistics.median(times)


def _gradients(layout: Layout) -> dict[int, torch.Tensor]:
    """Return random gradients, which repeat in large buckets."""
    seed = torch.randn(_RANDOM, generator=torch.Generator().manual_seed(0)) * 1e-3
    gradients = {}
    for index, bucket in enumerate(layout.buckets):
        tensor = torch.empty(bucket.elements, dtype=DTYPES[bucket.dtype])
        for start in range(0, bucket.elements, _RANDOM):
            run = tensor[start : start + _RANDOM]
            run.copy_(seed[: len(run)])
        gradients[index] = tensor
    return gradients


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
