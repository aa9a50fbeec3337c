"""Folders of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keys import keys_of, served_job


@pytest.fixture
def shadow(tmp_path: Path) -> Path:
    """Return the folder of the shadow role, beside those of other roles and of another job."""
    keys_of(served_job("gpt"), tmp_path / "keys")
    keys_of(served_job("llama"), tmp_path / "keys")
    return tmp_path / "keys/gpt/shadow"
