"""Set-up checks the interpreter first, and takes the one that the user names."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.labs.live import alive
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
OLD = """#!/bin/sh
exec {python} -c "import sys; sys.version_info = (3, 10, 12); exec(sys.argv.pop(1))" "$2"
"""
PIP = """#!/bin/sh
case "$*" in
*version_info*2*) echo 3.11 ;;
*download*) echo $$ >>{pids}; exec sleep 60 ;;
*--no-index*) exit 1 ;;
esac
"""
"""An environment's python, with a pip that has to ask the index and gets no answer."""
APT = '#!/bin/sh\necho "$@" >> {log}\nexit 9\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's set-up, on a host with an old python3, with apt-get, and without clang."""
    folder = tmp_path / "checkout"
    folder.joinpath("tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sh", "dirname", "cat", "id", "grep", "rm"):
        program = shutil.which(name)
        assert program
        (commands / name).symlink_to(program)
    executable(commands / "python3", OLD.format(python=sys.executable))
    executable(commands / "apt-get", APT.format(log=tmp_path / "apt.log"))
    return folder


def executable(file: Path, text: str) -> None:
    """Write a program, and its folder if that is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def setup(checkout: Path, python: str | None = None) -> tuple[int, str]:
    environment = {"PATH": str(checkout.parent / "bin"), **({"PYTHON": python} if python else {})}
    command = [checkout / "tools" / "setup.sh"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def test_an_old_python_is_named_before_any_package_is_installed(checkout: Path) -> None:
    status, message = setup(checkout)
    assert status == 2
    assert message == (
        "error: python3 is Python 3.10, but 3.11 or newer is needed; install one, then name it: "
        "PYTHON=python3.12 make setup\n"
    )
    assert not (checkout.parent / "apt.log").exists()


def test_a_named_python_is_taken(checkout: Path) -> None:
    """It passes the check: the next thing is Debian's packages."""
    status, message = setup(checkout, sys.executable)
    assert "is Python" not in message
    if os.geteuid() == 0:
        assert status == 9, "apt-get's"  # the `update` before any installation
        assert "update" in (checkout.parent / "apt.log").read_text()
    else:
        assert status == 2
        assert "missing Debian packages: clang" in message


def test_a_python_that_does_not_exist_is_named(checkout: Path) -> None:
    status, message = setup(checkout, "python9.9")
    assert status == 2
    assert message.startswith("error: python9.9 does not run here;")


def test_an_existing_environment_keeps_its_python(checkout: Path) -> None:
    """Or `make test` would fail after `PYTHON=... make setup`."""
    there = checkout / ".venv" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.symlink_to(sys.executable)
    assert "3.10" not in setup(checkout)[1]


def test_make_passes_the_named_python_on(checkout: Path) -> None:
    shutil.copy(ROOT / "Makefile", checkout)
    (checkout / "tools" / "setup.sh").write_text('#!/bin/sh\necho "$PYTHON"\n')
    for command in (["make", "setup", "PYTHON=mine"], ["env", "PYTHON=mine", "make", "setup"]):
        outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        result = subprocess.run(
            command, cwd=checkout, env=outside, capture_output=True, text=True, check=True
        )
        assert result.stdout == "mine\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_what_set_up_has_started(
    checkout: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    pids = tmp_path / "pids"
    for name in (
        "pyproject.toml",
        "setup.cfg",
        "constraints.txt",
        "constraints-pip.txt",
        "constraints-torch.txt",
    ):
        shutil.copy(ROOT / name, checkout)
    (checkout / "checkmate" / "cli").mkdir(parents=True)
    (checkout / "checkmate" / "cli" / "shell.txt").touch()
    executable(checkout / ".venv" / "bin" / "python", PIP.format(pids=pids))
    executable(tmp_path / "bin" / "apt-get", "#!/bin/sh\n")
    pip_digest = hashlib.sha256((checkout / "constraints-pip.txt").read_bytes()).hexdigest()
    (checkout / ".venv" / ".made").write_text(f"3.11 {pip_digest}  -\n")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHON", None)
    with subprocess.Popen(
        [checkout / "tools" / "setup.sh"], env=environment, start_new_session=True
    ) as process:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 3, "downloads")
        os.killpg(process.pid, number)
        assert process.wait(20) == status
    wait_until(lambda: not alive(map(int, pids.read_text().split())), "their end")
    assert sorted(entry.name for entry in (checkout / ".venv").iterdir()) == [".made", "bin"]
