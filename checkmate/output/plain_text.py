"""Standard output and error of terminals that show ASCII only: no traceback, and no mojibake."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Mapping
from typing import Final

_PLAIN: Final = {
    **dict.fromkeys("─━═╌┄", "-"),
    **dict.fromkeys("│┃║", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
    **dict.fromkeys("−–—‑", "-"),
    **dict.fromkeys("·•", "*"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("‘’", "'"),
    "→": "->",
    "←": "<-",
    "…": "...",
    "×": "x",
}
_ERRORS: Final = "checkmate-plain"
_DUMB: Final = ("dumb", "unknown")
_NO_LOCALE: Final = ("C", "POSIX")
_COERCED: Final = ("C.UTF-8", "C.utf8", "UTF-8")
"""What Python itself puts into `LC_CTYPE` for these (PEP 538)."""


def plain(text: str) -> str:
    """Return a text in ASCII: drawings with similar characters, all others as escapes."""
    return "".join(_PLAIN.get(one, one) for one in text).encode("ascii", "backslashreplace").decode()


def use_plain_streams() -> None:
    """Let standard output and error replace what they can't encode, and use ASCII if the terminal does."""
    codecs.register_error(_ERRORS, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = "ascii" if is_ascii_only(os.environ, terminal=stream.isatty()) else stream.encoding
            stream.reconfigure(encoding=encoding, errors=_ERRORS)


def is_ascii_only(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """Return whether the environment asks for ASCII, although Python has chosen UTF-8 for the locale C."""
    if environ.get("PYTHONIOENCODING", "").partition(":")[0] or environ.get("PYTHONUTF8") == "1":
        return False
    if terminal and environ.get("TERM", "").lower() in _DUMB:
        return True
    characters = environ.get("LC_CTYPE", "")
    locales = (environ.get("LC_ALL"), "" if characters in _COERCED else characters, environ.get("LANG"))
    return next((one for one in locales if one), "") in _NO_LOCALE


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end
