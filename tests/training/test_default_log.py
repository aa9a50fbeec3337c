"""What `restore` and `protect` log is seen, unless the script has set up logging."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import logging
from checkmate.training.default_log import show_log
log = logging.getLogger("checkmate")
{before}
for _ in range(2):
    show_log()
{after}
log.info("resumed")
"""
SCRIPT_CONFIG = "logging.basicConfig(format='theirs: %(message)s', level=logging.INFO)"
SCRIPT_HANDLER = "log.addHandler(logging.StreamHandler()); log.setLevel(logging.INFO)"


def log_lines(before: str = "", after: str = "") -> list[str]:
    script = SCRIPT.format(before=before, after=after)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stderr.splitlines()


def test_it_shows_each_line_once_with_its_time() -> None:
    (line,) = log_lines()
    assert line.endswith(" checkmate: resumed")
    assert line[:4].isdigit() and line[10] == " "


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SCRIPT_CONFIG, "", ["theirs: resumed"]),
        ("", SCRIPT_CONFIG, ["theirs: resumed"]),
        (SCRIPT_HANDLER, "", ["resumed"]),
        ("log.setLevel(logging.WARNING)", "", []),
    ],
)
def test_what_a_script_sets_up_counts(before: str, after: str, expected: list[str]) -> None:
    assert log_lines(before, after) == expected


def test_its_lines_are_json_if_the_environment_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKMATE_LOG_FORMAT", "json")
    (line,) = log_lines()
    assert json.loads(line)["message"] == "resumed"
    assert log_lines(SCRIPT_CONFIG) == ["theirs: resumed"], "what a script sets up counts"


def test_a_folder_that_can_not_be_used_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKMATE_EVENTS", "/dev/null/events")
    before = "from checkmate.training.kept_events import keep_events; keep_events(2, 'gpt')"
    warning, resumed = log_lines(f"{SCRIPT_CONFIG}; {before}")
    assert warning.startswith("theirs: events can't be kept in /dev/null/events/gpt.rank-2.jsonl: ")
    assert warning.endswith("; training goes on without its event log")
    assert resumed == "theirs: resumed"
