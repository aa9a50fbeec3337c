"""The documentation site: its pages, what its search finds, and what a browser is told."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkmate import __version__
from tools import site

ROOT = Path(__file__).parents[2]
CSS = (ROOT / "tools" / "site.css").read_text()
PAGE = """
# Trips

Where to go.

## By sea

Ships.

### At night

Lanterns.

```
if 1 is from 2
```

## By air

Balloons.

```{py:function} fly(to)
```
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of one page, with the configuration of ours."""
    if any(importlib.util.find_spec(module) is None for module in ("furo", "myst_parser")):
        pytest.skip("needs the extra docs: `make docs` installs it")
    source = tmp_path_factory.mktemp("source")
    (source / "conf.py").write_text(site.CONFIGURATION)
    (source / "index.md").write_text(PAGE)
    site_folder = tmp_path_factory.mktemp("site")
    assert site.build(source, site_folder) == 0
    return site_folder


def index_entries(site_folder: Path, word: str) -> dict[str, str]:
    """The index's entries that have a word, and the title of each."""
    text = (site_folder / "searchindex.js").read_text()
    index: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    places = index["terms"].get(word, index["titleterms"].get(word, []))
    return {
        index["docnames"][place]: index["titles"][place]
        for place in (places if isinstance(places, list) else [places])
    }


def test_links_of_the_site_are_to_its_pages() -> None:
    text = "[a](docs/lab.md#b) [c](CHANGELOG.md) [d](p4src/compile.py) [e](https://f)"
    assert site.rewrite_links(text, "README.md") == "[a](lab.md#b) [c](changelog.md) d [e](https://f)"
    assert site.rewrite_links("[a](../../README.md) [b](../job.md)", "docs/tutorial/1.md") == (
        "[a](../index.md) [b](../job.md)"
    )


def test_the_site_has_every_page() -> None:
    names_in_tree = {name for names in site.TREE.values() for name in names}
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= names_in_tree


def test_each_page_has_a_title_of_its_own() -> None:
    """Else the list of pages, and the results of a search, have entries that look the same."""
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in site.FROM_ROOT)]
    titles = [file.read_text().lstrip().partition("\n")[0] for file in files]
    assert len(set(titles)) == len(titles), sorted(titles)


def test_the_search_finds_sections(small: Path) -> None:
    assert index_entries(small, "ship") == {"index#by-sea": "Trips > By sea"}
    assert index_entries(small, "lantern") == {"index#at-night": "Trips > By sea > At night"}
    assert index_entries(small, "go") == {"index": "Trips"}
    assert index_entries(small, "air") == {"index#by-air": "Trips > By air"}
    page = (small / "index.html").read_text()
    assert all(f'id="{anchor}"' in page for anchor in ("by-sea", "at-night", "by-air"))


def test_the_search_finds_functions(small: Path) -> None:
    assert '"fly"' in (small / "searchindex.js").read_text()


def test_the_search_makes_links_of_what_it_finds(small: Path) -> None:
    """Sphinx would make `index#by-sea.html`."""
    assert (ROOT / "tools" / "site_search.js").read_text() in (small / "_static/language_data.js").read_text()


def test_the_search_calls_what_sphinx_has(small: Path) -> None:
    """site_search.js replaces these in the scripts of Sphinx, and would do nothing without them."""
    scripts = "".join((small / "_static" / name).read_text() for name in ("doctools.js", "searchtools.js"))
    assert "item[4] = Scorer.score(item)" in scripts
    assert "Documentation.TRANSLATIONS[singular]" in scripts
    assert "`${titles[file]} > ${title}`" in scripts
    (sentence,) = re.findall(r'TRANSLATIONS\["(.*)"\]', (ROOT / "tools" / "site_search.js").read_text())
    assert f'"{sentence}"' in scripts
    page = (small / "search.html").read_text()
    assert page.index("searchtools.js") < page.index("language_data.js")


def test_output_has_no_colours(small: Path) -> None:
    """Words of Python in it are not Python."""
    (block,) = re.findall(r"<pre>(.*?)</pre>", (small / "index.html").read_text(), re.DOTALL)
    assert re.sub("<span></span>", "", block) == "if 1 is from 2\n"


def test_each_page_shows_the_version(small: Path) -> None:
    page = (small / "index.html").read_text()
    assert re.search(rf'class="sidebar-brand-text">Checkmate {re.escape(__version__)}<', page)
    assert re.search(rf'<div class="brand">Checkmate {re.escape(__version__)}<', page)


def test_viewing_needs_no_network(small: Path) -> None:
    for page in small.glob("*.html"):
        assert not re.search(r'<(?:script|link|img)\b[^>]*"(?:https?:)?//', page.read_text()), page.name
    assert 'href="_static/site.css' in (small / "index.html").read_text()
    assert "url(" not in CSS


def rules(css: str) -> dict[str, str]:
    """What is declared for each selector."""
    return {
        " ".join(names.split()): declared
        for names, declared in re.findall(
            r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
        )
    }


def block(condition: str) -> dict[str, str]:
    """The rules of the last `@media` block with a condition."""
    (*_, rule_text) = re.findall(
        rf"^@media {re.escape(condition)} \{{\n(.*?)^\}}", CSS, re.MULTILINE | re.DOTALL
    )
    return rules(rule_text)


def test_lines_of_120_columns_fit() -> None:
    """A column is 0.6 of the font's size, which is Furo's 81.25%, and blocks have 0.875rem on each side."""
    content = rules(CSS.partition("@media")[0])[".content"]
    lengths = dict(re.findall(r"(max-width|padding): (?:0 )?([\d.]+)em", content))
    width, padding = float(lengths["max-width"]), float(lengths["padding"])
    assert width - 2 * padding >= 120 * 0.6 * 0.8125 + 2 * 0.875
    assert 15 + width <= 1280 / 16, "beside Furo's sidebar, in a window of 1280 pixels"


def test_what_scrolls_is_seen_to_scroll() -> None:
    (names,) = [names for names, declared in rules(CSS).items() if "overflow-x: auto" in declared]
    assert (
        names == '.highlight pre, [role="main"] .table-wrapper.container, article[role="main"] p:has(> img)'
    )
    assert "var(--shadow)" in rules(CSS)[names]
    assert "background" in rules(CSS)['article[role="main"] ::-webkit-scrollbar-thumb']


def test_pictures_are_legible_on_phones() -> None:
    text = "![a](docs/pictures/overview.svg) ![b](docs/pictures/layers.svg)"
    assert site.rewrite_links(text, "README.md") == (
        "![a](pictures/overview.svg){.wide} ![a](pictures/overview-tall.svg){.tall} ![b](pictures/layers.svg)"
    )
    assert "none" in rules(CSS)["img.tall"]
    phones = block("(max-width: 46em)")
    assert "none" in phones['article[role="main"] img.wide']
    assert "inline" in phones['article[role="main"] img.tall']
    assert "min-width" in phones['article[role="main"] img']
    svg = (ROOT / "docs/pictures/overview-tall.svg").read_text()
    (width,) = re.findall(r'<svg [^>]*width="(\d+)"', svg)
    assert int(width) <= 390


def test_nothing_is_cut_on_paper() -> None:
    paper = block("print")
    assert "pre-wrap" in paper[".highlight pre"]
    assert "none" in paper[".skip-to-content"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds(small: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tools.site", tmp_path], cwd=ROOT, check=True)
    assert "clip_grad_norm_" in (tmp_path / "api.html").read_text()
    assert "training#what-is-restored" in index_entries(tmp_path, "buffer")
