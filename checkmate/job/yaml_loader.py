"""A YAML loader with bounds, so that a small file can't become a large document.

PyYAML reads aliases as shared objects, which every later walk expands: a file of 400 bytes has 10^9 values.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

FILE_BYTES: Final = 2 << 20
"""The largest file: a job of about 15,000 ranks."""
VALUES: Final = 200_000
"""Values and keys of a document, those behind aliases counted at each use."""
DEPTH: Final = 40
SCALAR_CHARACTERS: Final = 1024
"""The longest text or number; Python refuses to print numbers of more than 4,300 digits."""


class Loader(yaml.SafeLoader):
    """A SafeLoader with bounds. It rejects duplicate keys, which YAML forbids but PyYAML accepts.

    Every fault is a `yaml.YAMLError`, and almost every one has a line.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node and all within it; check the bounds before anything is built from them."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEPTH:
            raise _fault(f"is nested more than {DEPTH} levels deep", event)
        before = self._values
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _fault(f"the alias *{str(event.anchor)[:100]} is within what it stands for", event)
            self._values += self._sizes[id(node)]
        else:
            self._values += 1
            self._sizes[id(node)] = self._values - before
        if self._values > VALUES:
            raise _fault(f"has more than {VALUES:,} values, with those that aliases repeat", event)
        if isinstance(node, yaml.ScalarNode):
            _check_text(node.value, event)
        self._depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value. For `!!int a` and its like, PyYAML raises what Python does."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            raise yaml.MarkedYAMLError(
                None, None, f"has a value that can't be read as {_kind(node.tag)}", node.start_mark
            ) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _check_text(text: str, event: Any) -> None:
    if len(text) > SCALAR_CHARACTERS:
        raise _fault(f"has a value of {len(text):,} characters, more than {SCALAR_CHARACTERS:,}", event)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _fault("has half of a surrogate pair, which is not a character", event)


def _kind(tag: str) -> str:
    kind = tag.rpartition(":")[2][:100]
    return {"int": "a whole number", "float": "a number", "timestamp": "a date"}.get(kind, kind)


def _fault(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, event.start_mark)
