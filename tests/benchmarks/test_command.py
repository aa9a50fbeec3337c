"""`python -m benchmarks`: a signal ends it with one line, and loses nothing that was measured."""

from __future__ import annotations

import errno
import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.__main__ as command
from benchmarks import report
from benchmarks.figures import Figure, Result, row


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
    with pytest.raises(SystemExit) as error:
        sys.exit(command.main())
    return error.value.code


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


@pytest.mark.parametrize(
    ("median", "aim", "limit", "cells"),
    [
        (1.0132, 1.01, 1.03, ("1.013 ms", "1.01 (at most 1.03)", "missed, within the limit")),
        (1.0304, 1.01, 1.03, ("1.0304 ms", "1.01 (at most 1.03)", "beyond the limit")),
        (1.0004, 1.0, 1.0, ("1.0004 ms", "1 (at most 1)", "beyond the limit")),
        (1000.4, 1000.0, 1000.0, ("1,000.4 ms", "1,000 (at most 1,000)", "beyond the limit")),
        (1.0004, 1.01, 1.03, ("1 ms", "1.01 (at most 1.03)", "reached")),
        (1.01, 1.0099, 1.0099, ("1.01 ms", "1.0099 (at most 1.0099)", "beyond the limit")),
        (12012.0, 12011.6, 12011.6, ("12,012 ms", "12,011.6 (at most 12,011.6)", "beyond the limit")),
        (999.7, 1000.0, 1000.0, ("1,000 ms", "1,000 (at most 1,000)", "reached")),
        (0.0, None, None, ("0 ms", "", "")),
        (12345.6, None, None, ("12,346 ms", "", "")),
    ],
)
def test_a_bound_that_is_missed_by_little_differs_from_the_figure(
    median: float, aim: float | None, limit: float | None, cells: tuple[str, ...]
) -> None:
    assert row(Figure("time", (median,), "ms", aim, limit, smaller=True))[1:] == cells


def test_a_terminal_that_has_gone_away_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, text)

    page = tmp_path / "page.md"
    page.write_text("<!-- one -->\n<!-- /one -->\n")
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    assert run(monkeypatch, "one", "three", "--report", str(page)) == 143
    assert "| time |" in page.read_text()


def test_a_second_signal_waits_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems send one to the process and one to its group."""
    page = tmp_path / "page.md"
    page.write_text("<!-- one -->\n<!-- /one -->\n")
    write = report.report

    def disturbed(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(*arguments)

    monkeypatch.setattr(command, "report", disturbed)
    assert run(monkeypatch, "one", "three", "--report", str(page)) == 143
    assert "| time |" in page.read_text()
