"""The average that a double binary tree computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkmate.wire.schedule import FIRST, LAST
from checkmate.wire.tree import tree_place, tree_slice


def tree_average(values: Sequence[torch.Tensor], channels: int, divisor: int | None = None) -> torch.Tensor:
    """Return the expected average: a rank adds its children's sums to its own values, in their order."""
    ranks, average = len(values), values[0].clone()

    def sum_at(rank: int, side: int, part: slice) -> torch.Tensor:
        sum_ = values[rank][part].clone()
        for child in tree_place(ranks, rank, side).children:
            sum_ += sum_at(child, side, part)
        return sum_

    for channel in range(channels):
        for side, root in ((FIRST, 0), (LAST, ranks - 1)):
            where = tree_slice(len(average), channels, channel, side)
            part = slice(where.start, where.stop)
            average[part] = sum_at(root, side, part) / (divisor or ranks)
    return average
