"""Ranks that send through the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl_sender import SendingRank

SLICING = NcclSlicing()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SendingRank]]:
    """Make ranks, which are closed after the test."""
    made: list[SendingRank] = []

    def begin(
        release: str, rank: int, ranks: int, channels: int, slicing: NcclSlicing = SLICING
    ) -> SendingRank:
        (folder := tmp_path / str(len(made))).mkdir()
        made.append(SendingRank(folder, release, rank, ranks, channels, slicing))
        return made[-1]

    yield begin
    for one in made:
        one.close()
