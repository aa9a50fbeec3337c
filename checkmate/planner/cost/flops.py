"""How long an iteration and a checkpoint of a LLaMA-style transformer take (the paper's Appendix A). Pure.

Two of the paper's formulas for grouped-query attention can't be right as printed:

- Keys and values are said to be g·a wide (groups times heads). They are g·(h/a) wide: g heads of the
  width that each query head has. For LLaMA3-405B both are 1,024, since it has 128 heads of width 128.
- The output projection is said to read that width too. It reads all heads, which are h wide.

No one version gives both numbers that the paper draws from them. 4.58 s an iteration comes from the output
projection as printed (the right one gives 5.06 s); 3.49e25 operations of pre-training from the right one (as
printed: 3.18e25). `OutputProjection` chooses. The paper's FFN has two matrices, LLaMA3's has three (SwiGLU);
with these and the right projection, an iteration takes 6.75 s. Measure yours if you can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

BYTES_PER_PARAMETER: Final = 2 + 4
"""As the paper counts: bf16, and 4 bytes of optimizer state. (Adam keeps 8, and mixed precision 4 more.)"""


class OutputProjection(Enum):
    """How wide the input of attention's output projection is taken to be."""

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
        """Width of keys, and of values: a head's width for each group."""
        return self.kv_groups * self.hidden // self.heads


LLAMA3_405B: Final = Transformer(
    layers=126, hidden=16_384, ffn=53_248, vocabulary=128_256, heads=128, kv_groups=8
)
LLAMA3_405B_BATCH_TOKENS: Final = 16 * 2**20
LLAMA3_405B_PHASES: Final = ((15.6e12, 8_192), (0.8e12, 131_072), (40e6, 131_072))
"""Tokens and sequence length of pre-training: initial, long-context, annealing."""


def forward_flops(
    model: Transformer,
    tokens: float,
    sequence: int,
    output: OutputProjection = OutputProjection.AS_PRINTED,
) -> float:
    """Operations of one forward pass over `tokens` (the paper's b·s) in sequences of length `sequence`."""
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
    """Operations of forward and backward: three forward passes, nothing being recomputed."""
    return 3 * forward_flops(model, tokens, sequence, output)


def training_flops(
    model: Transformer,
    phases: Iterable[tuple[float, int]],
    output: OutputProjection = OutputProjection.HIDDEN,
) -> float:
    """Operations of training over `phases`, each its tokens and its sequence length."""
    return sum(iteration_flops(model, tokens, sequence, output) for tokens, sequence in phases)


def iteration_seconds(flops_per_iteration: float, flops_per_second_per_gpu: float, gpus: int) -> float:
    """How long an iteration takes, at the operations a second that each GPU reaches in practice."""
    return flops_per_iteration / (flops_per_second_per_gpu * gpus)


def checkpoint_bytes(parameters: float, bytes_per_parameter: float = BYTES_PER_PARAMETER) -> float:
    """Size of a checkpoint."""
    return parameters * bytes_per_parameter


def checkpoint_seconds(size_bytes: float, storage_bytes_per_second: float) -> float:
    """How long writing a checkpoint takes, which is the stall where training waits for it."""
    return size_bytes / storage_bytes_per_second
