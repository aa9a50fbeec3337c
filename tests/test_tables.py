"""Tables fit any terminal, and nothing of them is cut."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from checkmate.output.consoles import text_console
from checkmate.output.tables import FittedTable

CELLS = st.text(st.sampled_from("ab1 [/]:é"), max_size=30).map(str.strip)


def printed(table: FittedTable, width: int) -> list[str]:
    """Return the lines of a table on a terminal."""
    console = Console(width=width, file=io.StringIO(), emoji=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=4), st.integers(12, 120))
def test_no_cell_is_cut_and_no_line_too_long(rows: Sequence[Sequence[str]], width: int) -> None:
    table = FittedTable("", "one", "two", "three", numbers=("two",), folds=("three",))
    for row in rows:
        table.add_row(*row)
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    characters = sorted("".join("".join(lines).split()).replace("─", ""))
    for row in rows:
        for cell in row:
            for character in "".join(cell.split()):
                characters.remove(character)


def test_cells_are_not_markup() -> None:
    table = FittedTable("[red]title", "[bold]head")
    table.add_row("[/]:smile:")
    assert printed(table, 40)[:4] == ["[red]title", "[bold]head", "──────────", "[/]:smile:"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (12, ["what  amount", "────────────", "a         10", "b          2"]),
        (11, ["what amount", "───────────", "a        10", "b         2"]),
        (10, ["what: a;", "  amount:", "10", "what: b;", "  amount:", "2"]),
    ],
)
def test_a_narrow_terminal_gets_a_list(width: int, lines: list[str]) -> None:
    table = FittedTable("", "what", "amount", numbers=("amount",))
    table.add_row("a", "10")
    table.add_row("b", Text("2", "red"))
    assert [line.rstrip() for line in printed(table, width)][: len(lines)] == lines


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert text_console(file=io.StringIO()).width > 1000
    monkeypatch.setenv("COLUMNS", "60")
    assert text_console(file=io.StringIO()).width == 60
