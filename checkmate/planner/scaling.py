"""Prediction of the time of an optimizer step for other numbers of cores and nodes. Pure.

Up to the largest measured number of threads it follows the measurements. Beyond, it follows Amdahl's law
through that point: a + b / cores, with a and b from least squares of the relative error. A node's share of
the step is its share of the elements (paper, section "Optimizer Scaling across Multiple Nodes").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from checkmate.base.wording import counted
from checkmate.planner.demand import layout_of
from checkmate.planner.models.named import Model

NOISE: Final = 1.1
"""Smaller slowdowns are not reported."""
CACHES: Final = 1.25
"""Superlinear speedup that is plausible, because more cores also have more cache."""


class ProfileError(ValueError):
    """A profile is invalid, or lacks the required measurement."""

    exit_code = 2


@dataclass(frozen=True)
class StepTimes:
    """Times of a model's optimizer step on one machine.

    `seconds` has at least one time, by number of threads. If `by_layer`, times are sums
    over kinds of layers, each measured separately.
    """

    model: str
    optimizer: str
    dtype: str
    elements: int
    seconds: Mapping[int, float]
    by_layer: bool

    def on(self, cores: float) -> float:
        """Return the seconds of a step of the whole model on one node.

        More cores are never slower, because `checkmate shadow --threads` can leave some unused. With a single
        measurement, more cores are assumed to have no effect.
        """
        fewer = [took for n, took in self.seconds.items() if n <= cores]
        if not fewer:
            least = min(self.seconds)
            return self.seconds[least] * least / cores
        return min(*fewer, self._between(cores))

    def _between(self, cores: float) -> float:
        """Interpolate between measurements, or extrapolate after the last."""
        most = max(self.seconds)
        if cores > most:
            fixed, shared = amdahl(self.seconds)
            return self.seconds[most] * (fixed + shared / cores) / (fixed + shared / most)
        shares, times = zip(*sorted((1 / n, took) for n, took in self.seconds.items()), strict=True)
        return float(np.interp(1 / cores, shares, times))


@dataclass(frozen=True)
class Profile:
    """Measurements of a machine as a shadow node. `receive_bytes_per_s` is by number of NICs."""

    cores: int
    receive_bytes_per_s: Mapping[int, float]
    steps: tuple[StepTimes, ...]

    def steps_of(self, model: Model, optimizer: str) -> StepTimes:
        """Return the times of this model, or of another with the same optimizer and type.

        Raises `ProfileError` if there are none.
        """
        dtype = dtype_of(model)
        alike = [s for s in self.steps if (s.optimizer, s.dtype) == (optimizer, dtype)]
        for step in alike:
            if step.model == model.name:
                return step
        if not alike:
            measured_steps = "; ".join(f"{s.model}, {s.optimizer}, {s.dtype}" for s in self.steps)
            raise ProfileError(f"the profile has no step of {optimizer} in {dtype}; it has {measured_steps}")
        return alike[0]


def outliers(seconds: Mapping[int, float]) -> dict[int, str]:
    """Return times by number of threads (or NICs) that contradict others, with the reason.

    More threads may not help, but do not harm, and n threads are at most n times as fast as one.
    """
    reasons = {}
    for most, took in seconds.items():
        fewer = {n: seconds_of_fewer for n, seconds_of_fewer in seconds.items() if n < most}
        best = min(fewer, key=lambda n: fewer[n], default=most)
        if took > NOISE * seconds[best]:
            reasons[most] = f"slower than with {best}"
        for n, seconds_of_fewer in fewer.items():
            if n * seconds_of_fewer > CACHES * most * took:
                reasons.setdefault(n, f"slow beside {most}")
    return reasons


def dtype_of(model: Model) -> str:
    """Return the type of a model's parameters; several are joined by +."""
    return "+".join(sorted({parameter.dtype for parameter in model.parameters}))


def amdahl(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return non-negative a and b of a + b / threads. With one measurement, b is 0."""
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
    """Return the share of the model's elements on the fullest node."""
    layout = layout_of(model, nodes)
    sizes = [0] * nodes
    for bucket in layout.buckets:
        sizes[bucket.shard] += bucket.elements
    return max(sizes) / model.elements


def predicted(times: StepTimes, model: Model, nodes: int, cores_each: float) -> float:
    """Return the seconds of a step on `nodes` nodes with `cores_each` cores each."""
    return times.on(cores_each) * largest_share(model, nodes)


def curve(times: StepTimes, model: Model, cores_each: int, nodes_most: int) -> list[tuple[int, float]]:
    """Return the paper's scaling figure: step time over cores, with one more node for every `cores_each`.

    Each point has the cores of all nodes, spread evenly, and the seconds of the slowest node.
    """
    shares = {nodes: largest_share(model, nodes) for nodes in range(1, nodes_most + 1)}
    points = []
    for cores in range(1, cores_each * nodes_most + 1):
        nodes = -(-cores // cores_each)
        points.append((cores, times.on(cores / nodes) * shares[nodes]))
    return points


def read_profile(file: Path) -> Profile:
    """Read the output of `checkmate profile --json`. Raise `ProfileError` if it is invalid."""
    try:
        profile = TypeAdapter(Profile).validate_json(file.read_bytes())
    except OSError as error:
        raise ProfileError(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError:
        profile = None
    wrong = "" if profile is None else _wrong(profile)
    if profile is None or wrong:
        why = f" ({wrong})" if wrong else ""
        raise ProfileError(f"{file} is not a profile{why}; create one: checkmate profile --json > {file}")
    return profile


def _wrong(profile: Profile) -> str:
    """Return a description of an impossible measurement, or an empty text."""
    if profile.cores < 1:
        return f"cores: {profile.cores}"
    if not profile.steps:
        return "no steps"
    for nics, rate in profile.receive_bytes_per_s.items():
        if nics < 1 or not _measurable(rate):
            return f"receive_bytes_per_s of {counted(nics, 'NIC')}: {rate:g}"
    for step in profile.steps:
        if step.elements < 1 or not step.seconds:
            elements, times = counted(step.elements, "element"), counted(len(step.seconds), "time")
            return f"step of {step.model}: {elements}, {times}"
        for threads, took in step.seconds.items():
            if threads < 1 or not _measurable(took):
                return f"step of {step.model}: {took:g} seconds with {counted(threads, 'thread')}"
    return ""


def _measurable(value: float) -> bool:
    """Return whether a rate or time is plausible, so that derived values are finite."""
    return 1e-15 <= value <= 1e24
