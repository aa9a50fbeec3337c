"""`checkmate docs`: every page that a message names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkmate.cli import docs as command
from checkmate.cli.common import UsageFault
from tests.support.cli import invoke

ROOT = Path(__file__).parents[2]
PACKAGES = ("checkmate", "controlplane", "p4src", "softswitch", "topologies")


def test_a_page_is_printed_as_it_is() -> None:
    for name in ("job", "job.md", "docs/job.md"):
        assert invoke("docs", name) == (0, (ROOT / "docs" / "job.md").read_text())


def test_without_a_page_all_are_listed() -> None:
    code, output = invoke("docs")
    assert code == 0
    for file in (ROOT / "docs").rglob("*.md"):
        name = str(file.relative_to(ROOT / "docs").with_suffix(""))
        title = file.read_text().splitlines()[0].removeprefix("# ")
        assert re.search(rf"^{name} +{re.escape(title)} *$", output, re.MULTILINE)


def test_a_page_that_does_not_exist_is_refused_with_a_near_one() -> None:
    assert invoke("docs", "instal") == (2, "error: no page instal; did you mean install?\n")
    assert "the pages are checkpoint, choosing, cli," in " ".join(invoke("docs", "zzz")[1].split())


def test_subjects_without_a_page_lead_to_one() -> None:
    assert invoke("docs", "hsdp") == (2, "error: no page hsdp; did you mean training?\n")
    pages = command._pages()
    assert set(command._SUBJECTS.values()) <= pages.keys()
    assert pages.keys().isdisjoint(command._SUBJECTS)


def test_messages_name_pages_that_exist_and_no_files_of_a_checkout() -> None:
    """Docstrings and comments may; what users read must work from a wheel too."""
    texts = [file.read_text() for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    pages = {page for text in texts for page in re.findall(r"`checkmate docs ([a-z/0-9-]+)`", text)}
    assert {"security", "training"} <= pages
    assert all((ROOT / "docs" / f"{page}.md").is_file() for page in pages)
    for text in texts:
        code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
        assert not re.search(r"\bdocs/\w+\.md|`make |\btools/|README", code), code


@pytest.mark.parametrize("place", ["venv/share/doc/checkmate-training", "venv/lib/python3/packages/docs"])
def test_the_pages_are_found_where_pip_and_git_put_them(tmp_path: Path, place: str) -> None:
    packages = tmp_path / "venv" / "lib" / "python3" / "packages"
    packages.mkdir(parents=True)
    with pytest.raises(UsageFault, match="is not installed here"):
        command._folder(packages)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "job.md").touch()
    assert command._folder(packages) == tmp_path / place
