"""Optimizers whose steps shadow nodes can't repeat, so that their state is copied, from real packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

Parameters = Sequence[nn.Parameter]


def _muon(parameters: Parameters) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, and AdamW for the rest: two optimizers of one model."""
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    rest = [parameter for parameter in parameters if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


class SpreadMomentum(torch.optim.Optimizer):
    """Steps each parameter on one rank, which alone has its momentum, as distributed Muons do."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step what is this rank's, and give it to the others."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                owner = number % dist.get_world_size()
                if owner == dist.get_rank():
                    entries = self.state[parameter]
                    if not entries:
                        entries.update(momentum=torch.zeros_like(parameter), turns=0)
                    entries["turns"] += 1
                    entries["momentum"].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(entries["momentum"], alpha=group["lr"] / entries["turns"] ** 0.5)
                dist.broadcast(parameter, owner)


def _adamw(parameters: Parameters) -> list[torch.optim.Optimizer]:
    """Return AdamW, for scripts that have its state copied although nodes can repeat its steps."""
    return [torch.optim.AdamW(parameters, lr=1e-2)]


def _adafactor(parameters: Parameters) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(parameters, lr=1e-2)]


def _lion(parameters: Parameters) -> list[torch.optim.Optimizer]:
    from lion_pytorch import Lion  # noqa: PLC0415 - a run has one of them

    return [Lion(parameters, lr=1e-3)]


def _schedule_free(parameters: Parameters) -> list[torch.optim.Optimizer]:
    from schedulefree import AdamWScheduleFree  # noqa: PLC0415

    return [AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=3)]


def _of_package(name: str, **options: Any) -> Callable[[Parameters], list[torch.optim.Optimizer]]:
    def make(parameters: Parameters) -> list[torch.optim.Optimizer]:
        import pytorch_optimizer  # noqa: PLC0415

        return [getattr(pytorch_optimizer, name)(parameters, lr=1e-2, **options)]

    return make


def _eight_bits(parameters: Parameters) -> list[torch.optim.Optimizer]:
    """Return AdamW whose state is quantised: tensors of codes, scales and a map."""
    from torchao.optim import AdamW8bit  # noqa: PLC0415

    return [AdamW8bit(parameters, lr=1e-2, block_size=64)]


OPTIMIZERS: Final[Mapping[str, Callable[[Parameters], list[torch.optim.Optimizer]]]] = {
    "muon": _muon,
    "adafactor": _adafactor,
    "lion": _lion,
    "schedulefree": _schedule_free,
    "soap": _of_package("SOAP"),
    "shampoo": _of_package("Shampoo"),
    "adopt": _of_package("ADOPT"),
    "eightbit": _eight_bits,
    "spread": lambda parameters: [SpreadMomentum(parameters, lr=0.05)],
    "copied": _adamw,
}


def optimizers_of(name: str, parameters: Parameters) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this name for a model's parameters."""
    return OPTIMIZERS[name](parameters)
