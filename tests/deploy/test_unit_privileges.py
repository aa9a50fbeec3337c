"""With exactly the privileges of its unit each process does its work, and it names each one that it lacks.

User, capabilities, system calls, address families and the file system are those of the unit files, without
systemd (`tests/support/units.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import yaml

from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.keys.access import INSECURE
from checkmate.keys.making import make_keys
from testbed.copies import Copies, local_job
from testbed.ports import free_port
from testbed.small_training import SmallTraining, status
from tests.scripts.filtered import HEADER
from tests.support.keys import NOW
from tests.support.switch_process import job_on, softswitch
from tests.support.units import NOBODY, ROOT, Unit, environment, privileges, python
from tests.support.waiting import wait_until

SHADOW, CONTROLLER = Unit("checkmate-shadow@.service"), Unit("checkmate-controller.service")
GUIDE = ROOT / "docs" / "install.md"
TAGGER = [
    word.lower()
    for word in re.findall(r"`CAP_(\w+)`", GUIDE.read_text().split("| privileges |")[1].split("\n")[0])
]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user in a mount namespace")
needs_filters = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not HEADER.exists(),
    reason="systemd-analyze (systemd) or the kernel's headers (linux-libc-dev) are missing",
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of the units' user; processes have keys."""
    monkeypatch.delenv(INSECURE)
    with tempfile.TemporaryDirectory(dir="/run") as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


def keys_for_the_user(job: Job, folder: Path) -> None:
    make_keys([(job, folder / "keys")], NOW)
    for path in (folder / "keys").rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    os.chown(folder / "keys", NOBODY, NOBODY)


def start_command(unit: Unit, folder: Path, arguments: list[str], without: str = "") -> subprocess.Popen[str]:
    """Start a unit's command with its privileges, perhaps without a capability."""
    capabilities = [capability for capability in unit.capabilities if capability != without]
    return subprocess.Popen(
        [*unit.start(capabilities), python(), "-m", "checkmate.cli.entry", *arguments],
        env=environment(folder),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=0o077,
    )


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def check_has(process: subprocess.Popen[str], *capabilities: int) -> None:
    """Check user, capabilities and filter of a process as the kernel sees them."""
    process_status = dict(
        re.findall(r"^(\w+):\s+(.*)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    )
    mask = f"{sum(1 << capability for capability in capabilities):016x}"
    assert (process_status["CapEff"], process_status["CapPrm"], process_status["CapBnd"]) == (
        mask,
        mask,
        mask,
    )
    assert set(process_status["Uid"].split()) == {str(NOBODY)}
    assert (process_status["NoNewPrivs"], process_status["Seccomp"]) == ("1", "2")


@pytest.fixture
def job(folder: Path) -> Job:
    demo_job = local_job(nodes=1)
    keys_for_the_user(demo_job, folder)
    data = data_of(demo_job, exclude_none=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(data))
    return replace(demo_job, keys=folder / "keys")


@needs_root
@needs_filters
def test_a_shadow_node_does_its_work_as_its_unit(folder: Path, job: Job) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    words = SHADOW.arguments(file=str(folder / "job.yaml"), metrics=metrics, i="0")
    with ExitStack() as stack:
        process = stack.enter_context(start_command(SHADOW, folder, words))
        stack.callback(process.terminate)
        assert line(process.stdout).startswith("ready: shadow node 0"), process.communicate()[1]
        check_has(process, 12)  # CAP_NET_ADMIN
        stack.callback((copies := Copies(job)).close)
        stack.callback((training := SmallTraining(job, copies)).close)
        training.begin([0])
        training.seed_all()
        wait_until(lambda: status(job, 0).holds[0].live, "live")
        training.iterate()
        wait_until(lambda: status(job, 0).holds[0].stepped == 0, "stepped")
        with urllib.request.urlopen(f"http://{metrics}/readyz", timeout=10) as answer:
            assert answer.status == 200
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "denied" not in errors.lower() and "not permitted" not in errors.lower()


@needs_root
@needs_filters
@pytest.mark.parametrize("missing", SHADOW.capabilities)
def test_a_shadow_node_names_the_capability_that_it_lacks(folder: Path, job: Job, missing: str) -> None:
    words = SHADOW.arguments(file=str(folder / "job.yaml"), metrics=f"127.0.0.1:{free_port()}", i="0")
    process = start_command(SHADOW, folder, words, missing)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == (
        f"error: no right to a receive buffer of 64 MB: run as root, or with CAP_{missing.upper()}\n"
    )


@needs_root
@needs_filters
def test_a_controller_does_its_work_as_its_unit(folder: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    with softswitch("--no-p4") as switch, ExitStack() as stack:
        file = job_on(switch, folder)
        keys_for_the_user(of_data(Job, yaml.safe_load(file.read_text())), folder)
        process = start_command(CONTROLLER, folder, CONTROLLER.arguments(file=str(file), metrics=metrics))
        stack.enter_context(process)
        stack.callback(process.terminate)
        lines = [line(process.stdout)]
        assert lines[0].startswith("standing by"), process.communicate()[1]
        while not lines[-1].startswith("serving"):
            lines.append(line(process.stdout))
            assert lines[-1], process.communicate()[1]
        check_has(process)
        with urllib.request.urlopen(f"http://{metrics}/readyz", timeout=10) as answer:
            assert answer.status == 200
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors


@needs_root
@pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang")
def test_the_tagger_needs_each_of_the_documented_capabilities_and_no_other(folder: Path) -> None:
    assert len(TAGGER) == 3

    def run_tagger(capabilities: list[str]) -> subprocess.CompletedProcess[str]:
        command = [*privileges(capabilities), python(), "-m", "checkmate.tagger"]
        return subprocess.run(
            command, env=environment(folder), cwd="/", capture_output=True, text=True, timeout=60, check=False
        )

    result = run_tagger(TAGGER)
    assert result.returncode == 0, result.stderr
    assert "attached as program" in result.stdout
    for missing in TAGGER:
        result = run_tagger([capability for capability in TAGGER if capability != missing])
        assert result.returncode == 1
        assert f": CAP_{missing.upper()} missing;" in result.stderr
