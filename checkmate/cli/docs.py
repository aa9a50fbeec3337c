"""`checkmate docs`: print a page of the documentation that comes with Checkmate."""

from __future__ import annotations

import difflib
import pydoc
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

import checkmate
from checkmate.cli.common import UsageFault, out, show_errors
from checkmate.output.tables import FittedTable

_INSTALLED: Final = Path("share/doc/checkmate-training")
_SUBJECTS: Final = {
    "capacity": "planning",
    "consolidate": "checkpoint",
    "ddp": "training",
    "fsdp": "training",
    "hosts": "job",
    "hsdp": "training",
    "keys": "security",
    "mesh": "job",
    "protect": "training",
    "restore": "training",
}
"""Subjects without a page of their own, and the page that has each."""


def page_names() -> list[str]:
    """Return the names of all pages, for completion by a shell."""
    with suppress(UsageFault):
        return [*_pages()]
    return []


@show_errors
def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            help="A page, such as job or tutorial/1-laptop.", show_default=False, autocompletion=page_names
        ),
    ] = None,
) -> None:
    """Print a page of the documentation, as Markdown; without a page, list the pages.

    Example: checkmate docs job
    """
    pages = _pages()
    if page is None:
        table = FittedTable("", "page", "title", folds=("title",))
        for name, file in pages.items():
            table.add_row(name, file.read_text().partition("\n")[0].removeprefix("# "))
        out.print(table)
        return
    name = page.removesuffix(".md").removeprefix("docs/")
    if name not in pages:
        near = difflib.get_close_matches(_SUBJECTS.get(name.lower(), name), pages, 1)
        suggestion = f"did you mean {near[0]}?" if near else f"the pages are {', '.join(pages)}"
        raise UsageFault(f"no page {page}; {suggestion}")
    pydoc.pager(pages[name].read_text())


def _pages() -> dict[str, Path]:
    folder = _folder(Path(checkmate.__file__).resolve().parent.parent)
    return {str(f.relative_to(folder).with_suffix("")): f for f in sorted(folder.rglob("*.md"))}


def _folder(packages: Path) -> Path:
    """Return the folder of the pages: beside the packages in a checkout, else where pip puts documentation.

    Raises:
        UsageFault: The pages were not installed.
    """
    places = [packages / "docs", *(base / _INSTALLED for base in (packages, *packages.parents))]
    folder = next((place for place in places if (place / "job.md").is_file()), None)
    if folder is None:
        raise UsageFault(f"the documentation is not installed here; it would be in {_INSTALLED}")
    return folder
