"""Times of an iteration and a checkpoint of a LLaMA-style transformer (the paper's Appendix A). Pure.

Two of the paper's formulas for grouped-query attention are wrong as printed:

- The width of keys and values is printed as g·a (groups times heads). It is g·(h/a): g heads of the width of
  each query head. For LLaMA3-405B both are 1,024, because it has 128 heads of width 128.
- The output projection is printed with the same input width. Its input is all heads, of width h.

No single version gives both results of the paper. 4.58 s per iteration follows from the output projection as
printed (the correct one gives 5.06 s), but 3.49e25 operations of pre-training from the correct one (as
printed: 3.18e25). `OutputProjection` selects the version. The paper's FFN has two matrices, but LLaMA3's has
three (SwiGLU); with three and the correct projection, an iteration takes 6.75 s. Measure yours if you can.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

BYTES_PER_PARAMETER: Final = 2 + 4
"""As in the paper: bf16, and 4 bytes of optimizer state. (Adam has 8, and mixed precision 4 more.)"""


class OutputProjection(Enum):
    """The assumed input width of attention's output projection."""

    AS_PRINTED = "as printed"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Transformer:
    """A LLaMA-style transformer's dimensions (the paper's Table 1)."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    heads: int
    kv_groups: int
    ffn_matrices: int = 2

    @property
    def kv_width(self) -> int:
        """Width of keys and of values: a head's width for each group."""
        return self.kv_groups * self.hidden // self.heads


def forward_flops(
    model: Transformer,
    tokens: float,
    sequence: int,
    output: OutputProjection = OutputProjection.AS_PRINTED,
) -> float:
    """Return the operations of a forward pass over `tokens` (the paper's b·s) in sequences of a length."""
    h = model.hidden
    projected = h if output is OutputProjection.HIDDEN else model.kv_width
    layer = (
        2 * (h * h + 2 * h * model.kv_width)  # queries, keys, values
        + 4 * sequence * h  # attention
        + 2 * h * projected  # attention's output
        + 2 * model.ffn_matrices * h * model.ffn
        + 2 * h  # rotary positions
    )
    return tokens * (model.layers * layer + 4 * h * model.vocabulary)


def iteration_flops(
    model: Transformer,
    tokens: float,
    sequence: int,
    output: OutputProjection = OutputProjection.AS_PRINTED,
) -> float:
    """Return the operations of forward and backward: three forward passes, without recomputation."""
    return 3 * forward_flops(model, tokens, sequence, output)


def iteration_seconds(flops_per_iteration: float, flops_per_second_per_gpu: float, gpus: int) -> float:
    """Return the time of an iteration, at the operations per second that each GPU reaches in practice."""
    return flops_per_iteration / (flops_per_second_per_gpu * gpus)


def checkpoint_bytes(parameters: float, bytes_per_parameter: float = BYTES_PER_PARAMETER) -> float:
    """Return the size of a checkpoint in bytes."""
    return parameters * bytes_per_parameter


def checkpoint_seconds(size_bytes: float, storage_bytes_per_second: float) -> float:
    """Return the time to write a checkpoint, which is the stall if training waits for it."""
    return size_bytes / storage_bytes_per_second
