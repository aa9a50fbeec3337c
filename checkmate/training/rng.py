"""The random generators of a rank: what they were when a step returned, and how they are set again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of torch's, the CUDA device's, Python's and NumPy's generators; plain values and tensors.

    Python's and NumPy's words are bytes, native uint32: to pickle hundreds of numbers takes longer.
    """
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": (version, np.array(words, dtype=np.uint32).tobytes(), gauss),
        "numpy": (kind, np.asarray(keys, dtype=np.uint32).tobytes(), *rest),
    }


def install(state: dict[str, Any]) -> None:
    """Set all generators to what `capture` found."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, dtype=np.uint32).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
