"""Words that go with a number."""

from __future__ import annotations

import pytest

from checkmate.wording import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 streams"), (1, "1 stream"), (2, "2 streams"), (2048, "2,048 streams")]
)
def test_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "stream") == text


def test_a_plural_of_its_own() -> None:
    assert counted(1, "entity stays", "entities stay") == "1 entity stays"
    assert counted(3, "entity stays", "entities stay") == "3 entities stay"
