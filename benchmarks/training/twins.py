"""One rank that trains twins in turns: one protected, and two over the same kind of ring, untagged.

Two jobs in separate processes differ by several percent even if both do the same, because of their memory
layout and other load on the machine. Here all are in one process, seconds apart. Checkmate's waiting threads
also use processor time during the others' iterations. That is measured separately and subtracted. The second
untagged twin is the control: its ratio to the first shows how well a ratio can be measured. On a GPU, both
reduce over NCCL, as PyTorch does without Checkmate.

Run as a module, it trains `checkmate.examples.gpt`'s model. The options are those of
`checkmate.examples.gpt.train`: --iterations is the number of timed turns, and --seed rotates the order in
which twins are created.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate.examples.gpt import text, train
from checkmate.examples.gpt.model import Gpt, Shape
from topologies.training.record import TimedBlock
from topologies.training.unprotected import Untagged

KINDS: Final = ("checkmate", "untagged", "control")
_WARM_UP: Final = 12
"""Turns that are not timed: DDP rebuilds its buckets, and TCP windows open."""
_STANDING: Final = "standing"
_IDLE_SECONDS: Final = 5.0
_STOCK_DIFFERENCE: Final = 0.1
"""Greatest difference of losses below 6, after hundreds of iterations in which last bits differ."""


class Twin(Protocol):
    """A model that a rank trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR

    def step(self) -> float:
        """Train one iteration; return its loss."""


class GptTwin:
    """A model with optimizer and data, as in `checkmate.examples.gpt.train`."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        shape = Shape(options.layers, options.width, options.heads, options.context, options.dropout)
        model = Gpt(shape).to(options.device)
        self.model = self.wrap(model, options)
        rate = options.learning_rate
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, weight_decay=0.1
        )
        steps = options.iterations
        self.scheduler = LambdaLR(self.optimizer, lambda step: train.warm_up_then_cosine(step, steps))
        self._data = text.read(options.text)
        self._batch, self._context, self._device = options.batch, options.context, options.device

    def wrap(self, model: Gpt, options: argparse.Namespace) -> nn.Module:
        """Return the model as it is trained."""
        return DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)

    def step(self) -> float:
        """Train one iteration; return its loss."""
        batch = self._data.batch(self._batch, self._context)
        loss = self.model(*(tokens.to(self._device) for tokens in batch))
        loss.backward()
        checkmate.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def main() -> None:
    """Train all, and write the time of each turn to --out."""
    options = train.parse()
    gpu = options.device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    race(options, lambda: GptTwin(options), stock=gpu)
    dist.destroy_process_group()


def race(
    options: argparse.Namespace, make: Callable[[], Twin], *, stock: bool = False, follow: str = "auto"
) -> int:
    """Train one twin of each kind in turns, and write the time of each turn to `options.out`.

    Return the number of turns, with those that are not timed.

    With `stock`, the others reduce as PyTorch does, so sums may differ in their last bits.
    """
    rank, first = dist.get_rank(), options.seed % len(KINDS)
    twins = {kind: make() for kind in KINDS[first:] + KINDS[:first]}
    with contextlib.ExitStack() as stack:
        # first, because a process has one protected model
        for number, kind in enumerate(() if stock else KINDS[1:]):
            stack.enter_context(Untagged(twins[kind].model, ring=number))
        before = _idle()
        protected: Any = twins[KINDS[0]]
        parts = {"scheduler": protected.scheduler, "follow": follow}
        checkmate.restore(protected.model, protected.optimizer, **parts)
        protection = stack.enter_context(checkmate.protect(protected.model, protected.optimizer, **parts))
        log = stack.enter_context(_file(options.out, rank).open("w"))
        torch.manual_seed(options.seed + 1 + rank)
        for turn in range(-_WARM_UP, options.iterations):
            times = _turn(twins, order(turn), protection.mark, _STOCK_DIFFERENCE if stock else 0)
            if turn >= 0:
                print(json.dumps(times), file=log, flush=True)
        print(json.dumps({_STANDING: _idle() - before}), file=log)
    return _WARM_UP + int(options.iterations)


def order(turn: int) -> Sequence[str]:
    """Return the order of a turn: two turns in a row have opposite ones, and each kind is in the middle."""
    first = turn // 2 % len(KINDS)
    kinds = KINDS[first:] + KINDS[:first]
    return kinds[::-1] if turn % 2 else kinds


def _turn(
    twins: Mapping[str, Twin], kinds: Sequence[str], mark: Callable[[], None], difference: float
) -> dict[str, tuple[float, float]]:
    """Return seconds, and processor time of this rank in seconds, for one iteration of each.

    Losses that differ by more than a `difference` end the run.
    """
    times, losses = {}, []
    random = torch.get_rng_state()
    for kind in kinds:
        torch.set_rng_state(random)  # all have the same input, so their losses must be equal
        _meet()
        began, processor_start = time.monotonic(), time.process_time()
        losses.append(twins[kind].step())
        if kind == KINDS[0]:
            mark()
        times[kind] = (time.monotonic() - began, time.process_time() - processor_start)
    if not all(abs(loss - losses[0]) <= difference for loss in losses):  # nor if one is NaN
        raise SystemExit(f"the twins differ: {losses}")
    return times


def _idle() -> float:
    """Return this process's seconds of processor time in a second without training."""
    _meet()
    time.sleep(1)
    processor_start = time.process_time()
    time.sleep(_IDLE_SECONDS)
    share = (time.process_time() - processor_start) / _IDLE_SECONDS
    _meet()
    return share


def _meet() -> None:
    """Wait for the other ranks, over gloo: a barrier of NCCL would be work of the GPU."""
    dist.all_reduce(torch.zeros(1))


def turns(folder: Path, ranks: int) -> int:
    """Return the number of turns that each rank has recorded so far."""
    files = [_file(folder, rank) for rank in range(ranks)]
    return min(file.read_text().count("\n") if file.exists() else 0 for file in files)


def read(folder: Path, ranks: int, *, one_core: bool) -> dict[str, list[TimedBlock]]:
    """Return means of two turns, one in each order, by kind: mean seconds, and processor time of all ranks.

    The time of Checkmate's waiting threads is subtracted from the other iterations' processor time, and if
    all ranks share `one_core`, from their seconds. It is written at the end, so of a run that was stopped it
    stays in.
    """
    lines_by_rank = [[json.loads(line) for line in _file(folder, rank).open()] for rank in range(ranks)]
    standing = sum(rank.pop()[_STANDING] for rank in lines_by_rank if _STANDING in rank[-1])
    blocks: dict[str, list[TimedBlock]] = {}
    for kind in KINDS:
        share = 0.0 if kind == KINDS[0] else standing
        own_share = 1 - share if one_core else 1.0
        turn_pairs = [
            (fmean(rank[kind][0] for rank in turn), sum(rank[kind][1] for rank in turn))
            for turn in zip(*lines_by_rank, strict=False)
        ]
        blocks[kind] = [
            TimedBlock((a[0] + b[0]) / 2 * own_share, (a[1] + b[1] - share * (a[0] + b[0])) / 2)
            for a, b in zip(turn_pairs[::2], turn_pairs[1::2], strict=False)
        ]
    return blocks


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.turns.jsonl"


if __name__ == "__main__":
    main()
