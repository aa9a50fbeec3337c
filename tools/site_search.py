"""A Sphinx extension: the site's search finds sections, not pages.

The index has each as a page of the name `page#anchor`. site_search.js makes links of these in the browser.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder


class Builder(StandaloneHTMLBuilder):
    """Sphinx's own, with each section in the index as a page of its own."""

    def load_indexer(self, docnames: Set[str]) -> None:
        """Begin an empty index, as all pages are built, and keep sections, which Sphinx would prune."""
        indexer: Any = self.indexer
        indexer.prune = lambda _: None

    def index_page(self, pagename: str, doctree: nodes.document, title: str) -> None:
        """Add a page's sections to the index, innermost first, and then what stands before them."""
        rest = doctree.deepcopy()  # the page is written from the other one
        for section in reversed(list(rest.findall(nodes.section))):
            if isinstance(section.parent, nodes.section):
                path = _path(section)
                section.parent.remove(section)
                part = new_document(pagename)
                part += section
                super().index_page(f"{pagename}#{section['ids'][0]}", part, path)
        super().index_page(pagename, rest, title)


def _path(section: nodes.section) -> str:
    """Return the title of the page, those of the sections around this one, and its own."""
    titles = []
    place: nodes.Node | None = section
    while isinstance(place, nodes.section):
        titles.append(place.next_node(nodes.title).astext())
        place = place.parent
    return " > ".join(reversed(titles))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the builder."""
    app.add_builder(Builder, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
