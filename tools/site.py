"""Build the documentation site: `make docs`, or `python -m tools.site FOLDER`. Needs no network.

Sphinx reads a copy of `docs` in build/site-source, with the pages of the repository's root and an API
reference added, and with links to files that are not pages turned into plain text. Beside a picture stands
its tall one, if there is one: site.css shows it on phones.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

TOOLS: Final = Path(__file__).resolve().parent
ROOT: Final = TOOLS.parent
SOURCE: Final = ROOT / "build" / "site-source"
FROM_ROOT: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
"""Files in the repository's root, and the pages that show them."""
PACKAGES: Final = ("checkmate", "controlplane", "softswitch", "topologies")
TREE: Final = {
    "Tutorial": [f"tutorial/{page.stem}" for page in sorted((ROOT / "docs/tutorial").glob("*.md"))],
    "Guides": [
        *(
            "choosing",
            "install",
            "deploy",
            "operating",
            "training",
            "job",
            "cli",
            "checkpoint",
            "security",
            "lab",
        ),
        *("tofino", "nccl", "planning"),
    ],
    "Reference": ["api", "packages", "glossary", "design", "figures", "evaluation", "fairness"],
    "Project": ["changelog", "contributing", "security-policy"],
}
PUBLIC: Final = {
    "autofunction": (
        "restore",
        "protect",
        "clip_grad_norm_",
        "clip_grads_with_norm_",
        "job_mesh",
        "shard_mesh",
    ),
    "autoclass": ("Restored", "RestoreError", "Protection"),
}
VERSION: Final = metadata.version("checkmate-training")
CONFIGURATION: Final = f"""
project = "Checkmate"
release = "{VERSION}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "tools.site_search"]
highlight_language = "text"
html_theme = "furo"
html_title = "Checkmate {VERSION}"
html_static_path = ["{TOOLS / "site.css"}"]
html_css_files = ["site.css"]
html_search_scorer = "{TOOLS / "site_search.js"}"
html_show_copyright = False
html_copy_source = False
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
default_role = "code"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
suppress_warnings = ["autodoc", "docutils", "ref.ref", "toc.not_included"]
"""
_LINK: Final = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)")


def main() -> int:
    """Build the site in the folder given, and return Sphinx's exit status."""
    folder = Path(sys.argv[1]).absolute()
    prepare()
    status = build(SOURCE, folder)
    if status == 0:
        print(f"the documentation is in {folder / 'index.html'}")
    return status


def build(source: Path, folder: Path) -> int:
    """Run Sphinx on all pages, with warnings as errors, and return its exit status."""
    from sphinx.cmd.build import main as sphinx  # noqa: PLC0415 - only an extra

    status: int = sphinx(["-q", "-E", "-W", "--keep-going", "-j", "auto", str(source), str(folder)])
    return status


def prepare() -> None:
    """Write what Sphinx reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for file in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in FROM_ROOT)]:
        source = file.relative_to(ROOT).as_posix()
        text = rewrite_links(file.read_text(), source)
        (SOURCE / page_of(source)).write_text(text + _tree() if source == "README.md" else text)
    (SOURCE / "api.md").write_text(_api())
    (SOURCE / "packages.md").write_text(_packages())
    (SOURCE / "conf.py").write_text(CONFIGURATION)


def page_of(source: str) -> str:
    """Return the page that shows a file, both as paths: of the site, and of the repository."""
    return FROM_ROOT.get(source) or source.removeprefix("docs/")


def rewrite_links(text: str, source: str) -> str:
    """Return a file's text with the site's links, and without links to files that are not on the site."""
    folder, page_folder = posixpath.dirname(source), posixpath.dirname(page_of(source)) or "."

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path not in FROM_ROOT and not path.startswith("docs/"):
            return words.lstrip("!")[1:-1]
        link_text = f"{words}({posixpath.relpath(page_of(path), page_folder)}{anchor})"
        if path.endswith(".svg") and (ROOT / path.replace(".svg", "-tall.svg")).exists():
            return f"{link_text}{{.wide}} {link_text.replace('.svg)', '-tall.svg)')}{{.tall}}"
        return link_text

    return _LINK.sub(link, text)


def _tree() -> str:
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in TREE.items()
    )


def _auto(kind: str, name: str, *options: str) -> str:
    lines = [f".. {kind}:: {name}", *(f"   :{option}:" for option in options)]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def _api() -> str:
    lines = [
        "# Python API",
        "",
        "A training script needs only these names. [The guide](training.md) shows how to use them.",
        "",
    ]
    for kind, names in PUBLIC.items():
        options = ("members",) if kind == "autoclass" else ()
        lines += [f"## checkmate.{name}\n\n" + _auto(kind, f"checkmate.{name}", *options) for name in names]
    return "\n".join(lines)


def _packages() -> str:
    lines = [
        "# Packages",
        "",
        "Every module, from its docstrings. Users need only the [Python API](api.md).",
        "",
    ]
    for package in PACKAGES:
        lines += [f"## {package}", ""]
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not file.stem.startswith("__main__") and "_pb2" not in file.stem:
                lines += [f"### {module}", "", _auto("automodule", module, "members", "no-index")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
