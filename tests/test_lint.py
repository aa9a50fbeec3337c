"""`make lint` passes: ruff, mypy --strict, the layers, and the mechanical rules of English."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports"],
        ["python", "-m", "tools.prose"],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(300)
def test_lint(command: list[str]) -> None:
    program = BIN / command[0]
    result = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_public_class_has_a_name_of_its_own() -> None:
    """A reader who looks for a name finds one class. Scripts of users (`checkmate/examples`) are apart."""
    places: dict[str, list[str]] = {}
    for folder in (
        "benchmarks",
        "checkmate",
        "controlplane",
        "p4src",
        "ptf_tests",
        "softswitch",
        "testbed",
        "tools",
        "topologies",
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.match("*_pb2*.py") or file.is_relative_to(ROOT / "checkmate" / "examples"):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: definitions for name, definitions in places.items() if len(definitions) > 1} == {}
