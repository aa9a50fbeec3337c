"""One rank that trains two models in turns: one protected, and its twin over the same ring, untagged.

Two jobs in separate processes differ by several percent even if both do the same, because of their memory
layout and other load on the machine. Here both are in one process, seconds apart. Checkmate's waiting threads
also use processor time during the twin's iterations. That is measured separately and subtracted. The options
are those of `checkmate.examples.gpt.train`: --iterations is the number of timed iterations of each, and with
an odd --seed the twin is created first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate.examples.gpt import text, train
from checkmate.examples.gpt.model import Gpt, Shape
from topologies.training.in_rank import Untagged
from topologies.training.record import TimedBlock

KINDS: Final = ("checkmate", "untagged")
_WARM_UP: Final = 12
"""Turns that are not timed: DDP rebuilds its buckets, and TCP windows open."""
_STANDING: Final = "standing"
_IDLE_SECONDS: Final = 5.0


class Twin:
    """A model with optimizer and data, as in `checkmate.examples.gpt.train`."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        shape = Shape(options.layers, options.width, options.heads, options.context, options.dropout)
        self.ddp = DistributedDataParallel(Gpt(shape), bucket_cap_mb=options.bucket_mb)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=options.learning_rate, weight_decay=0.1)
        steps = options.iterations
        self.scheduler = LambdaLR(self.optimizer, lambda step: train.warm_up_then_cosine(step, steps))
        self._data = text.read(options.text)
        self._batch, self._context = options.batch, options.context
        self.mark: Callable[[], None] = lambda: None

    def iterate(self) -> float:
        """Train one iteration; return its loss."""
        loss = self.ddp(*self._data.batch(self._batch, self._context))
        loss.backward()
        checkmate.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.mark()
        return float(loss.item())


def main() -> None:
    """Train both, and write the time of each turn to --out."""
    options = train.parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made = Twin(options), Twin(options)
    ours, theirs = made if options.seed % 2 == 0 else made[::-1]
    with Untagged(theirs.ddp):  # first, because a process has one protected model
        before = _idle()
        checkmate.restore(ours.ddp, ours.optimizer, scheduler=ours.scheduler)
        twins = dict(zip(KINDS, (ours, theirs), strict=True))
        with (
            checkmate.protect(ours.ddp, ours.optimizer, scheduler=ours.scheduler) as protection,
            _file(options.out, rank).open("w") as log,
        ):
            ours.mark = protection.mark
            torch.manual_seed(options.seed + 1 + rank)
            for turn in range(-_WARM_UP, options.iterations):
                found = _turn(twins, KINDS if turn % 2 else KINDS[::-1])
                if turn >= 0:
                    print(json.dumps(found), file=log, flush=True)
            print(json.dumps({_STANDING: _idle() - before}), file=log)
    dist.destroy_process_group()


def _turn(twins: Mapping[str, Twin], order: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return seconds, and processor time of this rank in seconds, for one iteration of each."""
    found, losses = {}, set()
    random = torch.get_rng_state()
    for kind in order:
        torch.set_rng_state(random)  # both have the same input, so their losses must be equal
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        losses.add(twins[kind].iterate())
        found[kind] = (time.monotonic() - began, time.process_time() - used)
    if len(losses) > 1:
        raise SystemExit(f"the twins differ: {losses}")
    return found


def _idle() -> float:
    """Return this process's seconds of processor time in a second without training."""
    dist.barrier()
    time.sleep(1)
    used = time.process_time()
    time.sleep(_IDLE_SECONDS)
    found = (time.process_time() - used) / _IDLE_SECONDS
    dist.barrier()
    return found


def turns(folder: Path, ranks: int) -> int:
    """Return the number of turns that each rank has recorded so far."""
    files = [_file(folder, rank) for rank in range(ranks)]
    return min(file.read_text().count("\n") if file.exists() else 0 for file in files)


def read(folder: Path, ranks: int) -> dict[str, list[TimedBlock]]:
    """Return means of two turns, one in each order, by kind: mean seconds, and processor time of all ranks.

    Ranks share one core, so the time of all their waiting threads is subtracted from the untagged
    iteration's.
    """
    said = [[json.loads(line) for line in _file(folder, rank).open()] for rank in range(ranks)]
    standing = sum(rank.pop()[_STANDING] for rank in said)
    found: dict[str, list[TimedBlock]] = {}
    for kind, share in zip(KINDS, (0.0, standing), strict=True):
        each = [
            (fmean(rank[kind][0] for rank in turn), sum(rank[kind][1] for rank in turn))
            for turn in zip(*said, strict=True)
        ]
        found[kind] = [
            TimedBlock((a[0] + b[0]) / 2 * (1 - share), (a[1] + b[1] - share * (a[0] + b[0])) / 2)
            for a, b in zip(each[::2], each[1::2], strict=False)
        ]
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.turns.jsonl"


if __name__ == "__main__":
    main()
