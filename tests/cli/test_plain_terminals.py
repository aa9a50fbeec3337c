"""Commands on narrow and ASCII-only terminals, and piped: no figure is cut, no character is garbled."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkmate.output import consoles
from checkmate.output.standard_streams import is_ascii_only, plain
from testbed.jobs import job_data, tofino_job_data
from testbed.ports import free_port
from tests.cli.test_live_views import switch
from tests.cli.test_switch import write_job
from tests.support.cli import COMMAND
from tests.support.terminal import AtTerminal
from tests.support.waiting import wait_until
from topologies.describe.topology import load
from topologies.picture import picture

pytestmark = pytest.mark.xdist_group("machine")
ALL = """
import json, pathlib, sys
from topologies import state
state.RUN = pathlib.Path("/nonexistent")  # `lab list` would show the labs that are up, of other tests
from checkmate.output.standard_streams import use_plain_streams
use_plain_streams()
from checkmate.cli.main import app
from checkmate.output.consoles import text_console
from topologies.describe.topology import load
from topologies.picture import host_table, show
for line in json.loads(sys.argv[1]):
    app(line, standalone_mode=False)
for name in ("single_tor", "two_tor", "paper_testbed"):
    show(load(name), text_console())
    text_console().print(host_table(load(name), name))
"""
"""A program that runs command lines in turn, and prints what `lab up` does."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sequence[str]]:
    """Return commands that print tables, in this order: their output is always the same."""
    folder = tmp_path_factory.mktemp("jobs")
    job, fabric = folder / "jöb.yaml", folder / "tofino.yaml"
    job.write_text(yaml.safe_dump(job_data(nodes=3, ranks=4, replicas=2, channels=2)))
    fabric.write_text(yaml.safe_dump(tofino_job_data()))
    return (
        ("lab", "list"),
        ("validate", str(job)),
        ("keys", "--out", str(folder / "keys"), str(job)),
        ("plan", str(job)),
        ("plan", str(job), "--capacity", "--model", "ResNet50", "--details", "--node-memory", "64GB"),
        ("plan", str(fabric), "--pfc"),
        ("cost", "--runs", "10", "--every", "500"),
    )


def environ(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # xdist sets it
    return {**inherited, "LANG": "C.UTF-8", "LC_ALL": "", "LC_CTYPE": "", **changes}


def piped(lines: Sequence[Sequence[str]], **changes: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps(lines)],
        capture_output=True,
        env=environ(**changes),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.decode("ascii" if changes else "utf-8")


@pytest.fixture(scope="module")
def whole(lines: Sequence[Sequence[str]]) -> str:
    """Return what the commands print into a pipe once keys are there."""
    piped([line for line in lines if line[0] == "keys"])
    return piped(lines)


@pytest.mark.slow
def test_a_pipe_gets_whole_lines(lines: Sequence[Sequence[str]], whole: str) -> None:
    assert max(map(len, whole.splitlines())) > 100
    assert "ranks sit on different ones; a shadow node on each" in whole
    assert "├" not in whole and "─" in whole and "…" not in whole


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        (80, {}),
        (60, {"LANG": "C"}),
        *(
            pytest.param(60, changes, marks=pytest.mark.slow)
            for changes in ({}, {"LC_ALL": "POSIX"}, {"PYTHONIOENCODING": "ascii"}, {"TERM": "dumb"})
        ),
    ],
)
def test_no_figure_is_cut_and_no_character_garbled(
    lines: Sequence[Sequence[str]], whole: str, columns: int, changes: Mapping[str, str]
) -> None:
    line = [sys.executable, "-c", ALL, json.dumps(lines)]
    with AtTerminal(line, columns=columns, rows=50, environ=changes) as terminal:
        assert terminal.process.wait(100) == 0, terminal.words
        terminal.end()
        raw, words = terminal.raw, terminal.words
    text = raw.decode("ascii" if changes else "utf-8")
    assert "Traceback" not in text and "…" not in text
    tight = "".join(words.split())
    broken = [
        word for word in whole.split() if word.isascii() and any(map(str.isdigit, word)) and word not in tight
    ]
    assert not broken
    if changes:
        assert "+" + "-" * 5 in text and "\\u2" not in text
        assert r"j\xf6b.yaml" in tight or "demo: valid" in words


def test_status_is_whole_on_any_terminal(tmp_path: Path) -> None:
    port = free_port()
    file = write_job(tmp_path, f"127.0.0.1:{port}")
    with switch(port):
        with AtTerminal([*COMMAND, "run", "--once", str(file)], environ={"TERM": "dumb"}) as terminal:
            assert terminal.process.wait(60) == 0
            terminal.end()
            assert b"\x1b" not in terminal.raw and b"\r\n\r\n" not in terminal.raw
            assert any(line.startswith("switch tor0: program loaded, ") for line in terminal.lines)
        line = [*COMMAND, "status", str(file)]
        words_by_width = {}
        for columns in (20, 60, 76, 100):
            with AtTerminal(line, columns=columns, environ={"LANG": "C"}) as terminal:
                assert terminal.process.wait(60) == 0
                terminal.end()
                words_by_width[columns] = terminal.words
        result = subprocess.run(line, capture_output=True, env=environ(COLUMNS="40"), text=True, check=False)
    for words in (*words_by_width.values(), result.stdout):
        assert words.isascii() or words is result.stdout
        for figure in ("lost", "bytes", "packets", "connected", "10.0.64.1", "10.0.64.2"):
            assert figure in "".join(words.split()), (figure, words)
    assert "side: first" in words_by_width[60] and "side: first" not in words_by_width[76]
    assert max(map(len, result.stdout.splitlines())) <= 40


def test_the_locale_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_ascii_only({"LANG": "C"}, terminal=False)
    assert is_ascii_only({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, terminal=False)  # which Python has set
    assert is_ascii_only({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, terminal=False)
    assert is_ascii_only({"LANG": "en_US.UTF-8", "TERM": "dumb"}, terminal=True)
    assert not is_ascii_only({"LANG": "en_US.UTF-8", "TERM": "dumb"}, terminal=False)
    assert not is_ascii_only({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, terminal=True)
    assert not is_ascii_only({"LANG": "C", "PYTHONIOENCODING": "utf-8"}, terminal=True)
    assert not is_ascii_only({}, terminal=True)


def test_drawings_have_similar_characters() -> None:
    assert plain(picture(load("single_tor"))).count("\\") == 0
    assert plain("a → b · … é\udce9") == r"a -> b * ... \xe9\udce9"


def test_a_name_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    line = [*(argument.encode() for argument in COMMAND), b"validate", bytes(tmp_path) + b"/\xe9.yaml"]
    result = subprocess.run(line, capture_output=True, env=environ(), check=False)
    assert result.returncode == 2
    assert b"Traceback" not in result.stderr
    assert rb"\udce9.yaml" in result.stderr


@pytest.mark.parametrize("late", [0.05, 60.0])
def test_a_long_wait_is_named_where_nothing_can_be_replaced(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consoles, "LATE_SECONDS", late)
    output = io.StringIO()
    with consoles.spinner_or_line(Console(file=output), "asking the nodes") as wait:
        wait.update("asking node 1")
        if late < 1:
            wait_until(lambda: bool(output.getvalue()), "a line")
    assert output.getvalue() == ("asking node 1 ...\n" if late < 1 else "")


def test_no_text_of_others_steers_a_terminal() -> None:
    output = io.StringIO()
    console = consoles.text_console(file=output, force_terminal=True, width=60)
    table = Table("file")
    table.add_row("a\x1b[2J\u202eb")
    console.print(table, Text("c\x1b]0;title\x07d"), "e\x9bf", markup=False)
    text = output.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert all(character.isprintable() or character in "\n\x1b" for character in text)
    assert r"a\x1b" in text
    assert r"c\x1b]0;title" in text


def test_a_file_whose_name_steers_a_terminal_is_shown_with_escapes(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\nforged: line.yaml").write_text("job: [")
    result = subprocess.run(
        [*COMMAND, "validate", str(tmp_path)], capture_output=True, text=True, env=environ(), check=False
    )
    assert result.returncode == 2
    assert "\x1b" not in result.stdout + result.stderr
    assert not any(line.startswith("forged") for line in result.stderr.splitlines())
