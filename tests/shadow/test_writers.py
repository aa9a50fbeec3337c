"""The state of a node is written by its own methods only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from checkmate import shadow

STATES = {"NodeState", "ShadowGroup", "Hold", "StreamState", "Tally"}
"""Classes of `checkmate.shadow.logic` whose attributes others may only read."""
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "discard", "update", "setdefault"}
BELOW = ("receive", "replica")
"""Packages that know no state, because layers below may not import `logic`."""
MESSAGE = "reply"
"""Name of protobuf messages, some of whose fields have the names of attributes."""
ROOT = Path(shadow.__path__[0])
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in BELOW]


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def is_of(name: str, node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == name


def fields_of(state: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares in its body or sets in its methods."""
    fields = {
        node.target.id
        for node in state.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields | {attribute.attr for attribute in written_attributes(state) if is_of("self", attribute)}


def written_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that code assigns, deletes, or changes as a container."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node
            continue
        container: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            container = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            container = node.func.value if node.func.attr in MUTATORS else None
        if isinstance(container, ast.Attribute):
            yield container


def foreign_writes(tree: ast.AST, fields: set[str]) -> list[str]:
    return [
        f"{attribute.lineno}: {ast.unparse(attribute)}"
        for attribute in written_attributes(tree)
        if attribute.attr in fields and not (is_of("self", attribute) or is_of(MESSAGE, attribute))
    ]


def test_no_other_code_writes_the_state_of_a_node() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    states = [state for tree in trees.values() for state in classes(tree) if state.name in STATES]
    assert {state.name for state in states} == STATES
    fields = set().union(*(fields_of(state) for state in states))
    assert {"phase", "live", "released", "position", "reached", "steps"} <= fields
    writes = {path.name: foreign_writes(tree, fields) for path, tree in trees.items()}
    assert {name: lines for name, lines in writes.items() if lines} == {}


def test_a_foreign_write_is_found_in_each_of_its_forms() -> None:
    code = "def f(self, state):\n" + "\n".join(
        f"    {line}"
        for line in (
            "state.phase = 1",
            "state.tally.steps += 1",
            "state.troubles.append('a')",
            "state.reserved[3] = []",
            "del state.reserved[3]",
            "a, state.phase = 1, 2",
            "self.phase = 2",
            "return state.phase",
        )
    )
    lines = foreign_writes(ast.parse(code), {"phase", "steps", "troubles", "reserved"})
    assert sorted(line.split(":")[0] for line in lines) == ["2", "3", "4", "5", "6", "7"]
