"""The cost of records and checks in an optimizer's step, in the script's own thread.

One process, without a ring or nodes, in turns with the step alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import Figure, Result, ratios
from benchmarks.shadow.step import shapes
from checkmate.base.wording import counted
from checkmate.training.exclusion import StepExclusion
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import Watched
from checkmate.training.record.recorder import Recorder
from checkmate.training.record.windows import Slices
from checkmate.training.start import places

TITLE: Final = "Recording: an optimizer's step with records and checks / the step alone, pair by pair"
ROUNDS: Final = 40

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
EMA: Final = "GPT of 25 million parameters, AdamW, foreach; an EMA of 94 MiB in extra()"
CASES: Final[dict[str, tuple[Sequence[tuple[int, ...]], Make]]] = {
    "GPT of 25 million parameters, AdamW, foreach": (
        shapes(),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    ),
    EMA: (shapes(), lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    "2,000 parameters of 100 elements, AdamW, foreach": (
        [(100,)] * 2000,
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    ),
    "5,000 parameter groups of 4 elements, SGD": (
        [(4,)] * 5000,
        lambda parameters: torch.optim.SGD([{"params": [p]} for p in parameters], lr=1e-3, momentum=0.9),
    ),
}


class StepLoop:
    """A model with gradients and an optimizer, whose steps a recorder may follow."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], make: Make, *, recorded: bool, ema: bool) -> None:
        torch.manual_seed(0)
        module = nn.Module()
        module.list = nn.ParameterList([nn.Parameter(torch.randn(size) * 0.02) for size in sizes])
        self.ddp = DistributedDataParallel(module)
        self.parameters = list(module.parameters())
        self.optimizer = make(self.parameters)
        self.iteration = -1
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        average = {str(n): p.detach().clone() for n, p in enumerate(self.parameters)}
        self.recorder = self._recorder((lambda: average) if ema else None) if recorded else None

    def _recorder(self, extra: Callable[[], Any] | None) -> Recorder:
        model = DdpModel(self.ddp)
        slices = Slices(places.lay_out(model, 2), self.parameters, self.optimizer)
        return Recorder(
            Watched(model, self.optimizer, extra=extra),
            model.trained(),
            StepExclusion(0),
            lambda noted: None,
            lambda iteration: {},
            slices=slices,
            buffers=Buffers(model.kept_beside, everything=True),
        )

    def iterate(self) -> float:
        """Return the seconds of an iteration without forward and backward."""
        self.iteration += 1
        begin = time.perf_counter()
        if self.recorder is None:
            self.optimizer.step()
            return time.perf_counter() - begin
        hook: Any
        for hook in self.ddp._forward_pre_hooks.values():
            hook(self.ddp, ())
        self.recorder.reduced(self.iteration)
        self.optimizer.step()
        self.recorder.mark()
        return time.perf_counter() - begin


def measure() -> list[Result]:
    """Return every figure of this module."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return [_compare(name, *case) for name, case in CASES.items()]
    finally:
        dist.destroy_process_group()


def _compare(name: str, sizes: Sequence[tuple[int, ...]], make: Make) -> Figure:
    alone, recorded = (
        StepLoop(sizes, make, recorded=recorded, ema=name == EMA) for recorded in (False, True)
    )
    for _ in range(3):
        alone.iterate()
        recorded.iterate()
    pairs = [(recorded.iterate(), alone.iterate()) for _ in range(ROUNDS)]
    with_, without = ([pair[i] for pair in pairs] for i in range(2))
    more = 1e3 * statistics.median(a - b for a, b in pairs)
    threads = counted(torch.get_num_threads(), "thread")
    if recorded.recorder is not None:
        recorded.recorder.close(last=False)
    return Figure(
        name,
        ratios(with_, without),
        "",
        smaller=True,
        note=f"{more:.2f} ms more than {1e3 * statistics.median(without):.2f} ms, {threads}",
    )
