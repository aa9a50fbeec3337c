"""The paper's figure of the optimizer step over cores, as far as this machine has cores.

Models are the paper's, measured as `checkmate profile` does: what does not fit in memory is stepped layer by
layer. Numbers of threads take turns.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, ratios
from checkmate.base.wording import counted
from checkmate.planner.models.named import load_model
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.profile.step import measure as step_times

TITLE: Final = (
    "Shadow node, stepping over cores: AdamW on the paper's models, as checkmate profile measures it"
)
MODELS: Final = ("ResNet152", "GPT2-1.5B", "GPT3-6.7B")
ROUNDS: Final = 5
_SECONDS: Final = 4.0
_MEMORY: Final = 4 << 30


def measure() -> list[Result]:
    """Return every figure of this module."""
    cores = len(os.sched_getaffinity(0))
    threads = [1 << power for power in range(cores.bit_length()) if 1 << power <= cores]
    results: list[Result] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("steps", total=len(MODELS) * ROUNDS)
        for name in MODELS:
            times: dict[int, list[float]] = defaultdict(list)
            for number in range(ROUNDS):
                for count, seconds in _round(name, threads if number % 2 else threads[::-1]):
                    times[count].append(seconds)
                bar.advance(task)
            for count in threads:
                label = f"{name}: {counted(count, 'thread')}"
                if count > 1:
                    speed = ratios(times[1], times[count])
                    results.append(Figure(f"{label}, times as fast as one", speed, ""))
                results.append(Figure(f"{label}, a step", tuple(times[count]), "s"))
    return results


def _round(name: str, threads: Sequence[int]) -> list[tuple[int, float]]:
    """Return the seconds of a step for each number of threads, in this order."""
    model, optimizer = load_model(name), NamedOptimizer("adamw")
    return [
        (count, step_times(model, optimizer, [count], _SECONDS, _MEMORY, lambda *_: None).seconds[count])
        for count in threads
    ]
