"""Captures a rank's random generators at the end of an iteration, and sets them again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(*, in_loop: bool = False) -> dict[str, Any]:
    """Return the states of the generators of torch, the CUDA device, Python and NumPy.

    `in_loop`: an iterator over batches exists, so that creating one in a resumed run must not advance them.
    """
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "in_loop": in_loop,
    }


def install(state: dict[str, Any]) -> None:
    """Set all generators to a state from `capture`, as `state.load_generators` returns it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, dtype=np.uint32).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
