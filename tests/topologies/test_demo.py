"""`make demo`: it keeps all of its promises, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topologies import state
from topologies.kernel import namespaces

ROOT = Path(__file__).parents[2]
LABS = ("demo_uninterrupted", "demo_protected")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def demo(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "topologies.training.demo", "--json", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def nothing_stays() -> bool:
    return not any(namespaces.of_lab(name) or state.folder(name).exists() for name in LABS)


def test_training_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    kills = ("--kill", "1:8:reduce-scatter", "--kill-in-place", "0:17:all-gather")
    process = demo(tmp_path, "--iterations", "25", *kills)
    output, words = process.communicate()
    assert process.returncode == 0, words
    report = json.loads(output)
    assert report["good"] is True
    assert [promise["kept"] for promise in report["promises"]] == [True] * 5
    assert report["losses"]["protected"] == report["losses"]["uninterrupted"]
    assert len(report["losses"]["protected"]) == 25
    restart, in_place = report["recoveries"]
    assert (restart["rank"], restart["iteration"], restart["in_place"]) == (1, 8, False)
    assert (in_place["rank"], in_place["iteration"], in_place["in_place"]) == (0, 17, True)
    assert sum(in_place["parts"].values()) < sum(restart["parts"].values())
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    assert nothing_stays()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = demo(tmp_path)
    losses = tmp_path / "protected" / "rank0.jsonl"
    deadline = time.monotonic() + 300
    while not losses.exists() or not losses.read_text():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, words = process.communicate()
    assert process.returncode == 128 + number, words
    assert "Traceback" not in words
    assert nothing_stays()
