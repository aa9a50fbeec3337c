"""Memory of this process: its size, and the return of freed memory to the kernel."""

from __future__ import annotations

import ctypes
import resource
from typing import Final

import torch

_M_ARENA_MAX: Final = -8  # <malloc.h>


def resident() -> int:
    """Return the resident memory in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def trim() -> None:
    """Return freed memory to the kernel."""
    _glibc("malloc_trim", 0)


def one_arena() -> None:
    """Have future threads share the existing malloc arenas.

    Otherwise each stepping thread permanently keeps the temporaries of one parameter's step, which is a tenth
    of a node's memory with parameters of 8 MB.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def _glibc(name: str, *arguments: int) -> None:
    """Call a glibc-specific function; do nothing with another C library."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def load_optimizers() -> None:
    """Make torch load what a first optimizer needs, which takes seconds, before trainers wait for it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
