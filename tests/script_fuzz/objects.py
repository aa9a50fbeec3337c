"""The objects of a plan's script: what wraps its model, and its optimizers, scheduler and scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.script_fuzz.plan import ScriptPlan

RATE: Final = 0.02
_SMALL_BUCKETS: Final = 0.0002
"""In MiB, so that each bucket has few parameters."""


def wrap(model: nn.Module, plan: ScriptPlan) -> DistributedDataParallel:
    """Return a model in DDP, with the plan's options."""
    options: dict[str, Any] = {}
    if "buckets" in plan.model.ddp:
        options["bucket_cap_mb"] = _SMALL_BUCKETS
    if "own-buffers" in plan.model.ddp:
        options["broadcast_buffers"] = False
    return DistributedDataParallel(
        model,
        find_unused_parameters=plan.leaves_out,
        gradient_as_bucket_view="views" in plan.model.ddp,
        **options,
    )


def make_optimizer(model: nn.Module, plan: ScriptPlan) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters."""
    wanted_optimizer = plan.optimizer
    groups: list[Any] = list(model.parameters())
    if wanted_optimizer.groups > 1:
        matrices = [p for p in groups if p.dim() > 1]
        vectors = [p for p in groups if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "lr": RATE / 2}]
    options: dict[str, Any] = {
        "lr": RATE,
        "foreach": wanted_optimizer.way == "foreach",
        "fused": wanted_optimizer.way == "fused",
    }
    if wanted_optimizer.kind == "SGD" and not plan.has("sparse"):
        options["momentum"] = 0.9
    kind: Any = getattr(torch.optim, wanted_optimizer.kind)
    optimizer: torch.optim.Optimizer = kind(groups, **options)
    return optimizer


def make_second(model: nn.Module, plan: ScriptPlan) -> torch.optim.Optimizer | None:
    """Return another optimizer of the same parameters, if the script has one."""
    if not plan.does("optimizer-second"):
        return None
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def make_scheduler(optimizer: torch.optim.Optimizer, plan: ScriptPlan) -> Any:
    """Return the plan's scheduler, or `None`."""
    schedulers = torch.optim.lr_scheduler
    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "step": lambda: schedulers.StepLR(optimizer, 2, 0.8),
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
        "cosine": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
        "cycle": lambda: schedulers.OneCycleLR(optimizer, RATE, total_steps=100, cycle_momentum=False),
    }
    return makers[plan.loop.scheduler]()


def make_scaler(plan: ScriptPlan) -> Any:
    """Return a GradScaler whose scale changes often, or `None`."""
    if plan.loop.scaler == "none":
        return None
    return torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
