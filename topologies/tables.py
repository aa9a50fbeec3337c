"""Tables of labs and of their reports."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
from rich.table import Table


def plain_table(title: str, *columns: str, numbers: Collection[str] = ()) -> Table:
    """Return a table with a line below its head only; columns of `numbers` are justified right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        made.add_column(column, no_wrap=True, justify="right" if column in numbers else "left")
    return made
