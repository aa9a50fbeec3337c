"""How several DP groups that train one model share out its parameters. Pure (design, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one DP group reduces: number `index` of `count`."""

    index: int = 0
    count: int = 1


WHOLE: Final = Share()


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Return the share that each parameter belongs to, so that shares have similar sizes.

    The largest parameter comes first, and goes to the smallest share so far. Of equal ones the last comes
    first, so that shares fill evenly during backward.

    Args:
        sizes: Bytes of each parameter, in registration order.
        count: The number of shares.
    """
    filled = [0] * count
    ranks = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], -number)):
        ranks[number] = filled.index(min(filled))
        filled[ranks[number]] += sizes[number]
    return ranks
