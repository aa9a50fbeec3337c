"""A user's script, for mypy: what it writes has a type, and mistakes are found before anything runs.

`mypy --strict` checks it with the rest of the tree; an `ignore` that is not needed is an error, too.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR

import checkmate


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> float:
    """Train as docs/training.md does; return the last loss."""
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    scaler = torch.amp.GradScaler("cpu")
    loss = torch.zeros(())
    try:
        start, extra = checkmate.restore(ddp, optimizer, scheduler=scheduler, scaler=scaler, timeout=30)
        assert_type(start, int)
        position = 0 if extra is None else int(extra["seen"])
        with checkmate.protect(
            ddp, optimizer, scheduler=scheduler, scaler=scaler, extra=lambda: {"seen": position}
        ) as protection:
            assert_type(protection, checkmate.Protection)
            for iteration in protection.steps(range(start, 10)):
                assert_type(iteration, int)
                loss = ddp(torch.zeros(1)).mean()
                scaler.scale(loss).backward()
                assert_type(checkmate.clip_grad_norm_(ddp.parameters(), 1.0), torch.Tensor)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    except checkmate.RingError as error:
        assert_type(error.args, tuple[Any, ...])
        raise
    except checkmate.CheckmateError as error:
        raise SystemExit(str(error)) from error
    return loss.item()


def other_schedulers(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Use every kind of scheduler, and make mistakes that mypy finds."""
    warm = LambdaLR(optimizer, float)
    checkmate.restore(ddp, optimizer, scheduler=ReduceLROnPlateau(optimizer))
    restored = checkmate.restore(ddp, optimizer, scheduler=SequentialLR(optimizer, [warm, warm], [3]))
    assert_type(restored.iteration, int)
    assert_type(checkmate.__version__, str)
    checkmate.restore(ddp, [optimizer], scheduler=[warm])
    checkmate.restore(ddp, optimizer, scheduler=7)  # type: ignore[arg-type]
    checkmate.restore(ddp, optimizer, fresh=True)  # type: ignore[call-arg]
    checkmate.protect(ddp, optimizer, scaler=warm)  # type: ignore[arg-type]
    checkmate.resotre(ddp, optimizer)  # type: ignore[attr-defined]
