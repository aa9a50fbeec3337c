"""Throughput: iterations with a system and without one take turns in the same processes.

Two jobs of the same kind differ by a tenth on a small machine, because of other load and memory layout. So
each job is its own baseline. A block of iterations has a system's checkpoints, and one has none. What cannot
be switched off in a process, such as Checkmate and its ring, takes turns with a twin in plain DDP.

A block with the system begins and ends at the same place between two checkpoints, in the middle of training:
what is still being written at its end costs as much as what was being written when it began. Nothing is
written during a block without the system.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.evaluation.rank_log import RankLog, resource_use
from benchmarks.evaluation.workloads import Workload

BLOCK: Final = 20
"""Iterations of a block: a multiple of each interval that is specified."""
_PHASE: Final = 12
"""The place in intervals at which blocks begin, so that no checkpoint is begun at their end."""
_LEAD_IN: Final = 5
"""Iterations with the system before its block, if the block without it came first."""


@dataclass(frozen=True)
class Turns:
    """The two workloads that a rank trains in turns.

    `after` follows each iteration of the system's, and `finish` waits for what it has begun, before a block
    without it. Without `twin`, the same workload is trained without `after`.
    """

    workload: Workload
    after: Callable[[int], None]
    finish: Callable[[], None]
    twin: Callable[[], Workload] | None = None


def first_of(warm_up: int, *, before: int = 0) -> int:
    """Return the first iteration of the first block, if the first `warm_up` ones are not timed.

    With `before`, it is this many iterations before the place where blocks with a system begin.
    """
    return next(
        iteration for iteration in range(warm_up, warm_up + BLOCK) if (iteration + before) % BLOCK == _PHASE
    )


def train(turns: Turns, log: RankLog, *, warm_up: int, plain_first: bool) -> None:
    """Train the iterations that are not timed, and then a block of each kind."""
    numbers = iter(range(1 << 30))
    _block(turns, log, numbers, first_of(warm_up, before=_LEAD_IN * plain_first))
    if plain_first:
        _plain(turns, log, numbers)
        _block(turns, log, numbers, _LEAD_IN)
    began, before = time.monotonic(), resource_use()
    _block(turns, log, numbers, BLOCK)
    after = resource_use()
    log.say(
        block="system",
        seconds=(time.monotonic() - began) / BLOCK,
        written=(after.written_bytes - before.written_bytes) / BLOCK,
        sent=(after.sent_bytes - before.sent_bytes) / BLOCK,
    )
    if not plain_first:
        _plain(turns, log, numbers)
    if turns.twin is None:
        log.say(peak=resource_use().peak)


def _block(turns: Turns, log: RankLog, numbers: Iterator[int], count: int) -> None:
    for _ in range(count):
        iteration = next(numbers)
        log.say(**log.train(turns.workload, iteration))
        turns.after(iteration)


def _plain(turns: Turns, log: RankLog, numbers: Iterator[int]) -> None:
    """Train a block without the system; a twin is made and warmed up before."""
    turns.finish()
    workload, steps = turns.workload, numbers
    if turns.twin is not None:
        log.say(peak=resource_use().peak)
        workload, steps = turns.twin(), iter(range(1 << 30))
        for _ in range(first_of(0)):
            log.train(workload, next(steps))
    began = time.monotonic()
    for _ in range(BLOCK):
        log.train(workload, next(steps))
    log.say(block="plain", seconds=(time.monotonic() - began) / BLOCK)
