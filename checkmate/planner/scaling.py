"""How long an optimizer step takes on so many cores and nodes, from what was measured on a few. Pure.

Up to the largest number of threads measured it is what was measured; beyond, Amdahl's law through that
point: a + b / cores, with a and b of the least squares of relative error. A node's share of the step is its
share of the elements (paper, section "Optimizer Scaling across Multiple Nodes").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from checkmate.planner.demand import layout_of
from checkmate.planner.models.named import Model
from checkmate.wire.tag import SHADOW_IDS_MAX

NOISE: Final = 1.1
"""Slower by less is not worth a word."""
CACHES: Final = 1.25
"""More cores have more cache too: so much more than their number they may bring."""
NODES_MAX = SHADOW_IDS_MAX
"""A DP group has at most so many shards, and so nodes that share its step."""


class ProfileError(ValueError):
    """No profile, or one of something else."""

    exit_code = 2


@dataclass(frozen=True)
class StepTimes:
    """A model's optimizer step on one machine. `seconds`: by number of threads, ascending, one at least.

    `by_layer`: it was not stepped whole, but each kind of layer by itself, and added up.
    """

    model: str
    optimizer: str
    dtype: str
    elements: int
    seconds: Mapping[int, float]
    by_layer: bool

    @cached_property
    def amdahl(self) -> tuple[float, float]:
        """Seconds that more cores don't change, and seconds that they share."""
        return amdahl(self.seconds)

    def on(self, cores: float) -> float:
        """Seconds of a step of the whole model on one node of so many cores.

        More cores are never worse: `checkmate shadow --threads` can leave some out. One measurement tells
        nothing of more cores, so they are taken to be of no use.
        """
        fewer = [took for n, took in self.seconds.items() if n <= cores]
        if not fewer:
            least = min(self.seconds)
            return self.seconds[least] * least / cores
        return min(*fewer, self._between(cores))

    def _between(self, cores: float) -> float:
        """Between two measurements, or after the last; at one, what it says."""
        most = max(self.seconds)
        if cores > most:
            fixed, shared = self.amdahl
            return self.seconds[most] * (fixed + shared / cores) / (fixed + shared / most)
        below = max(n for n in self.seconds if n <= cores)
        above = min(n for n in self.seconds if n >= cores)
        if below == above:
            return self.seconds[below]
        part = (1 / below - 1 / cores) / (1 / below - 1 / above)
        return self.seconds[below] + part * (self.seconds[above] - self.seconds[below])


@dataclass(frozen=True)
class Point:
    """The step of `nodes` nodes that have `cores` between them; the slowest node decides."""

    cores: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What a machine can do as a shadow node. `receive_bytes_per_s`: by number of NICs, a thread each."""

    cores: int
    receive_bytes_per_s: Mapping[int, float]
    steps: tuple[StepTimes, ...]

    def steps_of(self, model: Model, optimizer: str) -> StepTimes:
        """The times of this model, or of another with the same optimizer and type; `ProfileError`."""
        dtype = dtype_of(model)
        alike = [s for s in self.steps if (s.optimizer, s.dtype) == (optimizer, dtype)]
        for step in alike:
            if step.model == model.name:
                return step
        if not alike:
            there = "; ".join(f"{s.model}, {s.optimizer}, {s.dtype}" for s in self.steps)
            raise ProfileError(f"the profile has no step of {optimizer} in {dtype}; it has {there}")
        return alike[0]


def outliers(seconds: Mapping[int, float]) -> dict[int, str]:
    """Of times by number of threads (or NICs), those that the others contradict, and why.

    More may be of no use, but don't harm; and n of them aren't more than n times as fast as one.
    """
    found = {}
    for most, took in seconds.items():
        fewer = {n: one for n, one in seconds.items() if n < most}
        best = min(fewer, key=lambda n: fewer[n], default=most)
        if took > NOISE * seconds[best]:
            found[most] = f"slower than with {best}"
        for n, one in fewer.items():
            if n * one > CACHES * most * took:
                found.setdefault(n, f"slow beside {most}")
    return found


def dtype_of(model: Model) -> str:
    """The type of a model's parameters; several joined by +."""
    return "+".join(sorted({parameter.dtype for parameter in model.parameters}))


def amdahl(seconds: Mapping[int, float]) -> tuple[float, float]:
    """a and b, neither negative, of a + b / threads. Of one measurement: none of it is shared."""
    if len(seconds) == 1:
        (took,) = seconds.values()
        return took, 0.0
    # Relative errors: rows (1/t, 1/(n t)), right-hand side 1.
    rows = [(1 / took, 1 / (threads * took)) for threads, took in seconds.items()]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    fixed = (a1 * bb - b1 * ab) / determinant
    shared = (aa * b1 - ab * a1) / determinant
    if fixed < 0:
        return 0.0, b1 / bb
    if shared < 0:
        return a1 / aa, 0.0
    return fixed, shared


def largest_share(model: Model, nodes: int) -> float:
    """The part of the model's elements that the fullest of so many nodes steps."""
    layout = layout_of(model, nodes)
    sizes = [0] * nodes
    for bucket in layout.buckets:
        sizes[bucket.shard] += bucket.elements
    return max(sizes) / model.elements


def predicted(times: StepTimes, model: Model, nodes: int, cores_each: float) -> float:
    """Seconds of a step on so many nodes of so many cores each."""
    return times.on(cores_each) * largest_share(model, nodes)


def curve(times: StepTimes, model: Model, cores_each: int, nodes_most: int) -> list[Point]:
    """The paper's scaling figure: step time over cores, a node more for every `cores_each`.

    Cores are spread evenly over the nodes.
    """
    shares = {nodes: largest_share(model, nodes) for nodes in range(1, nodes_most + 1)}
    points = []
    for cores in range(1, cores_each * nodes_most + 1):
        nodes = -(-cores // cores_each)
        points.append(Point(cores, nodes, times.on(cores / nodes) * shares[nodes]))
    return points


def read_profile(file: Path) -> Profile:
    """What `checkmate profile --json` printed; `ProfileError` where the file is something else."""
    try:
        said = json.loads(file.read_text())
        steps = tuple(_step_times(step) for step in said["steps"])
        received = {int(nics): float(rate) for nics, rate in said["receive_bytes_per_s"].items()}
        found = Profile(int(said["cores"]), received, steps)
    except OSError as error:
        raise ProfileError(f"{file} can't be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        found = None
    wrong = "" if found is None else _wrong(found)
    if found is None or wrong:
        why = f" ({wrong})" if wrong else ""
        raise ProfileError(f"{file} is no profile{why}; make one: checkmate profile --json > {file}")
    return found


def _step_times(said: Mapping[str, Any]) -> StepTimes:
    return StepTimes(
        str(said["model"]),
        str(said["optimizer"]),
        str(said["dtype"]),
        int(said["elements"]),
        {int(threads): float(took) for threads, took in sorted(said["seconds"].items(), key=_first)},
        bool(said["by_layer"]),
    )


def _first(item: tuple[str, float]) -> int:
    return int(item[0])


def _wrong(found: Profile) -> str:
    """What can't have been measured; empty where all can."""
    if found.cores < 1:
        return f"cores: {found.cores}"
    if not found.steps:
        return "no steps"
    for nics, rate in found.receive_bytes_per_s.items():
        if nics < 1 or not _measurable(rate):
            return f"receive_bytes_per_s of {nics} NICs: {rate:g}"
    for step in found.steps:
        if step.elements < 1 or not step.seconds:
            return f"step of {step.model}: {step.elements} elements, {len(step.seconds)} times"
        for threads, took in step.seconds.items():
            if threads < 1 or not _measurable(took):
                return f"step of {step.model}: {took:g} seconds with {threads} threads"
    return ""


def _measurable(value: float) -> bool:
    """A rate or a time; all that follows from it is finite."""
    return 1e-15 <= value <= 1e24
