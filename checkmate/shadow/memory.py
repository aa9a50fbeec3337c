"""Memory of this process: its size, and how it is allocated."""

from __future__ import annotations

import resource
from typing import Final

import torch

from checkmate.base.machine_memory import glibc

_M_ARENA_MAX: Final = -8  # <malloc.h>


def resident() -> int:
    """Return the resident memory in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def one_arena() -> None:
    """Have future threads share the existing malloc arenas.

    Otherwise each stepping thread permanently keeps the temporaries of one parameter's step, which is a tenth
    of a node's memory with parameters of 8 MB.
    """
    glibc("mallopt", _M_ARENA_MAX, 1)


def load_optimizers() -> None:
    """Make torch load what a first optimizer needs, which takes seconds, before trainers wait for it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
