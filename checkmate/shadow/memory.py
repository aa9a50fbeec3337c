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
    """Give freed memory back to the kernel; nothing happens where the C library can't (it is not glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def one_arena() -> None:
    """Have all threads allocate from one heap; as `trim`, for glibc alone.

    Else each thread that steps keeps what one parameter's step needs beside it, for good: a tenth of a node's
    memory with parameters of 8 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def load_optimizers() -> None:
    """Have torch load all that a first optimizer needs, which takes it seconds: not while trainers wait."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
