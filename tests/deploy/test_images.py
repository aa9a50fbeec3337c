"""The Dockerfile has for each role what docs/install.md lists, and exact versions. No image is built here."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from checkmate.base.extras import LIBRARIES
from tests.support.environments import PROJECT
from tests.test_lock import PINNED
from tools.lock import CONSTRAINTS, ROOT, TORCH, filter_by_report

FILE = ROOT / "deploy" / "Dockerfile"
STAGES = dict(re.findall(r"^FROM \S+ AS (\w+)\n((?:(?!^FROM).*\n)*)", FILE.read_text(), re.MULTILINE))


def test_each_role_gets_its_extra_and_metrics_if_it_serves_them() -> None:
    (wheel_loop,) = re.findall(r"for extras in ([\w, ]+); do", STAGES["wheel"])
    assert wheel_loop.split() == ["switch,metrics", "shadow,metrics", "trainer"]
    assert {extra for extras in wheel_loop.split() for extra in extras.split(",")} <= LIBRARIES.keys()
    lists = {name: re.findall(r"\$HASHED /dist/([\w,]+)\.txt", text) for name, text in STAGES.items()}
    expected = zip(
        ("controller", "shadow", "trainer"), ([extra] for extra in wheel_loop.split()), strict=True
    )
    assert lists == {"wheel": [], "base": [], **dict(expected)}


@pytest.mark.parametrize(("stage", "section"), [("trainer", "Trainer"), ("shadow", "Shadow node")])
def test_a_role_has_the_packages_of_the_guide(stage: str, section: str) -> None:
    guide = (ROOT / "docs" / "install.md").read_text().partition(f"\n## {section}\n")[2]
    documented = re.search(r"Debian: `apt-get install (.*?)`", guide)
    (installed,) = re.findall(r"--no-install-recommends (.*?) \\", STAGES[stage])
    assert documented is not None and installed.split() == documented[1].split()


def test_versions_are_those_that_are_tested() -> None:
    """The line of the Dockerfile that collects them is run here."""
    (line,) = re.findall(r"&& (grep .*?) > ", STAGES["wheel"])
    result = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    pins = [pin.split(" ")[0].partition("==") for pin in result.stdout.splitlines()]
    expected = [(pin["name"], "==", pin["version"]) for pin in PINNED.finditer(CONSTRAINTS.read_text())]
    assert pins == [*expected, TORCH.read_text().strip().partition("==")]


def test_only_torch_is_installed_without_the_hash_of_its_file() -> None:
    assert "--no-deps --require-hashes --requirement" in STAGES["base"]
    for name, text in STAGES.items():
        for words in re.findall(r"pip (?:install|wheel) ((?:.*\\\n)*.*)", text.replace("&& pip", "\n&& pip")):
            hashed = "$HASHED" in words or "--require-hashes" in words
            is_own_wheel = "--no-deps" in words and (
                "/dist/*.whl" in words or words.rstrip(" \\\n").endswith("/dist .")
            )
            torch = "--constraint /dist/versions.txt" in words and "torch" in words.split()
            assert hashed or is_own_wheel or torch or words.startswith("--dry-run"), (name, words)
    (line,) = re.findall(r"&& (awk .*?) > ", STAGES["wheel"])
    result = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [requirement["name"] for requirement in PINNED.finditer(result.stdout)] == ["setuptools"]


def test_the_list_of_an_image_has_what_pip_would_install_with_hashes() -> None:
    names = ["torch", "Typing_Extensions", "grpcio", "another"]
    report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
    listed_names = [
        requirement["name"]
        for requirement in PINNED.finditer(filter_by_report(report, CONSTRAINTS.read_text()))
    ]
    assert listed_names == ["grpcio", "typing-extensions"]


def test_the_build_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    admitted = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((ROOT / name).exists() for name in admitted)
    lists = {"tools/__init__.py", "tools/lock.py"}
    build_files = {"MANIFEST.in", "pyproject.toml", "setup.cfg", CONSTRAINTS.name, TORCH.name}
    assert admitted == PROJECT.files() | lists | build_files
