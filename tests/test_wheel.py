"""What pip installs is whole: a wheel in an environment of its own, outside of a checkout, runs a lab."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.labs.live import needs_clang, needs_root
from topologies import picture, state
from topologies.describe.job_files import JOB_FILE
from topologies.describe.topology import CONTROLLER

ROOT = Path(__file__).parents[1]
PACKAGES = ("checkmate", "controlplane", "p4src", "softswitch", "topologies")
CODE = (
    ".py",
    ".pyi",
    ".p4",
    ".c",
    ".h",
    ".proto",
    ".yaml",
    ".thrift",
    ".json",
    ".txtpb",
    ".sha256",
    ".typed",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, cwd=folder, env=_clean())
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {name for name in listed.stdout.split() if name.endswith(CODE)}
    examples = {name for name in wanted if name.startswith("softswitch/examples/")}
    assert wanted - examples <= set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The commands of an environment with the wheel; its dependencies are this environment's."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    here = sysconfig.get_paths()["purelib"]
    there = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place)}))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(there),
        str(wheel),
    ]
    subprocess.run(command, check=True, cwd=tmp_path, env=_clean())
    there.joinpath("dependencies.pth").write_text(
        here
    )  # its own .pth files, a checkout's for one, don't count
    return place / "bin"


@needs_root
@needs_clang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_wheel_makes_a_lab_and_trains_in_it(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [str(installed / "python"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    name = f"w{os.getpid()}"
    assert run("-c", "import checkmate; print(checkmate.__file__)").startswith(str(tmp_path))
    run("-m", "checkmate.cli.entry", "lab", "up", "single_tor", "--name", name)
    try:
        entry = ("-m", "checkmate.cli.entry")
        inside = (*entry, "lab", "exec", name, CONTROLLER, "--", "python")
        assert "written" in run(*inside, *entry, "run", "--once", str(state.folder(name) / JOB_FILE))
        script = (picture.SCRIPT[-1], "--iterations", "3", "--layers", "1", "--width", "64", "--heads", "2")
        assert "iteration 2: loss" in run(*entry, "lab", "train", name, "--", "-m", *script)
    finally:
        run("-m", "checkmate.cli.entry", "lab", "down", name)


def _clean() -> dict[str, str]:
    """Without a way to a checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
