"""The models that the evaluation trains, with their data: the same for each system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from checkmate.examples.gpt import text
from checkmate.examples.gpt.model import Gpt, Shape
from checkmate.examples.resnet import images, resnet

_ROWS: Final = 200_000
_SEED: Final = 1


@dataclass(frozen=True)
class Workload:
    """A model with its optimizer, and the loss of a random batch."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loss: Callable[[DistributedDataParallel], torch.Tensor]

    def step(self, iteration: int, rank: int) -> float:
        """Train an iteration; return its loss. Random numbers that were drawn before do not matter."""
        torch.manual_seed(1_000_000 * _SEED + 1000 * iteration + rank)
        self.optimizer.zero_grad()
        loss = self.loss(self.ddp)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.item())


class Recommender(nn.Module):
    """Large embeddings, of which an iteration uses few rows, and a small perceptron: 6.4 million in all."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(_ROWS, 32, mode="mean")
        self.score = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        """Map (batch, items) to (batch)."""
        out: torch.Tensor = self.score(self.items(bags)).squeeze(1)
        return out


Parallel = Callable[[nn.Module, float], DistributedDataParallel]
"""Makes DDP of a model; the number is its `bucket_cap_mb`."""


def make(name: str, parallel: Parallel) -> Workload:
    """Return a workload by name, the same on all ranks."""
    torch.manual_seed(_SEED)
    return WORKLOADS[name](parallel)


def plain_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Return DDP as it is."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb)


def _gpt(parallel: Parallel) -> Workload:
    ddp = parallel(Gpt(Shape()), 4)
    return Workload(ddp, _adamw(ddp, 1e-3), partial(_gpt_loss, text.read()))


def _gpt_loss(data: text.Text, ddp: DistributedDataParallel) -> torch.Tensor:
    loss: torch.Tensor = ddp(*data.batch(4, 64))
    return loss


def _batchnorm(parallel: Parallel) -> Workload:
    ddp = parallel(resnet(48), 1)
    return Workload(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9), _image_loss)


def _image_loss(ddp: DistributedDataParallel) -> torch.Tensor:
    pictures, labels = images(16, torch.device("cpu"))
    return functional.cross_entropy(ddp(pictures), labels)


def _embeddings(parallel: Parallel) -> Workload:
    ddp = parallel(Recommender(), 4)
    return Workload(ddp, _adamw(ddp, 1e-3), _score_loss)


def _score_loss(ddp: DistributedDataParallel) -> torch.Tensor:
    bags = torch.randint(_ROWS, (64, 20))
    return functional.mse_loss(ddp(bags), bags.float().mean(1) / _ROWS)


def _adamw(ddp: DistributedDataParallel, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=rate, weight_decay=0.1)


WORKLOADS: Final[dict[str, Callable[[Parallel], Workload]]] = {
    "gpt": _gpt,
    "batchnorm": _batchnorm,
    "embeddings": _embeddings,
}
