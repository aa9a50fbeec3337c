"""Sets of iterations as spans, so that a jump over many costs as much as one over few. Pure."""

from __future__ import annotations


class Spans:
    """Iterations that were passed over, each with the time when that was first noticed."""

    def __init__(self) -> None:
        self._spans: list[tuple[range, float]] = []  # without overlap, in order

    def __bool__(self) -> bool:
        return bool(self._spans)

    def add(self, passed: range, now: float) -> None:
        """Add iterations; those that are there already keep their time."""
        left = [passed]
        for known, _ in self._spans:
            left = [part for one in left for part in _without(one, known)]
        self._spans = sorted([*self._spans, *((one, now) for one in left)], key=lambda span: span[0].start)

    def remove(self, iteration: int) -> None:
        """Remove an iteration, if it is there."""
        self._spans = [
            (part, since)
            for span, since in self._spans
            for part in _without(span, range(iteration, iteration + 1))
        ]

    def since(self, iteration: int) -> float | None:
        """Return the time of an iteration, or `None` if it is not there."""
        return next((since for span, since in self._spans if iteration in span), None)

    def forget(self, iteration: int) -> int | None:
        """Remove iterations up to this one, and return the greatest of them, if any."""
        gone = [min(iteration, span[-1]) for span, _ in self._spans if span.start <= iteration]
        self._spans = [
            (range(max(span.start, iteration + 1), span.stop), since)
            for span, since in self._spans
            if span[-1] > iteration
        ]
        return max(gone, default=None)


def _without(one: range, other: range) -> list[range]:
    """Return the parts of a range outside of another one."""
    parts = range(one.start, min(one.stop, other.start)), range(max(one.start, other.stop), one.stop)
    return [part for part in parts if part]
