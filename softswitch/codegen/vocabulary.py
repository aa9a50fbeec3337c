"""The words of generated code. All of it is checked against them before it is executed.

So not even a fault of the generator can make a program's text part of the code.
Identifiers and attributes are those below, or an identifier is a kind and a number.
"""

from __future__ import annotations

import ast
import re
from typing import Final

BUILTINS: Final = {"bytes", "dict", "int", "len", "memoryview", "min", "range", "str", "zip", "bool"}
VARIABLES: Final = {
    "at",
    "changed",
    "copy_port",
    "egress",
    "entry",
    "frame",
    "packet_size",
    "port",
    "process",
    "size",
    "trace",
}
ATTRIBUTES: Final = {
    "action",
    "add",
    "append",
    "bytes",
    "color",
    "count",
    "default",
    "from_bytes",
    "get",
    "is_default",
    "join",
    "meter",
    "packets",
    "params",
    "priority",
}
CONSTANTS: Final = {"big", b""}
_NUMBERED: Final = re.compile(r"[a-z]+(_[a-z]+)?_[0-9]+", re.ASCII)
_SCRATCH: Final = re.compile(r"_[a-z]+[0-9]*|_", re.ASCII)
_FOREIGN: Final = (ast.Import, ast.ImportFrom, ast.Global, ast.ClassDef, ast.Lambda, ast.JoinedStr)


class ForeignCodeError(Exception):
    """Generated code has a word that is not of the vocabulary: a fault of the generator."""


def check(tree: ast.AST) -> None:
    """Raise `ForeignCodeError` unless the code consists of known words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.arg):
            word = node.id if isinstance(node, ast.Name) else node.arg
            is_allowed = bool(
                word in BUILTINS | VARIABLES or _NUMBERED.fullmatch(word) or _SCRATCH.fullmatch(word)
            )
        elif isinstance(node, ast.Attribute):
            word, is_allowed = node.attr, node.attr in ATTRIBUTES
        elif isinstance(node, ast.Constant):
            word, is_plain = repr(node.value), isinstance(node.value, int | None)
            is_allowed = is_plain or node.value in CONSTANTS
        else:
            word, is_allowed = type(node).__name__, not isinstance(node, _FOREIGN)
        if not is_allowed:
            raise ForeignCodeError(f"generated code contains {word[:60]}")
