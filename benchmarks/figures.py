"""Measured figures with their spread, aim and floor, and tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from checkmate.output.tables import FittedTable

_DIGITS: Final = range(3, 18)
"""Significant digits of figures: the first, or as many as show that a bound is missed."""


@dataclass(frozen=True)
class Figure:
    """One figure: `samples` of one run, all in `unit`.

    It must reach `floor` and should reach `aim`. With `smaller`, smaller values are better. A figure without
    a floor is only reported.
    """

    name: str
    samples: tuple[float, ...]
    unit: str
    aim: float | None = None
    floor: float | None = None
    smaller: bool = False
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def holds(self) -> bool | None:
        """True if the floor is reached; `None` without a floor."""
        return None if self.floor is None else self._reaches(self.floor)

    @property
    def verdict(self) -> str:
        """The result in words: the aim, or at least the floor, is reached; "" without a floor."""
        if self.floor is None:
            return ""
        if self._reaches(self.floor if self.aim is None else self.aim):
            return "reached"
        return "missed, within the limit" if self.holds else "beyond the limit"

    def _reaches(self, value: float) -> bool:
        return self.median <= value if self.smaller else self.median >= value


@dataclass(frozen=True)
class Skipped:
    """A figure that cannot be measured here, with the reason."""

    name: str
    reason: str


Result = Figure | Skipped


def ratios(values: Sequence[float], references: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios pair by pair, which are robust against a machine that drifts."""
    return tuple(a / b for a, b in zip(values, references, strict=True))


def spread95(samples: Sequence[float]) -> str:
    """Return the 95% interval of the median, by order statistics (normal approximation)."""
    count = len(samples)
    below = max(math.floor((count - 1.96 * math.sqrt(count)) / 2), 0)
    low, high = sorted(samples)[below], sorted(samples)[count - 1 - below]
    return f"95% of the median {low:.4g} to {high:.4g}"


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a number with some significant digits, or a large count in full."""
    whole = len(f"{abs(value):.0f}")
    text = f"{value:,.0f}" if whole >= max(digits, 4) else f"{value:,.{digits}g}"
    return f"{text} {unit}".strip()


def median_and_spread(samples: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """Return the median with some significant digits, and the least and the greatest of several samples."""
    median = number(statistics.median(samples), unit, digits)
    if len(samples) == 1:
        return median
    return f"{median} ({number(min(samples))} to {number(max(samples))}, n={len(samples)})"


def row(result: Result) -> tuple[str, str, str, str]:
    """Return name, value with spread, aim and floor, and verdict."""
    if isinstance(result, Skipped):
        return result.name, f"not measured: {result.reason}", "", "skipped"
    goal, digits = "", _DIGITS.start
    if result.floor is not None:
        aim = result.floor if result.aim is None else result.aim
        limits = {limit: number(limit) for limit in (aim, result.floor)}
        if result.verdict != "reached":
            missed = aim if result.holds else result.floor
            digits = next(d for d in _DIGITS if number(result.median, digits=d) != number(missed, digits=d))
            limits[missed] = number(missed, digits=digits)
        goal = f"{limits[aim]} ({'at most' if result.smaller else 'at least'} {limits[result.floor]})"
    value = median_and_spread(result.samples, result.unit, digits)
    return result.name + (f"; {result.note}" if result.note else ""), value, goal, result.verdict


def table(title: str, results: Sequence[Result]) -> FittedTable:
    """Return a table for a terminal."""
    columns = ("figure", "median (spread)", "aim", "")
    fitted = FittedTable(title, *columns, folds=columns[:2])
    for result in results:
        fitted.add_row(*row(result))
    return fitted


def markdown(title: str, results: Sequence[Result]) -> str:
    """Return a table in Markdown."""
    lines = [f"{title}.", "", "| figure | median (spread) | aim | |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row(result)) + " |" for result in results]
    return "\n".join(lines) + "\n"


def data(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results as JSON has them."""
    return [{"kind": type(result).__name__, **asdict(result)} for result in results]


def from_data(data: Mapping[str, Any]) -> Result:
    """Return a result from its JSON."""
    fields = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == "Skipped":
        return Skipped(**fields)
    return Figure(**{**fields, "samples": tuple(fields["samples"])})
