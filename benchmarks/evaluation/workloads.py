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


Parallel = Callable[[nn.Module, float], DistributedDataParallel]
"""Makes DDP of a model; the number is its `bucket_cap_mb`."""
BatchLoss = Callable[[DistributedDataParallel], torch.Tensor]


@dataclass(frozen=True)
class LocalModel:
    """A model of this process with its optimizer, which outlasts process groups, and the loss of a batch."""

    module: nn.Module
    bucket_mb: float
    optimizer: torch.optim.Optimizer
    loss: BatchLoss

    def parallel(self, parallel: Parallel) -> Workload:
        """Return it in a process group."""
        return Workload(parallel(self.module, self.bucket_mb), self.optimizer, self.loss)


@dataclass(frozen=True)
class Workload:
    """A model in DDP with its optimizer, and the loss of a random batch."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loss: BatchLoss

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


def build(name: str) -> LocalModel:
    """Return a model by name, the same on all ranks."""
    torch.manual_seed(_SEED)
    return WORKLOADS[name]()


def plain_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Return DDP as it is."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb)


def _gpt() -> LocalModel:
    module = Gpt(Shape())
    return LocalModel(module, 4, _adamw(module, 1e-3), partial(_gpt_loss, text.read()))


def _gpt_loss(data: text.Text, ddp: DistributedDataParallel) -> torch.Tensor:
    loss: torch.Tensor = ddp(*data.batch(4, 64))
    return loss


def _batchnorm() -> LocalModel:
    module = resnet(48)
    return LocalModel(module, 1, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), _image_loss)


def _image_loss(ddp: DistributedDataParallel) -> torch.Tensor:
    pictures, labels = images(16, torch.device("cpu"))
    return functional.cross_entropy(ddp(pictures), labels)


def _embeddings() -> LocalModel:
    module = Recommender()
    return LocalModel(module, 4, _adamw(module, 1e-3), _score_loss)


def _score_loss(ddp: DistributedDataParallel) -> torch.Tensor:
    bags = torch.randint(_ROWS, (64, 20))
    return functional.mse_loss(ddp(bags), bags.float().mean(1) / _ROWS)


def _adamw(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.1)


WORKLOADS: Final[dict[str, Callable[[], LocalModel]]] = {
    "gpt": _gpt,
    "batchnorm": _batchnorm,
    "embeddings": _embeddings,
}
