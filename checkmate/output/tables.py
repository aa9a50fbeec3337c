"""Tables that no terminal is too narrow for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

Cell = str | Text
"""A cell. Text is printed as it is; markup is not read, because names may look like it."""

_FOLDED: Final = 24
"""Columns that are left to a folded cell at least."""
_ASCII_BOX: Final = box.Box("\n".join(("    ", "    ", " -- ", *5 * ("    ",))) + "\n", ascii=True)


class FittedTable:
    """A table with a line below its head. If the terminal is too narrow, each row is a list of its cells.

    No cell is ever cut.
    """

    def __init__(
        self, title: str, *columns: str, numbers: Collection[str] = (), folds: Collection[str] = ()
    ) -> None:
        """Create an empty table.

        Args:
            title: the line above it, if any.
            columns: the heads of its columns.
            numbers: heads of the columns that are justified right.
            folds: heads of the columns whose cells may take several lines.
        """
        self._title = title
        self._columns = columns
        self._numbers = numbers
        self._folds = folds
        self._rows: list[tuple[tuple[Text, ...], str]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row. `style`: of all of its cells."""
        row = tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        self._rows.append((row, style))

    def add_section(self) -> None:
        """Draw a line below the rows so far."""
        self._sections.add(len(self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self._title:
            yield Text(self._title, "table.title")
        widths = self._min_widths()
        gaps = len(widths) - 1
        room = options.max_width - sum(widths)
        if room >= gaps:
            table = self._table(2 if room >= 2 * gaps else 1, ascii_only=options.ascii_only)
            for segments in console.render_lines(table, options):
                line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
                line.rstrip()
                yield line
        else:
            yield from self._as_lists(options.max_width)
        yield ""

    def _min_widths(self) -> list[int]:
        """Return the width that each column needs."""
        widths = []
        for column, *cells in zip(self._columns, *(row for row, _ in self._rows), strict=True):
            texts = [column, *(cell.plain for cell in cells)]
            whole = max(_width(text.splitlines()) for text in texts)
            folded = max(_FOLDED, *(_width(text.split()) for text in texts))
            widths.append(min(whole, folded) if column in self._folds else whole)
        return widths

    def _table(self, gap: int, *, ascii_only: bool) -> Table:
        lines = _ASCII_BOX if ascii_only else box.SIMPLE_HEAD
        table = Table(box=lines, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
        for column in self._columns:
            justify: JustifyMethod = "right" if column in self._numbers else "left"
            folds = column in self._folds
            table.add_column(Text(column), justify=justify, no_wrap=not folds, overflow="fold")
        for number, (cells, style) in enumerate(self._rows, 1):
            table.add_row(*cells, style=style, end_section=number in self._sections)
        return table

    def _as_lists(self, width: int) -> Iterator[Text]:
        """Yield each row as `head: cell; head: cell`, in as many lines as it takes, without empty cells."""
        for cells, style in self._rows:
            line = Text(style=style)
            filled = [pair for pair in zip(self._columns, cells, strict=True) if pair[1]]
            for number, (column, cell) in enumerate(filled):
                text = Text.assemble(f"{column}: " if column else "", Text(" ").join(cell.split("\n")))
                text.append("; " if number < len(filled) - 1 else "")
                if number and line.cell_len + cell_len(text.plain.rstrip()) > width:
                    line.rstrip()
                    yield line
                    line = Text("  ", style=style)
                line.append_text(text)
            yield line


def _width(texts: Collection[str]) -> int:
    return max(map(cell_len, texts), default=0)
