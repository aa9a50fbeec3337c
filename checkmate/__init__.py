"""Checkmate: per-iteration checkpoints of PyTorch DDP training.

checkmate.restore(ddp, optimizer)   # resume from the shadow nodes, if they hold anything
checkmate.protect(ddp, optimizer)   # have them follow from here on
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from checkmate import extras

if TYPE_CHECKING:
    from checkmate.training.protect import Protection, protect
    from checkmate.training.record.wrapped import clip_grad_norm_
    from checkmate.training.restore import Restored, RestoreError, restore

__all__ = ["Protection", "RestoreError", "Restored", "clip_grad_norm_", "protect", "restore"]

_WHERE: Final = {
    "clip_grad_norm_": "checkmate.training.record.wrapped",
    "Protection": "checkmate.training.protect",
    "protect": "checkmate.training.protect",
    "RestoreError": "checkmate.training.restore",
    "Restored": "checkmate.training.restore",
    "restore": "checkmate.training.restore",
}


def __getattr__(name: str) -> Any:
    """Import on first use, because importing torch takes seconds and most commands do not need it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'checkmate' has no attribute {name!r}")
    with extras.needs(f"checkmate.{name}", "trainer"):
        return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
