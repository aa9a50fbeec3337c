"""The resource report reads the Tofino compiler's logs, and reports missing ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p4src import PIPE, ROOT, report, tofino

SUMMARY = """\
  Number of stages for ingress table allocation: 5
  Number of stages for egress table allocation: 3
Critical path length through the table dependency graph: 4
  Number of stages for ingress table allocation: 3
Critical path length through the table dependency graph: 2
"""


def stage(srams: int, tcams: int) -> dict[str, Any]:
    return {"rams": {"srams": [{}] * srams}, "tcams": {"tcams": [{}] * tcams}}


def container(kind: str, *spans: tuple[int, int]) -> dict[str, Any]:
    return {
        "container_type": kind,
        "slices": [{"slice_info": {"lsb": lsb, "msb": msb}} for lsb, msb in spans],
    }


def write_logs(target: str) -> Path:
    folder = tofino.output_folder(target) / PIPE / "logs"
    folder.mkdir(parents=True)
    rows = [{"previous_state_name": name} for name in ("start", "start", "tcp")]
    parsers = [{"gress": "ingress", "states": rows}, {"gress": "egress", "states": rows[:1]}]
    resources = {"mau": {"mau_stages": [stage(40, 1), stage(8, 0)]}, "parser": {"parsers": parsers}}
    (folder / "resources.json").write_text(json.dumps({"resources": resources}))
    containers = [container("normal", (0, 8), (4, 11)), container("tagalong", (0, 31))]
    (folder / "phv.json").write_text(json.dumps({"containers": containers}))
    (folder / "table_summary.log").write_text(SUMMARY)
    return folder


def test_what_is_taken_of_a_chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path))
    write_logs("tofino")
    uses = {use.what: (use.taken, use.of) for use in report.read("tofino")}
    assert uses == {
        "ingress stages": (3, 12),  # of the last round of placement
        "egress stages": (3, 12),
        "longest dependency chain, stages": (2, None),
        "SRAM blocks": (48, 960),
        "TCAM blocks": (1, 288),
        "PHV bits": (12, 4096),
        "ingress parser states": (2, None),
        "ingress parser rows": (3, 256),
        "egress parser states": (1, None),
        "egress parser rows": (1, 256),
    }
    assert report.Use("SRAM blocks", 48, 960).text().split() == ["SRAM", "blocks", "48", "960", "5.0%"]


@pytest.mark.parametrize("missing", ["resources.json", "phv.json", "table_summary.log", "a line"])
def test_without_the_logs_it_says_what_makes_them(missing: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDE_INSTALL", str(tmp_path))
        folder = write_logs("tofino2")
    if missing == "a line":
        (folder / "table_summary.log").write_text("")
    else:
        (folder / missing).unlink()
    result = subprocess.run(
        [sys.executable, "-m", "p4src.report", "tofino2"],
        env={"SDE_INSTALL": str(tmp_path), "PATH": ""},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr
    assert "run `python -m p4src.compile tofino2`" in result.stderr
    assert "Traceback" not in result.stderr
