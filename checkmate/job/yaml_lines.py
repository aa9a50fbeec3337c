"""YAML files with bounds and line numbers; faults with their location; YAML's errors in users' words."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from checkmate.base.opening import at_once
from checkmate.base.wording import did_you_mean, printable
from checkmate.job import faults
from checkmate.job.faults import Fault, show_path
from checkmate.job.fields import FILE_BYTES

_COLON: Final = (
    "has a ':' in a wrong place: the indentation is wrong, or a line before lacks its ':', or a text "
    "with ': ' needs quotes"
)
_Words = Callable[["re.Match[str]", int], str]


def _unclosed(match: re.Match[str], line: int) -> str:
    opener = {"]": "[", "}": "{"}[match[1]]
    return f"the '{opener}' in line {line} is not closed here: ',' or '{match[1]}' is missing"


_WORDS: Final[tuple[tuple[str, str | _Words], ...]] = (
    (r"found character '\\t' ", "has a tab where YAML accepts only spaces: indent with spaces"),
    (
        r"found character (.+) that cannot start",
        lambda match, _: f"a text that begins with {match[1]} needs quotes",
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
        lambda match, _: (
            f"the alias *{match[1]} has no anchor &{match[1]} before it; a text with * needs quotes"
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
    (r"expected ',' or '([]}])'", _unclosed),
    (r"found unexpected end of stream", lambda _, line: f"the quote in line {line} is not closed"),
    (
        r"expected the node content",
        "ends too early, or has a ',' too many: a '[' or '{' is not closed correctly",
    ),
    (
        r"found unknown escape character '(.+)'",
        lambda match, _: f"has \\{match[1]} in double quotes, which is not an escape; use single quotes",
    ),
    (
        r"could not determine a constructor for the tag '(?:tag:yaml.org,2002:)?!*(.*)'",
        lambda match, _: f"has the tag !{match[1]}, which these files do not use; remove it",
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
        if match := re.search(pattern, problem):
            return words if isinstance(words, str) else words(match, began.line + 1 if began else 1)
    return problem if error.context is None else f"is not valid YAML: {problem}"


def control_character(text: str) -> tuple[int, str] | None:
    """Return the line and the fault of the first character that YAML does not allow, or `None`."""
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match is None:
        return None
    return line_of(text, match.start()), f"has the control character U+{ord(match[0]):04X}; remove it"


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
            fault = "is empty"
        case list():
            fault = "is a list"
        case _:
            fault = "is a single value"
    return f"{fault}; it must be a mapping of keys such as {keys}"


VALUES: Final = 200_000
"""Values and keys of a document, those behind aliases counted at each use."""
DEPTH: Final = 40
SCALAR_CHARACTERS: Final = 1024
"""The longest text or number; Python refuses to print numbers of more than 4,300 digits."""


_DIFFERENT: Final = re.compile(r"[^\n -~]|[!?]|[|>][-+0-9]*#")
"""What libyaml may read in another way than Python's parser: tabs, all that is not ASCII, tags, `?` in lists
in brackets, and comments right after `|` or `>`."""
_YAML: Final = "tag:yaml.org,2002:"
_REFUSED_TAGS: Final = frozenset(_YAML + kind for kind in ("binary", "omap", "pairs", "set"))


class YamlFault(yaml.MarkedYAMLError):
    """A fault in what YAML itself accepts. It is the same with both parsers."""


class _Bounded(Composer, SafeConstructor, Resolver):
    """A SafeLoader with bounds. It rejects duplicate keys, which YAML forbids but PyYAML accepts.

    Every fault is a `yaml.YAMLError`, and almost every one has a line.
    """

    def __init__(self) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node and all within it; check the bounds before anything is built from them."""
        event: Any = self.peek_event()  # type: ignore[attr-defined]  # the parser's
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
        """Construct a value. For `!!int a` and its like, PyYAML raises what Python does.

        Bytes and sets, which only tags make, would be texts and lists for some readers and not for others.
        """
        if node.tag in _REFUSED_TAGS:
            raise YamlFault(
                None, None, f"has the tag {node.tag.replace(_YAML, '!!')}: remove it", node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            raise YamlFault(
                None, None, f"has a value that can't be read as {_kind(node.tag)}", node.start_mark
            ) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in lines:
                raise YamlFault(
                    None,
                    None,
                    f"the key {key!r} is given twice, first in line {lines[key]}; remove one",
                    key_node.start_mark,
                )
            if isinstance(key, str):
                lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


class Loader(_Bounded, yaml.SafeLoader):
    """Parses in Python. Its faults are those that `in_words` knows."""

    def __init__(self, text: str) -> None:
        yaml.SafeLoader.__init__(self, text)
        _Bounded.__init__(self)


_fast: Callable[[str], _Bounded] = Loader
if yaml.__with_libyaml__:  # which wheels have
    from yaml._yaml import CParser

    class FastLoader(_Bounded, CParser):
        """Parses with libyaml, several times as fast, which counts for jobs with thousands of ranks."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            _Bounded.__init__(self)

    _fast = FastLoader


def _check_text(text: str, event: Any) -> None:
    if len(text) > SCALAR_CHARACTERS:
        raise _fault(f"has a value of {len(text):,} characters, more than {SCALAR_CHARACTERS:,}", event)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _fault("has half of a surrogate pair, which is not a character", event)


def _kind(tag: str) -> str:
    kind = tag.rpartition(":")[2][:100]
    return {"int": "a whole number", "float": "a number", "timestamp": "a date"}.get(kind, kind)


def _fault(problem: str, event: Any) -> YamlFault:
    return YamlFault(None, None, problem, event.start_mark)


@dataclass(frozen=True)
class Located:
    """A fault with its location in a file; line 0 if it concerns the whole file."""

    file: Path
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return printable(f"{place}: {self.path}: {self.message}")


class JobError(Exception):
    """Job files, or files of the kind that `where` names, cannot be used; `faults` has all reasons."""

    where = "the job files"

    def __init__(self, faults: Sequence[Located]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class Document:
    """A parsed YAML file: its data, and the line of each path."""

    file: Path
    data: Any
    lines: dict[faults.Path, int]
    fingerprint: str | None = None
    """SHA-256 of the file's content; `None` for a pipe or a device, which is read only once."""

    def locate(self, fault: Fault) -> Located:
        """Return the fault with its line, or the line of the nearest existing parent."""
        path = fault.path
        while path and path not in self.lines:
            path = path[:-1]
        return Located(self.file, self.lines.get(path, 1), show_path(fault.path), fault.message)


def read_document(file: Path, keys: str = "job: and fabric:", *, regular: bool = False) -> Document:
    """Parse a YAML file that is a mapping with keys such as `keys`. Raise `JobError` if it is not.

    `regular`: refuse pipes and devices, whose writers could keep the reader waiting.
    """
    text, fingerprint = _read(file, regular)
    try:
        data, lines = _parse(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise JobError([Located(file, line, "(YAML)", in_words(error))]) from None
    except (ValueError, OverflowError) as error:  # the scanner's, for an escape such as "\\UFFFFFFFF"
        raise JobError([Located(file, 1, "(YAML)", f"has a value that cannot be read: {error}")]) from None
    if not isinstance(data, dict):
        raise JobError([Located(file, 1, "(top level)", not_a_mapping(data, keys))])
    return Document(file, data, lines, fingerprint)


def _read(file: Path, regular: bool) -> tuple[str, str | None]:
    """Return a file's text and fingerprint. Raise `JobError` if it is too large, whatever its size says."""
    try:
        with open(file, "rb", opener=at_once if regular else None) as stream:
            is_regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            if regular and not is_regular:
                raise JobError([Located(file, 0, "(file)", "is a pipe or a device; it must be a file")])
            content = stream.read(FILE_BYTES + 1)
    except OSError as error:
        raise JobError([Located(file, 0, "(file)", _unreadable(file, error))]) from None
    if len(content) > FILE_BYTES:
        message = f"is larger than {FILE_BYTES >> 20} MiB, the most that a YAML file may have"
        raise JobError([Located(file, 0, "(file)", message)])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = line_of(content, error.start)
        raise JobError([Located(file, line, "(file)", undecodable(content, error))]) from None
    if control := control_character(text):
        raise JobError([Located(file, control[0], "(YAML)", control[1])])
    return text, hashlib.sha256(content).hexdigest() if is_regular else None


def _unreadable(file: Path, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder; give the path of a file in it"
    try:
        siblings = os.listdir(file.parent) if isinstance(error, FileNotFoundError) else []
    except OSError:
        siblings = []
    return f"cannot be read: {error.strerror}{did_you_mean(file.name, siblings)}"


def _parse(text: str) -> tuple[Any, dict[faults.Path, int]]:
    """Return a document's data, and the line of each path in it."""
    if not _DIFFERENT.search(text):
        try:
            return _parsed(_fast(text))
        except YamlFault:
            raise
        except (yaml.YAMLError, ValueError, OverflowError):
            pass  # Python's parser tells what is wrong
    return _parsed(Loader(text))


def _parsed(loader: Any) -> tuple[Any, dict[faults.Path, int]]:
    try:
        node = loader.get_single_node()
        lines: dict[faults.Path, int] = {}
        _note_lines(node, (), lines)
        return (None if node is None else loader.construct_document(node)), lines
    finally:
        loader.dispose()


def _note_lines(node: Any, path: faults.Path, lines: dict[faults.Path, int]) -> None:
    if node is None:
        return  # an empty file
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # no fault's path leads through others
                lines[(*path, key.value)] = key.start_mark.line + 1
                _note_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)


def beside(folder: Path, name: str) -> Path:
    """Return the path of a name in a file of that folder: without `..`, unless links give it a meaning."""
    path = folder / name
    if "\0" in name:  # refused later
        return path
    tidy = Path(os.path.normpath(path))
    return tidy if ".." in path.parts and os.path.realpath(tidy) == os.path.realpath(path) else path


def resolve_tls(fabric: Any, folder: Path) -> None:
    """Resolve the names of a fabric's TLS files against the folder of its file, in place."""
    switches = fabric.get("switches") if isinstance(fabric, dict) else None
    for switch in switches if isinstance(switches, list) else []:
        tls = switch.get("tls") if isinstance(switch, dict) else None
        if isinstance(tls, dict):
            tls.update(
                {key: str(beside(folder, value)) for key, value in tls.items() if isinstance(value, str)}
            )
