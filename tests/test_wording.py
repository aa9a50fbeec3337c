"""Numbers and suggestions in messages."""

from __future__ import annotations

import pytest

from checkmate.base.wording import counted, did_you_mean, in_ranges, printable, size


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 streams"), (1, "1 stream"), (2, "2 streams"), (2048, "2,048 streams")]
)
def test_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "stream") == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 1, 3, 4, 5, 9], "0, 1, 3-5, 9"),
        ([3, 2, 1], "3, 2, 1"),
        (["trainer0", "trainer1", "trainer2", "gpu7"], "trainer0-2, gpu7"),
        (["a08", "a09", "a10"], "a08, a09, a10"),  # not a08-10, which would read as a8
        (["tor 1", "tor 2", "tor 3", "leaf"], "tor 1-3, leaf"),
    ],
)
def test_names_in_a_row_are_a_range(names: list[object], text: str) -> None:
    assert in_ranges(names) == text


def test_what_others_have_written_forges_no_line_and_steers_no_terminal() -> None:
    assert printable("a\n2026-01-01 INFO b\x1b[2J\u202e\u2028\udce9é") == (
        r"a\n2026-01-01 INFO b\x1b[2J\u202e\u2028\udce9é"
    )


def test_a_plural_of_its_own() -> None:
    assert counted(1, "entity stays", "entities stay") == "1 entity stays"
    assert counted(3, "entity stays", "entities stay") == "3 entities stay"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (26_214_400, "26.2 MB"),
        (999_600_000, "1 GB"),
        (2e15, "2,000 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_a_mistyped_word_gets_the_nearest_known_one() -> None:
    assert did_you_mean("rnak2", ["ctl", "rank1", "rank2"]) == "; did you mean rank2?"
    assert did_you_mean("quite", ["ctl", "rank1"]) == ""
