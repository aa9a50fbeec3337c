"""What pip installs is whole: wheel and source distribution, outside of a checkout, by role and in a lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from checkmate.base.extras import LIBRARIES
from testbed.jobs import job_data
from tests.support import environments
from tests.support.environments import ROOT
from tests.support.labs.live import needs_clang, needs_root
from topologies import state
from topologies.describe.job_files import JOB_FILE
from topologies.describe.topology import CONTROLLER, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
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
ENTRY = ("-m", "checkmate.cli.entry")
TRIALS = {
    "trainer": ("-c", "import checkmate; checkmate.protect, checkmate.restore"),
    "shadow": (*ENTRY, "shadow", "job.yaml", "--id", "0"),
    "switch": ("-m", "softswitch", "--help"),
    "plan": (*ENTRY, "cost", "--runs", "10", "--plot", "x.png"),
}
"""A use of each extra. The shadow node's address is not of this machine, so it ends with 1."""


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of its own, because setuptools writes into what it builds."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def build_package(kind: str, source: Path, to: Path) -> Path:
    """Build a "wheel" or "sdist" with this environment's setuptools; it needs no network."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, to], cwd=source, env=_clean(), check=True, capture_output=True
    )
    (archive,) = to.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_package("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    code_files = {name for name in tracked(*PACKAGES) if name.endswith(CODE)}
    examples = {name for name in code_files if name.startswith("softswitch/examples/")}
    names = zipfile.ZipFile(wheel).namelist()
    assert code_files - examples <= set(names)
    assert {name.partition("/")[0] for name in names if "-0." not in name} == set(PACKAGES)


def test_a_wheel_has_the_documentation(wheel: Path) -> None:
    pages = {
        name.partition("/share/doc/checkmate-training/")[2] for name in zipfile.ZipFile(wheel).namelist()
    }
    assert pages - {""} == {name.removeprefix("docs/") for name in tracked("docs") if name.endswith(".md")}


def test_a_source_distribution_is_whole_and_makes_the_same_wheel(
    wheel: Path, checkout: Path, tmp_path: Path
) -> None:
    for name in ("source", "unpacked", "again"):
        (tmp_path / name).mkdir()
    with tarfile.open(build_package("sdist", checkout, tmp_path / "source")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    generated = {"PKG-INFO"}
    assert {name for name in there - generated if ".egg-info/" not in name} == set(tracked())
    again = build_package("wheel", folder, tmp_path / "again")
    assert again.name == wheel.name
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert first.namelist() == second.namelist()
    assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []


def installed(place: Path, wheel: Path, extra: str) -> Path:
    """Make an environment with the wheel and the libraries of an extra; return its folder of commands."""
    environments.make(place, [extra] if extra else [])
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    command = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, cwd=place, env=_clean())
    return place / "bin"


@pytest.mark.parametrize("extra", ["", *LIBRARIES])
def test_a_wheel_with_an_extra_does_what_its_role_does(wheel: Path, tmp_path: Path, extra: str) -> None:
    """pip finds nothing missing, messages lead to documentation, and the hint for an extra is right."""
    commands = installed(tmp_path / "environment", wheel, extra)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_data()))

    def run(*command: str | Path) -> tuple[int, str]:
        result = subprocess.run(
            command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=False
        )
        return result.returncode, result.stdout + result.stderr

    python = commands / "python"
    requirement = f"checkmate-training[{extra}]" if extra else "checkmate-training"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", requirement)
    status, output = run(*pip)
    assert status == 0, output
    assert "Successfully installed" not in output
    assert run(commands / "checkmate", "keys", "job.yaml")[0] == 0
    assert run(commands / "checkmate", "plan", "job.yaml")[0] == 0
    assert run(commands / "checkmate", "docs", "job")[1].startswith("# The job file\n")
    for name, words in TRIALS.items():
        status, output = run(python, *words)
        hint = "pip install 'checkmate-training["
        if not LIBRARIES[name] <= LIBRARIES.get(extra, frozenset()):
            assert f"{hint}{name}]'" in output
        else:
            assert hint not in output
            assert status == (1 if name == "shadow" else 0), output


@needs_root
@needs_clang
def test_an_installed_wheel_makes_a_lab_and_trains_in_it(wheel: Path, tmp_path: Path) -> None:
    commands = installed(tmp_path / "environment", wheel, "demo")

    def run(*arguments: str) -> str:
        command = [str(commands / "checkmate"), *arguments]
        result = subprocess.run(
            command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    name = f"w{os.getpid()}"
    run("lab", "up", "single_tor", "--name", name)
    try:
        inside = ("lab", "exec", name, CONTROLLER, "--", "checkmate")
        assert "written" in run(*inside, "run", "--once", str(state.folder(name) / JOB_FILE))
        small = ("--iterations", "3", "--layers", "1", "--width", "64", "--heads", "2")
        script = (load("single_tor").script[-1], *small)
        assert "iteration 2: loss" in run("lab", "train", name, "--", "-m", *script)
    finally:
        run("lab", "down", name)


def _clean() -> dict[str, str]:
    """Without a way to a checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
