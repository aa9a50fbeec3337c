"""YAML's errors in the words of users: what is wrong at a place, and what would be right. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import yaml

_COLON: Final = (
    "has a ':' in a wrong place: the indentation is wrong, or a line before lacks its ':', or a text "
    "with ': ' needs quotes"
)
_Words = Callable[["re.Match[str]", int], str]


def _opened(found: re.Match[str], line: int) -> str:
    opener = {"]": "[", "}": "{"}[found[1]]
    return f"the '{opener}' in line {line} is not closed here: ',' or '{found[1]}' is missing"


_WORDS: Final[tuple[tuple[str, str | _Words], ...]] = (
    (r"found character '\\t' ", "has a tab where YAML accepts only spaces: indent with spaces"),
    (
        r"found character (.+) that cannot start",
        lambda found, _: f"a text that begins with {found[1]} needs quotes",
    ),
    (
        r"but found another document",
        "has a second document; keep one, or put the other into a file of its own",
    ),
    (
        r"expected '<document start>'",
        "has more after the end of the document; remove the line '...' before it",
    ),
    (
        r"found undefined alias '(.*)'",
        lambda found, _: (
            f"the alias *{found[1]} has no anchor &{found[1]} before it; a text with * needs quotes"
        ),
    ),
    (
        r"second occurrence",
        lambda _, line: f"this anchor is given already in line {line}; choose another name",
    ),
    (r"expected alphabetic or numeric character", "a text that begins with '*', '&' or '!' needs quotes"),
    (r"mapping values are not allowed", _COLON),
    (
        r"(mapping keys|sequence entries) are not allowed",
        "has a '? ' or '- ' in a wrong place; correct the indentation",
    ),
    (r"expected <block end>", "is not indented like the lines that it belongs to"),
    (r"could not find expected ':'", "lacks a ':' after the key"),
    (r"expected ',' or '([]}])'", _opened),
    (r"found unexpected end of stream", lambda _, line: f"the quote in line {line} is not closed"),
    (
        r"expected the node content",
        "ends too early, or has a ',' too many: a '[' or '{' is not closed correctly",
    ),
    (
        r"found unknown escape character '(.+)'",
        lambda found, _: f"has \\{found[1]} in double quotes, which is not an escape; use single quotes",
    ),
    (
        r"could not determine a constructor for the tag '(?:tag:yaml.org,2002:)?!*(.*)'",
        lambda found, _: f"has the tag !{found[1]}, which these files do not use; remove it",
    ),
    (r"found unhashable key", "has a list or a mapping as a key; a key is a text"),
    (r"for merging", "the key << needs an alias of a mapping, such as <<: *name"),
    (r"incompatible YAML document", "is of another version of YAML than 1.1 or 1.2; remove the line %YAML"),
)


def in_words(error: yaml.MarkedYAMLError) -> str:
    """Return an error of the YAML parser, or one of our own, as a message without its place."""
    problem = str(error.problem)
    began: Any = error.context_mark
    for pattern, words in _WORDS:
        if found := re.search(pattern, problem):
            return words if isinstance(words, str) else words(found, began.line + 1 if began else 1)
    return problem if error.context is None else f"is not valid YAML: {problem}"


def control_character(text: str) -> tuple[int, str] | None:
    """Return the line and the fault of the first character that YAML does not allow, or `None`."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return None
    return line_of(text, found.start()), f"has the control character U+{ord(found[0]):04X}; remove it"


def line_of(text: str | bytes, position: int) -> int:
    """Return the line of a position in a text."""
    newline: Any = "\n" if isinstance(text, str) else b"\n"
    return text.count(newline, 0, position) + 1


def undecodable(content: bytes, error: UnicodeDecodeError) -> str:
    """Return the fault of a file that is not UTF-8."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; save it as UTF-8"
    return f"is not UTF-8: byte 0x{content[error.start]:02X}; save the file as UTF-8"


def not_a_mapping(data: object, keys: str) -> str:
    """Return the fault of a document that is not a mapping of keys such as `keys`."""
    match data:
        case None:
            what = "is empty"
        case list():
            what = "is a list"
        case _:
            what = "is a single value"
    return f"{what}; it must be a mapping of keys such as {keys}"
