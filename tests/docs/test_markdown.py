"""All Markdown: links and anchors lead somewhere, code blocks are code, commands and options exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from checkmate.cli.main import app
from tools.prose import files

ROOT = Path(__file__).parents[2]
PAGES = [name for name in files() if name.endswith(".md")]
MAKE = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SHELL = ("sh", "shell")
"""Languages of the blocks that have commands. In the tutorials that a test runs, it leaves out `shell`."""
LANGUAGES = {*SHELL, "python", "yaml", "json", "toml", "text"}
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for target, anchor in _LINK.findall(_FENCE.sub("", here.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file = here.parent / target if target else here
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target + anchor


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_what_they_are_marked_as(page: str) -> None:
    for language, block in _FENCE.findall(text_of(page)):
        assert language in LANGUAGES, f"what a program prints is `text`: {block}"
        if language == "python":
            ast.parse(block)
        elif language == "yaml":
            assert yaml.safe_load(block) is not None
        elif language == "json":
            json.loads(block)
        elif language == "toml":
            tomllib.loads(block)
        elif language in SHELL:
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in blocks, and in code within a line, without comments."""
    lines = [
        line
        for language, block in _FENCE.findall(text)
        if language in SHELL
        for line in re.sub(r"\\\n", " ", block).splitlines()
    ]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))]:
        try:
            yield shlex.split(line, comments=True)
        except ValueError:  # what a command printed, such as an apostrophe
            continue


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for words in commands(text_of(page)):
        names = [Path(word).name for word in words]
        if "checkmate" in names:
            _check_checkmate(words[names.index("checkmate") + 1 :])
        if words[:1] == ["make"] and len(words) > 1 and "=" not in words[1]:
            assert words[1] in MAKE, words
        if "-m" in words[:-1] and names[words.index("-m") - 1].startswith("python"):
            module = words[words.index("-m") + 1]
            assert importlib.util.find_spec(module) is not None, module


def _check_checkmate(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and hasattr(command, "commands") and re.fullmatch("[a-z]+", rest[0]):
        subcommand = command.get_command(None, rest[0])
        assert subcommand is not None, f"unknown command {' '.join(words)}"
        command, rest = subcommand, rest[1:]
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if word in ("|", ">", ">>", "&", "&&", ";", "--"):
            break
        if word.startswith("--"):
            assert word.partition("=")[0] in options | {"--help", "--version"}, f"{word} in {' '.join(words)}"


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


def test_figures_that_are_plotted_stand_on_the_page() -> None:
    page = text_of("docs/figures.md")
    for measurement in json.loads(text_of("docs/figures.json")).values():
        for result in measurement["results"]:
            if result["kind"] == "Summary":
                assert re.search(rf"(?<![\d.]){result['median']}0*(?!\d)", page), result


def test_the_citation_has_what_the_format_requires() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("name", ["overview", "layers"])
def test_pictures_are_what_their_sources_draw(name: str, tmp_path: Path) -> None:
    source = ROOT / "docs" / "pictures" / f"{name}.py"
    subprocess.run([sys.executable, source, tmp_path], check=True)
    drawn_files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn_files == {file.name: file.read_text() for file in source.parent.glob(f"{name}*.svg")}


@pytest.mark.parametrize("name", ["overview", "overview-tall", "layers"])
def test_names_fit_into_their_boxes(name: str) -> None:
    """A letter of DejaVu Sans Bold of 14 pixels is 9.8 pixels wide, on average."""
    svg = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    boxes = re.findall(
        r'<rect [^>]*width="([\d.]+)"[^>]*class="box"/>\n<text [^>]*"title"[^>]*>([^<]*)<', svg
    )
    assert boxes
    for width, title in boxes:
        assert len(title) * 9.8 <= float(width), title
