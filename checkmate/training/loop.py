"""A script's loop over batches: marks where iterations end, and is entered again when a run resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from checkmate import state
from checkmate.training.record.capture import install_generators
from checkmate.training.record.recorder import Recorder
from checkmate.training.start.install import part_of
from checkmate.training.start.membership import Membership, Start

Batch = TypeVar("Batch")


class Loop:
    """The loop boundary of one protection."""

    def __init__(
        self, recorder: Recorder, generators: Mapping[str, Any] | None, begun: Callable[[], bool]
    ) -> None:
        """Create it.

        Args:
            recorder: Notes where iterations end.
            generators: States of random generators to set again after the iterator was created
                (`resumed_in`).
            begun: Returns whether an iteration has begun since the start.
        """
        self._recorder = recorder
        self._generators = generators
        self._begun = begun

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. An iteration ends when the next batch is requested, before it is drawn."""
        self._recorder.enter_loop()
        iterator = iter(batches)
        generators, self._generators = self._generators, None  # the next loop is a new one
        if generators is not None and not self._begun():
            install_generators(dict(generators))
        for batch in iterator:
            try:
                yield batch
            except GeneratorExit:  # left by `break` or an error
                self._recorder.mark(left=True)
                raise
            self._recorder.mark(in_loop=True)
        self._recorder.leave_loop()


def marks_known(place: Membership, start: Start) -> bool:
    """Return whether the script that a run resumes has marked its iterations, as far as that is known."""
    data = part_of(start.record, place.position).rng
    return start.plan.marks or bool(data and state.load_generators(data).get("marks"))


def resumed_in(place: Membership, start: Start) -> Mapping[str, Any] | None:
    """Return this rank's random generators if the run resumes between two batches of one iterator."""
    data = part_of(start.record, place.position).rng
    found = state.load_generators(data) if data else {}
    return found if found.get("in_loop") else None
