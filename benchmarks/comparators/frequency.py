"""How often CheckFreq saves: profiled, and then adapted. Pure.

Source: J. Mohan, A. Phanishayee, V. Chidambaram, CheckFreq, FAST '21, sections 4.2 and 4.3; the constants are
those of its code (msr-fiddle/CheckFreq, src/cf_manager.py and cf_iterator.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

PROFILED: Final = range(5, 100)
"""The iterations without checkpoints whose mean is the time of an iteration."""
BOUND: Final = 0.05
"""The overhead above which checkpoints become rarer; 3.5% in the paper, 5% in its code."""
_RARER: Final = 2


class Frequency:
    """The number of iterations from one checkpoint to the next; 0 until it is known."""

    def __init__(self, interval: int = 0, *, profiled: range = PROFILED, bound: float = BOUND) -> None:
        """`interval`: a fixed one, which is neither profiled nor adapted."""
        self.interval = interval
        self.fixed = interval > 0
        self._profiled, self._bound = profiled, bound
        self._plain: list[float] = []
        self._since: list[float] = []
        self._iteration = 0.0

    def iterated(self, seconds: float) -> bool:
        """Take the time of an iteration. Return whether the profile of iterations is now complete."""
        if self.fixed:
            return False
        if self.interval:
            self._adapt(seconds)
            return False
        self._plain.append(seconds)
        return len(self._plain) == self._profiled.stop

    def saved(self, copying: float, whole: float) -> None:
        """Take the seconds for a copy in memory, and for that and writing it, and derive the interval."""
        self._iteration = fmean(self._plain[self._profiled.start :])
        self.interval = interval_for(self._plain[self._profiled.start :], copying, whole)

    def _adapt(self, seconds: float) -> None:
        self._since.append(seconds)
        if len(self._since) < self.interval:
            return
        plain = len(self._since) * self._iteration
        if (sum(self._since) - plain) / plain > self._bound:
            self.interval += _RARER
        self._since.clear()


def interval_for(iterations: Sequence[float], copying: float, whole: float) -> int:
    """Return how many iterations hide the writing of a checkpoint, of which the next may begin then."""
    return max(1, math.ceil((whole - copying) / fmean(iterations)))
