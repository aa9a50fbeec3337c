"""Check the mechanical rules of English in docs, docstrings, comments and messages: `python -m tools.prose`.

Only rules without false alarms are here; CONTRIBUTING.md has the others.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
COLUMNS: Final = 120
"""At most, in Markdown. Tables and code may be wider."""

RULES: Final[Sequence[tuple[str, str]]] = (
    (r"\banew\b", "again, or re-"),
    (r"\bin vain\b", "without success, or: timed out"),
    (r"\bis no (?!longer\b|more\b|less\b|other\b)[a-z]", "is not a"),
    (r"\bare no (?!longer\b|more\b|less\b|other\b)[a-z]+s\b", "are not, or: there are no"),
    (r"\bso (?:many|much)\b(?! (?:that|as)\b)", "the number: N bytes, this many"),
    (r"\bfor so long\b|\bso long until\b", "the time: for N seconds, until then"),
    (r", for (?:it|they|he|she|there|these|those|nobody|nothing)\b", "because"),
    (r"`[A-Z]\w+`,? where\b", "`Error` if"),
    (r"\bwhere (?:there (?:is|are|was|were)|none|nothing|nobody|it (?:can't|isn't|has no))\b", "if, or when"),
    (r"\bone after the other\b", "one after another, in turn"),
    (r"\bwhereof\b|\bwherein\b|\bthereof\b|\btherein\b", "a plain word"),
    (r"\bgoes round\b|\bcome(?:s)? round\b", "rotates, wraps, returns"),
    (r"\bat its? best\b|\bto the best\b", "a figure"),
)


class ProseFinding(NamedTuple):
    """A rule that a line breaks."""

    file: str
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.instead}"


def check(name: str, text: str) -> Iterator[ProseFinding]:
    """Yield what one file breaks, by its name: Markdown as it is, of code only comments and strings."""
    broken = [rule for rule in RULES if re.search(rule[0], text)]  # most files need not be cut into tokens
    lines = _markdown(text) if name.endswith(".md") else _of_code(name, text)
    for number, line in lines if broken else ():
        for pattern, instead in broken:
            for match in re.finditer(pattern, line):
                yield ProseFinding(name, number, match[0], instead)
    if name.endswith(".md"):
        for number, line in _prose(text):
            if len(line) > COLUMNS:
                yield ProseFinding(name, number, line[:40] + "...", f"lines of at most {COLUMNS} columns")


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1))


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines that are neither code nor a table nor a picture."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not (code or line.lstrip().startswith(("|", "!", "[", "<", "    "))):
            yield number, line


def _of_code(name: str, text: str) -> Iterator[tuple[int, str]]:
    if not name.endswith(".py"):
        for number, line in enumerate(text.splitlines(), 1):
            if match := re.search(r"(?://|/\*|^ \*|#).*", line):
                yield number, match[0]
        return
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def files() -> list[str]:
    """Return the repository's own text files, relative to its root."""
    paths = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    kinds = (".md", ".py", ".c", ".h", ".p4", ".proto", ".sh")
    return [
        name
        for name in paths
        if name.endswith(kinds)
        and (ROOT / name).is_file()
        and not name.startswith(
            ("p4src/build", "checkmate/rpc/shadow_pb2", "tools/prose.py", "tests/docs/test_prose")
        )
    ]


def main() -> int:
    """Print every finding; 1 if there is one."""
    findings = [finding for name in files() for finding in check(name, (ROOT / name).read_text())]
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
