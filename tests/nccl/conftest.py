"""Ranks that send through the plugin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkmate.nccl import building
from tests.support.nccl.sender import SendingRank, Settings

SANITIZERS = os.environ.get("SANITIZE", "")
"""Of the compiler, such as `address`; `make sanitize` sets it, and has their library loaded."""
if SANITIZERS:
    building._FLAGS += (f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover", "-g")  # type: ignore[assignment, misc]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SendingRank]]:
    """Make ranks from `Settings`, which are closed after the test."""
    senders: list[SendingRank] = []

    def begin(*settings: Any, receives: bool = True, **more: Any) -> SendingRank:
        (folder := tmp_path / str(len(senders))).mkdir()
        senders.append(SendingRank(folder, Settings(*settings, **more)))
        if receives:
            senders[-1].receive()
        return senders[-1]

    yield begin
    for sender in senders:
        sender.close()
