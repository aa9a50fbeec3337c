"""The model, optimizer and scheduler of a scenario."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.chaos.scenario import ModelSpec as Orders

ROWS = 3
INPUTS = 64


class RandomNet(nn.Module):
    """A model with a number for each row of 64 values, to which every part contributes."""

    seen: torch.Tensor
    hidden: torch.Tensor

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self.has = orders.has
        width = orders.width
        self.first = nn.Linear(INPUTS, width)
        self.last = nn.Linear(width, 1)
        if orders.has("norm"):
            self.norm = nn.BatchNorm1d(width)
        if orders.has("dropout"):
            self.dropout = nn.Dropout(0.2)
        if orders.has("embedding"):
            self.embedding = nn.Embedding(11, width)
        if orders.has("tied"):
            self.middle, self.tied = nn.Linear(width, width), nn.Linear(width, width)
            self.tied.weight = self.middle.weight
        if orders.has("sometimes"):
            self.sometimes = nn.Linear(INPUTS, 1)
        if orders.has("buffer"):
            self.register_buffer("seen", torch.zeros(2, 3))
            self.register_buffer("hidden", torch.zeros((), dtype=torch.int64), persistent=False)
        self._add_parameters(orders)
        self._add_turned(orders.turned)

    def forward(self, x: torch.Tensor, *, sometimes: bool = False) -> torch.Tensor:
        """Return a number for each row."""
        y = self.first(x)
        if self.has("embedding"):
            y = y + self.embedding((x[:, 0] * 10).long().abs() % 11)
        if self.has("norm"):
            y = self.norm(y)
        y = torch.tanh(y)
        if self.has("tied"):
            y = y + self.tied(torch.tanh(self.middle(y)))
        if self.has("dropout"):
            y = self.dropout(y)
        if self.has("buffer"):
            self.seen.add_(y.detach().float().mean())
            self.hidden.add_(1)
        result: torch.Tensor = self.last(y).squeeze(1).float()
        if sometimes:
            result = result + self.sometimes(x).squeeze(1)
        return self._more(x, result)

    def _add_parameters(self, orders: Orders) -> None:
        if orders.has("scalar"):
            self.scalar = nn.Parameter(torch.ones(()))
        if orders.has("wide"):
            self.wide = nn.Parameter(torch.linspace(0.1, 0.3, 3, dtype=torch.float64))
        if orders.has("half"):
            self.short = nn.Parameter(torch.randn(INPUTS, 5).to(torch.bfloat16))
        if orders.has("float16"):
            self.shorter = nn.Parameter(torch.randn(INPUTS, 5).to(torch.float16) / 8)
        if orders.has("empty"):
            self.empty = nn.Parameter(torch.zeros(0, 4))
        if orders.has("unused"):
            self.unused = nn.Parameter(torch.ones(3))
        if orders.has("frozen"):
            self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def _add_turned(self, turned: tuple[str, ...]) -> None:
        self.turned = turned
        if "flat" in turned:
            self.flat: nn.Module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if "deep" in turned:
            self.deep: nn.Module = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        if "weight" in turned:
            self.weight = nn.Parameter(torch.randn(5, INPUTS).t())

    def _more(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        if "flat" in self.turned:
            result = result + self.flat(x.view(-1, 4, 4, 4)).flatten(1).tanh().mean(1)
        if "deep" in self.turned:
            result = result + self.deep(x.view(-1, 2, 2, 4, 4)).flatten(1).tanh().mean(1)
        if "weight" in self.turned:
            result = result + (x @ self.weight).tanh().mean(1)
        if self.has("half"):
            result = result + (x.to(torch.bfloat16) @ self.short).float().tanh().mean(1)
        if self.has("float16"):
            result = result + (x @ self.shorter.float()).tanh().mean(1)
        if self.has("frozen"):
            result = result + self.frozen.mean()
        if self.has("wide"):
            result = result * self.wide.mean().float()
        if self.has("empty"):
            result = result + self.empty.sum()
        return result * self.scalar if self.has("scalar") else result


def make_optimizer(model: RandomNet, orders: Orders) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters; a frozen one has been stepped once."""
    kind: Any = getattr(torch.optim, orders.optimizer)
    parameters: list[Any] = list(model.parameters())
    if orders.has("groups"):
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        parameters = [{"params": matrices}, {"params": vectors, "lr": orders.options["lr"] / 2}]
    optimizer: torch.optim.Optimizer = kind(parameters, **orders.options)
    if orders.has("frozen"):
        model.frozen.grad = torch.ones_like(model.frozen)
        optimizer.step()
        model.frozen.grad = None
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, orders: Orders) -> Any:
    """Return the scheduler of the orders, or `None`."""
    rate = orders.options["lr"]
    makers: dict[str, Any] = {
        "none": lambda: None,
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "onecycle": lambda: lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=10 * orders.iterations, cycle_momentum=False
        ),
        "step": lambda: lr_scheduler.StepLR(optimizer, 3, 0.9),
        "warm-restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
        "sequential": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6),
                lr_scheduler.CosineAnnealingLR(optimizer, 12),
            ],
            milestones=[6],
        ),
        "chained": lambda: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(optimizer, 4, 0.9), lr_scheduler.ExponentialLR(optimizer, 0.99)], optimizer
        ),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.8),
    }
    return makers[orders.schedule]()
