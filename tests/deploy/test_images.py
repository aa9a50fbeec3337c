"""The Dockerfile has for each role what docs/install.md lists, and exact versions. No image is built here."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from checkmate.extras import LIBRARIES
from tests.test_lock import PINNED
from tools.lock import CONSTRAINTS, ROOT, TORCH

FILE = ROOT / "deploy" / "Dockerfile"
STAGES = dict(re.findall(r"^FROM \S+ AS (\w+)\n((?:(?!^FROM).*\n)*)", FILE.read_text(), re.MULTILINE))


def test_each_role_gets_its_extra_and_metrics_if_it_serves_them() -> None:
    extras = {name: re.findall(r"whl\)\[([\w,]+)\]", text) for name, text in STAGES.items()}
    assert extras == {
        "wheel": [],
        "base": [],
        "controller": ["switch,metrics"],
        "shadow": ["shadow,metrics"],
        "trainer": ["trainer"],
    }
    assert {one for found in extras.values() for each in found for one in each.split(",")} <= LIBRARIES.keys()


def test_the_trainer_has_the_packages_of_the_guide() -> None:
    (documented,) = re.findall(r"Debian: `apt-get install (.*?)`", (ROOT / "docs" / "install.md").read_text())
    (installed,) = re.findall(r"--no-install-recommends (.*?) \\", STAGES["trainer"])
    assert installed.split() == documented.split()


def test_versions_are_those_that_are_tested(tmp_path: Path) -> None:
    """The line of the Dockerfile that collects them is run here."""
    (line,) = re.findall(r"&& (grep .*?) > ", STAGES["wheel"])
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [one.split(" ")[0].partition("==") for one in done.stdout.splitlines()]
    wanted = [(one["name"], "==", one["version"]) for one in PINNED.finditer(CONSTRAINTS.read_text())]
    assert found == [*wanted, TORCH.read_text().strip().partition("==")]
    for name in ("controller", "shadow", "trainer"):
        installs = STAGES[name].count("pip install")
        assert installs and STAGES[name].count("--constraint /dist/versions.txt") == installs


def test_the_build_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    admitted = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((ROOT / name).exists() for name in admitted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    data = {
        part.split("/")[0] for files in project["tool"]["setuptools"]["data-files"].values() for part in files
    }
    files = {project["project"]["readme"], *project["project"]["license-files"], CONSTRAINTS.name, TORCH.name}
    assert admitted == packages | data | files | {"pyproject.toml", "MANIFEST.in"}
