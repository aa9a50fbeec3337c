"""This process's memory: how much it has, and giving back what seeding and steps have freed."""

from __future__ import annotations

import ctypes
import resource
from typing import Final

import torch

_M_ARENA_MAX: Final = -8  # <malloc.h>


def resident() -> int:
    """Resident memory, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def trim() -> None:
    """Give freed memory back to the kernel."""
    _glibc("malloc_trim", 0)


def one_arena() -> None:
    """Have no more heaps made: threads that are yet to come share those that there are.

    Else each thread that steps keeps what one parameter's step needs beside it, for good: a tenth of a node's
    memory with parameters of 8 MB.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def _glibc(name: str, *arguments: int) -> None:
    """Call one of glibc's own functions; with another C library nothing happens."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def load_optimizers() -> None:
    """Have torch load all that a first optimizer needs, which takes it seconds: not while trainers wait."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
