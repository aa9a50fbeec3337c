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


PRODUCT = (
    *("benchmarks", "checkmate", "controlplane", "p4src", "ptf_tests", "softswitch", "testbed", "tools"),
    "topologies",
)
BARE = {
    *("one", "found", "made", "said", "told", "other", "own", "held", "known", "kept", "what", "who", "ours"),
    *("theirs", "given", "wanted", "done", "seen"),
}
"""Pronouns and participles, which say nothing of a thing."""
OPERANDS = {"__eq__", "__add__", "__sub__"}
"""Methods whose second operand is `other`, as Python has it."""
FORMATS = {
    *(("checkmate/cli/documents", name) for name in ("made", "kept", "held", "what")),
    *(("checkmate/planner/profile", "what"), ("checkmate/report", "who"), ("p4src", "what")),
    *(("checkmate/rpc", "held"), ("controlplane/endpoint/frames.py", "OTHER")),
}
"""Fields whose names are keys of JSON, and the like, by folder."""


def product_files() -> list[Path]:
    """Return the modules of the product, without generated ones."""
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if not file.match("*_pb2*.py")]


def bare_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the names that a module gives to things and that are a bare pronoun or participle, by line."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            operands = 1 if node.name in OPERANDS else 0
            arguments = [*node.args.posonlyargs, *node.args.args[2 * operands :], *node.args.kwonlyargs]
            names += [(node.lineno, name) for name in (node.name, *(each.arg for each in arguments))]
    return [(line, name) for line, name in names if name.strip("_").lower() in BARE]


def test_things_have_nouns_for_names() -> None:
    places = []
    for file in product_files():
        path = file.relative_to(ROOT)
        for line, name in bare_names(ast.parse(file.read_text())):
            if not any(str(path).startswith(folder) and name.strip("_") == word for folder, word in FORMATS):
                places.append(f"{path}:{line}: {name}")
    assert places == []


def test_a_bare_name_is_found() -> None:
    tree = ast.parse("def found(one, *, told=1):\n    self.kept = other = 1\n    for job in said: pass\n")
    assert sorted(name for _, name in bare_names(tree)) == ["found", "kept", "one", "other", "told"]


def test_a_public_class_has_a_name_of_its_own() -> None:
    """A reader who looks for a name finds one class. Scripts of users (`checkmate/examples`) are apart."""
    places: dict[str, list[str]] = {}
    for file in product_files():
        if file.is_relative_to(ROOT / "checkmate" / "examples"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: definitions for name, definitions in places.items() if len(definitions) > 1} == {}
