"""A small disk, and shadow nodes with a training of each DP group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.checkpoints import mounted
from tests.support.shadow.consolidated import ConsolidatePlace


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder):
        yield folder


@pytest.fixture
def place() -> Iterator[Callable[..., ConsolidatePlace]]:
    with ExitStack() as stack:
        yield lambda **kwargs: ConsolidatePlace(stack, **kwargs)
