"""The model of a plan, with the parts that the plan names."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.script_fuzz.plan import ScriptPlan

INPUTS: Final = 5
ROWS: Final = 4
_RETYPED_IN: Final = 3
"""The forward in which buffers get another type."""


class Counting(nn.Module):
    """A factor that depends on the number of calls, which is extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, a little larger after each call."""
        self.calls += 1
        return x * (1 + 0.01 * (self.calls % 7))

    def get_extra_state(self) -> dict[str, int]:
        """Return the number of calls."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Set the number of calls."""
        self.calls = state["calls"]


class Drifting(nn.Module):
    """An offset that each call moves: a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.zeros(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with an offset."""
        self.offset = 0.9 * self.offset + 0.1 * x.detach().mean()
        return x + self.offset.mean()

    def get_extra_state(self) -> torch.Tensor:
        """Return the offset."""
        return self.offset

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Set the offset."""
        self.offset = state.clone()


class PlannedNet(nn.Module):
    """A model with a number for each row, to which every part contributes."""

    grown: torch.Tensor
    count: torch.Tensor
    mean: torch.Tensor
    sign: torch.Tensor
    hidden: torch.Tensor
    lazy: torch.Tensor | None

    def __init__(self, plan: ScriptPlan) -> None:
        super().__init__()
        self.has = plan.has
        width = plan.model.width
        self.first, self.last = nn.Linear(INPUTS, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleDict()
        if plan.has("shared"):
            self.blocks["shared"] = nn.Linear(width, width)
        if plan.has("tied"):
            self.blocks["tied"], self.blocks["same"] = nn.Linear(width, width), nn.Linear(width, width)
            self.blocks["same"].weight = self.blocks["tied"].weight
        if plan.has("parametrized"):
            self.blocks["parametrized"] = parametrizations.weight_norm(nn.Linear(width, width))
        if plan.has("spectral"):
            self.blocks["spectral"] = parametrizations.spectral_norm(nn.Linear(width, width))
        if plan.has("norm"):
            self.blocks["norm"] = nn.BatchNorm1d(width)
        if plan.has("dropout"):
            self.blocks["dropout"] = nn.Dropout(0.3)
        if plan.has("extra-counter"):
            self.blocks["counting"] = Counting()
        if plan.has("extra-tensor"):
            self.blocks["drifting"] = Drifting()
        if plan.has("sometimes"):
            self.sometimes = nn.Linear(INPUTS, 1)
        if plan.has("sparse"):
            self.sparse = nn.Embedding(7, width, sparse=True)
        if plan.has("max-norm"):
            self.short = nn.Embedding(7, width, max_norm=0.3)
        if plan.has("hooked"):
            hooked: Any = self.first.weight  # torch's method has no types
            hooked.register_hook(lambda gradient: gradient * 0.5)
        self._add_tensors(plan)

    def _add_tensors(self, plan: ScriptPlan) -> None:
        if plan.has("many"):
            self.many = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(12)])
        if plan.has("frozen"):
            self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        if plan.has("empty"):
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if plan.has("wide"):
            self.wide = nn.Parameter(torch.linspace(0.1, 0.3, 3, dtype=torch.float64))
        if plan.has("growing"):
            self.register_buffer("grown", torch.zeros(1))
        if plan.has("retyped"):
            self.register_buffer("count", torch.zeros(2, dtype=torch.int32))
            self.register_buffer("mean", torch.zeros(2))
        if plan.has("negative-zero"):
            self.register_buffer("sign", torch.zeros(3))
        if plan.has("hidden"):
            self.register_buffer("hidden", torch.zeros(2), persistent=False)
        if plan.has("lazy"):
            self.register_buffer("lazy", None)

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Return a number for each row of x."""
        y = self.first(x)
        if self.has("sparse"):
            y = y + self.sparse((x[:, 0] * 10).long().abs() % 7)
        if self.has("max-norm"):
            y = y + self.short((x[:, 1] * 10).long().abs() % 7)
        for name, block in self.blocks.items():
            y = block(torch.tanh(y))
            if name == "shared":
                y = block(torch.tanh(y))
        result: torch.Tensor = self.last(torch.tanh(y)).squeeze(1)
        if self.has("sometimes") and turn % 2:
            result = result + self.sometimes(x).squeeze(1)
        if self.training:
            self._change_buffers(result.detach())
        return self._more(result)

    def _change_buffers(self, result: torch.Tensor) -> None:
        if self.has("growing"):
            self.grown = torch.cat([self.grown, self.grown[-1:] + 1])
        if self.has("retyped"):
            self.count.add_(1)
            self.mean.mul_(0.9).add_(0.1 * result.mean())
            if int(self.count[0]) == _RETYPED_IN:
                self.count, self.mean = self.count.to(torch.int64), self.mean.to(torch.float64)
        if self.has("negative-zero"):
            self.sign.neg_()
        if self.has("hidden"):
            self.hidden.add_(1)
        if self.has("lazy"):
            self.lazy = torch.ones(2) if self.lazy is None else self.lazy + 1

    def _more(self, result: torch.Tensor) -> torch.Tensor:
        more: list[Any] = []
        if self.has("many"):
            more += [p.tanh().sum() for p in self.many]
        if self.has("frozen"):
            more.append(self.frozen.mean())
        if self.has("empty"):
            more.append(self.empty.sum())
        if self.has("wide"):
            more.append(self.wide.mean().float())
        if self.has("growing"):
            more.append(self.grown.sum() * 1e-3)
        if self.has("retyped"):
            more.append(self.mean.sum().float() + self.count.sum() * 1e-3)
        if self.has("negative-zero"):
            more.append(torch.copysign(torch.ones(3), self.sign).sum() * 0.1)
        if self.has("hidden"):
            more.append(self.hidden.sum() * 1e-3)
        if self.has("lazy") and self.lazy is not None:
            more.append(self.lazy.sum() * 1e-3)
        return sum(more, result)
