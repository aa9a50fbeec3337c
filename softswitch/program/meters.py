"""Meters: two rates, three colors, color-blind (RFC 2698), as in BMv2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

GREEN, YELLOW, RED = 0, 1, 2
SECOND: Final = 1_000_000_000
"""Parts of a token, so that a rate is a whole number of parts in a nanosecond."""

Clock = Callable[[], int]
"""Nanoseconds from any start, never decreasing."""


class MeterRates(NamedTuple):
    """A meter's configuration: committed and peak rate, each per second, with its burst."""

    cir: int
    cburst: int
    pir: int
    pburst: int


@dataclass(slots=True)
class MeterCell:
    """A configured cell, with its two buckets, which are full at first. Unconfigured cells are `None`."""

    rates: MeterRates
    committed: int = field(init=False)
    peak: int = field(init=False)
    updated: int | None = None
    """Time of the last packet, in nanoseconds."""

    def __post_init__(self) -> None:
        self.committed = self.rates.cburst * SECOND
        self.peak = self.rates.pburst * SECOND

    def color(self, amount: int, now: int) -> int:
        """Return the color of a packet of `amount` packets or bytes, and take its tokens."""
        cir, cburst, pir, pburst = self.rates
        if self.updated is not None:
            elapsed = now - self.updated
            self.committed = min(self.committed + cir * elapsed, cburst * SECOND)
            self.peak = min(self.peak + pir * elapsed, pburst * SECOND)
        self.updated = now
        amount *= SECOND
        if self.peak < amount:
            return RED
        self.peak -= amount
        if self.committed < amount:
            return YELLOW
        self.committed -= amount
        return GREEN
