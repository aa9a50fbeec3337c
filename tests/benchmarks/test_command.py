"""`python -m benchmarks`: a signal ends it with one line, and loses nothing that was measured."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.__main__ as command
from benchmarks.figures import Figure, Result


def measured() -> list[Result]:
    return [Figure("time", (1.0, 2.0), "s")]


def interrupted() -> list[Result]:
    signal.raise_signal(signal.SIGINT)
    return []


def terminated() -> list[Result]:
    signal.raise_signal(signal.SIGTERM)
    return []


@pytest.fixture(autouse=True)
def suites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SUITES", {name: name for name in ("one", "two", "three")})
    for name, measure in (("one", measured), ("two", interrupted), ("three", terminated)):
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", SimpleNamespace(TITLE=name, measure=measure))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Return the exit status."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(command.main())
    return ended.value.code


@pytest.mark.parametrize(("last", "status"), [("two", 130), ("three", 143)])
def test_a_signal_is_one_line_and_keeps_what_was_measured(
    last: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- one -->\n<!-- /one -->\n")
    assert run(monkeypatch, "one", last, "--report", str(page)) == status
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; measured before: one"
    assert "| time |" in page.read_text()
    assert list(json.loads(page.with_suffix(".json").read_text())) == ["one"]


def test_ctrl_c_before_anything_is_measured_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run(monkeypatch, "two", "--report", str(page)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; measured before: nothing"
    assert not page.exists()
