"""Set-up installs only files whose hashes are known: a file with another hash is refused."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from checkmate.cli import shell
from checkmate.cli.common import UsageFault
from tests.support.environments import PROJECT
from tools.lock import CONSTRAINTS, PIP, ROOT, SHELL, TORCH, with_hashes

PINNED = re.compile(
    r"^(?P<name>\S+)==(?P<version>\S+)(?: ; .*?)? \\\n(?:    --hash=sha256:\w{64}(?: \\)?\n)+", re.M
)
PIP_REFUSES = "DO NOT MATCH THE HASHES"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is the only one which pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel_file = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel_file, "w") as content:
        content.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        content.writestr("tiny-1.0.dist-info/WHEEL", tag)
        content.writestr("tiny-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel_file


def requirement_line(wheel: Path, *, rightly: bool) -> str:
    content = wheel.read_bytes() if rightly else b"another file"
    return f"tiny==1.0 --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"


def found_in(environment: Path, name: str) -> bool:
    (packages,) = environment.glob("lib/python*/site-packages")
    return any(
        distribution.metadata["Name"] == name for distribution in Distribution.discover(path=[str(packages)])
    )


@pytest.mark.parametrize("rightly", [pytest.param(True, marks=pytest.mark.slow), False])
def test_setup_refuses_a_file_with_another_hash(wheel: Path, tmp_path: Path, rightly: bool) -> None:
    copy = tmp_path / "checkout"
    for file in (ROOT / "tools" / "setup.sh", ROOT / "pyproject.toml", ROOT / "setup.cfg", TORCH, SHELL):
        there = copy / file.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    (copy / PIP.name).write_text("")
    (copy / "constraints.txt").write_text(requirement_line(wheel, rightly=rightly))
    result = subprocess.run([copy / "tools" / "setup.sh"], capture_output=True, text=True, check=False)
    assert result.returncode
    assert (PIP_REFUSES in result.stderr) is not rightly
    assert found_in(copy / ".venv", "tiny") is rightly
    assert not (copy / ".venv" / ".ready").exists()


@pytest.mark.slow
def test_the_shell_is_not_installed_from_a_file_with_another_hash(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = tmp_path / "shell.txt"
    monkeypatch.setattr(shell, "REQUIREMENTS", requirements)
    monkeypatch.setattr(shell, "ENVIRONMENT", tmp_path / "environment")
    requirements.write_text(requirement_line(wheel, rightly=False))
    with pytest.raises(UsageFault, match=f"^p4runtime-shell can't be installed: .*{PIP_REFUSES}.*tiny"):
        shell.install_shell()
    assert not found_in(shell.ENVIRONMENT, "tiny")
    requirements.write_text(requirement_line(wheel, rightly=True))
    shell.install_shell()
    assert found_in(shell.ENVIRONMENT, "tiny")


@pytest.mark.parametrize("file", [CONSTRAINTS, PIP, SHELL], ids=lambda file: str(file.name))
def test_every_package_has_hashes(file: Path) -> None:
    text = file.read_text()
    assert PINNED.search(text)
    assert PINNED.sub("", text) == ""


def test_the_list_fits_the_project() -> None:
    text = CONSTRAINTS.read_text() + "".join(
        f"{line} \\\n    --hash=sha256:{'0' * 64}\n" for line in torch_pin()
    )
    pinned = {pin["name"]: Version(pin["version"]) for pin in PINNED.finditer(text)}
    for line in [*PROJECT.dependencies, *(line for extra in PROJECT.extras.values() for line in extra)]:
        requirement = Requirement(line)
        if requirement.name != PROJECT.name:
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, line


def torch_pin() -> list[str]:
    return TORCH.read_text().split()


def test_torch_and_its_cuda_packages_have_no_hashes() -> None:
    hashed_lines = "filelock==4.2.11 \\\n    --hash=sha256:00\ntorchdata==0.11.0 \\\n    --hash=sha256:01\n"
    dropped = (
        "nvidia-nccl-cu13==2.29.7 ; x \\\n    --hash=sha256:02\ntorch==2.13.0 \\\n    --hash=sha256:03\n"
    )
    dropped += "triton==3.7.1 \\\n    --hash=sha256:04\ncuda-toolkit==13.0 \\\n    --hash=sha256:05\n"
    assert with_hashes(dropped + hashed_lines) == hashed_lines
    assert [line.partition("==")[0] for line in torch_pin()] == ["torch"]
