"""What the kernel did otherwise than the tagger asked reaches the trainer's log."""

from __future__ import annotations

import logging

import pytest

from checkmate.tagger.program import FAULTS, Tagger


class CountingTagger(Tagger):
    """A tagger of which the kernel's counters are given."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(FAULTS, 0)
        self._object = object()  # type: ignore[assignment]
        self._warned = 0

    def faults(self) -> dict[str, int]:
        return self.counts


def test_faults_are_logged_at_first_and_when_there_are_ten_times_as_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tagger = CountingTagger()
    for number in range(1000):
        tagger.counts["store"] = number
        tagger.warn_of_faults("rank 3")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 3  # 1, 10, 100
    assert lines[0] == (
        "rank 3: segments were sent otherwise than the tagger asked: 1 refused a tag. Shadow nodes miss what "
        "was not tagged"
    )
    tagger._object = None  # it is closed
    tagger.counts["store"] = 10**6
    tagger.warn_of_faults("rank 3")
    assert len(caplog.records) == 3
