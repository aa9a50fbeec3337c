"""The log as JSON: each line on standard error is one document."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import yaml
from typer.testing import CliRunner

from checkmate.cli.main import app
from checkmate.events.kinds import SWITCH_LOST
from checkmate.events.process_log import JsonLines, has_json_line
from testbed.jobs import job_data

_PROGRAM = """
import logging, threading, warnings
from checkmate.events.kinds import SWITCH_LOST, NODE_ENDED
from checkmate.events.process_log import log_everything_as_json, say
log_everything_as_json()
logging.getLogger("checkmate").debug("for developers")
logging.getLogger("finsy").info("of a library")
say(logging.WARNING, SWITCH_LOST(switch="s1", why="refused\\nit"), "switch %s: %s", "s1", "refused\\nit")
say(logging.DEBUG, NODE_ENDED(), "no line for people")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("at the end")
"""


def test_each_line_on_standard_error_is_json() -> None:
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [(line["level"], line.get("event")) for line in lines] == [
        ("info", None),
        ("warning", "switch.lost"),
        ("debug", "node.ended"),
        ("warning", None),
        ("critical", None),
        ("critical", None),
    ]
    assert lines[1]["message"] == "switch s1: refused\nit"
    assert lines[1]["fields"] == {"switch": "s1", "why": "refused\nit"}
    assert "ZeroDivisionError" in lines[4]["traceback"]
    assert lines[5]["message"] == "at the end"
    assert all(line["time"].endswith("Z") and line["time"][10] == "T" for line in lines)


def test_a_record_without_an_event_has_no_fields() -> None:
    record = logging.LogRecord("checkmate", logging.INFO, "", 0, "x", (), None)
    document = json.loads(JsonLines().format(record))
    assert document.keys() == {"time", "level", "message", "fields"}
    record.levelno = logging.DEBUG
    assert not has_json_line(record)
    record.event = SWITCH_LOST(switch="s1", why="")
    assert has_json_line(record)


def test_errors_are_json_too_and_a_view_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=1)))
    options = ["--log-format", "json"]
    for arguments, words in (
        (["shadow", str(file), "--id", "0", "--view", *options], "--view is for people"),
        (["shadow", str(file), "--id", "7", *options], "has no shadow node 7"),
        (["run", str(file), "--view", *options], "--view is for people"),
        (["run", str(tmp_path / "nowhere.yaml"), *options], "nowhere.yaml"),
    ):
        result = CliRunner().invoke(app, arguments)
        line = json.loads(result.stderr)
        assert (result.exit_code, line["level"], result.stdout) == (2, "error", "")
        assert words in line["message"]
