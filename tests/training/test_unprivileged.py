"""torchrun as an ordinary user, with exactly the capabilities that docs/security.md names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.keys.access import INSECURE
from tests.support.shadow.recording_node import RecordingNode
from tests.support.units import NOBODY, ROOT, USER, environment, python
from tests.training.test_protect import job_file

GUIDE = ROOT / "docs" / "security.md"
RANKS = 3
"""The middle one does not tag."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, and sets file capabilities"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder of the user's, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


@pytest.fixture
def nodes() -> Iterator[list[RecordingNode]]:
    served = [RecordingNode(shards=[0]), RecordingNode(shards=[1])]
    yield served
    for node in served:
        node.stop()


def documented() -> list[str]:
    """Return the lines of docs/security.md that make and use the starter."""
    return re.findall(r"^(?:sudo|/usr/local/bin/tagging) .*$", GUIDE.read_text(), re.M)


def torchrun(folder: Path, nodes: list[RecordingNode], starter: list[str]) -> str:
    """Train on this machine as the user; return what torchrun printed."""
    data = job_file(folder, nodes, RANKS)
    command = [python(), "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    command += ["-m", "tests.scripts.unprivileged", str(folder)]
    result = subprocess.run(
        [*USER, *starter, *command],
        env={**environment(folder), INSECURE: "1", "CHECKMATE_JOB": str(data)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_an_ordinary_user_trains_with_the_documented_starter(
    folder: Path, nodes: list[RecordingNode]
) -> None:
    _, install, capabilities, use = documented()
    starter = folder / "tagging"
    command = install.replace("/usr/local/bin/tagging", str(starter)).replace("-g trainers", f"-g {NOBODY}")
    subprocess.run(command.split()[1:], check=True)
    subprocess.run([*capabilities.split()[1:-1], str(starter)], check=True)
    options = use.split()[1 : use.split().index("torchrun")]
    output = torchrun(folder, nodes, [str(starter), *options])
    for rank in range(RANKS):
        report = json.loads((folder / f"rank{rank}.json").read_text())
        again = report.pop("again")
        assert rank == 1 or "this process gave them up after it had protected a model" in again, output
        assert report == {
            "user": NOBODY,
            "before": ["BPF", "NET_ADMIN", "PERFMON"],
            "after": [],
            "child": 0,
        }


@pytest.mark.slow
def test_without_it_the_message_names_what_is_missing(folder: Path, nodes: list[RecordingNode]) -> None:
    output = torchrun(folder, nodes, [])
    assert (
        "checkmate.tagger.errors.TaggerUnavailable: the tagger can't run here: rank 0 (192.168.0.0)" in output
    )
    assert "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN missing; start the script, or torchrun, by setpriv" in output
    assert not list(folder.glob("*.json"))
