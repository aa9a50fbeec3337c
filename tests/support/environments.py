"""Environments with exactly the libraries of some extras, linked from this environment."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


class Project:
    """The distribution, as setup.cfg describes it: its name, packages and requirements."""

    def __init__(self) -> None:
        self._read = ConfigParser(interpolation=None)
        self._read.read_string((ROOT / "setup.cfg").read_text())
        self.name = self._read["metadata"]["name"]
        self.dependencies = self._lines("options", "install_requires")
        self.extras = {
            extra: self._lines("options.extras_require", extra) for extra in self._keys("extras_require")
        }

    def files(self) -> set[str]:
        """Return the packages, the folders of data and the other files of which the wheel is made."""
        packages = {name.rstrip("*") for name in self._lines("options.packages.find", "include")}
        data = {self._read["options.data_files"][place].split("/")[0] for place in self._keys("data_files")}
        texts = {
            self._read["metadata"]["long_description"].partition(": ")[2],
            self._read["metadata"]["license_files"],
        }
        return packages | data | texts

    def _keys(self, section: str) -> list[str]:
        return list(self._read[f"options.{section}"])

    def _lines(self, section: str, key: str) -> list[str]:
        return self._read[section][key].split("\n")[1:]


PROJECT = Project()


def required(extras: Iterable[str] = ()) -> set[str]:
    """Return the distributions that pip would install for the project with `extras`, by canonical name."""
    pending = [Requirement(f"{PROJECT.name}[{','.join(extras)}]")]
    visited: set[str] = set()
    while pending:
        requirement = pending.pop()
        if str(requirement) not in visited:
            visited.add(str(requirement))
            pending += _needs(requirement)
    return {str(canonicalize_name(Requirement(requirement).name)) for requirement in visited} - {PROJECT.name}


def _needs(requirement: Requirement) -> list[Requirement]:
    if requirement.name == PROJECT.name:
        lines = [
            *PROJECT.dependencies,
            *(line for extra in requirement.extras for line in PROJECT.extras[extra]),
        ]
    else:
        lines = metadata.requires(requirement.name) or []
    candidates = [Requirement(line) for line in lines]
    environments = [{"extra": extra} for extra in ("", *requirement.extras)]
    applicable = [
        candidate
        for candidate in candidates
        if not candidate.marker or any(map(candidate.marker.evaluate, environments))
    ]
    return [candidate for candidate in applicable if _is_here(candidate)]


def _is_here(requirement: Requirement) -> bool:
    """CUDA's packages are not, if torch is a build for CPUs."""
    try:
        metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return True


def make(place: Path, extras: Iterable[str] = ()) -> Path:
    """Make an environment at `place` and return its folder of packages. It has no pip and not the project."""
    venv.create(place, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place)}))
    tops: dict[str, list[set[str]]] = {}
    for name in required(extras):
        files = {str(file) for file in metadata.files(name) or [] if file.parts[0] != ".."}
        for top in {file.partition("/")[0] for file in files}:
            tops.setdefault(top, []).append({file for file in files if file.partition("/")[0] == top})
    here = Path(sysconfig.get_path("purelib"))
    for top, owners in tops.items():
        # A folder of several distributions, such as google/, is linked file by file.
        for name in {top} if len(owners) == 1 else set().union(*owners):
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).symlink_to(here / name)
    return packages


def run(
    place: Path, *arguments: str | Path, path: Path | None = ROOT, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python in `folder`, with modules of `path` too, and return what it printed."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    python_path = {} if path is None else {"PYTHONPATH": str(path)}
    command = [place / "bin" / "python", *arguments]
    return subprocess.run(
        command,
        env=inherited | python_path,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
