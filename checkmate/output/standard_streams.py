"""Standard output and error: ASCII for terminals that show no more, and a note of failed writes."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

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
"""The values that Python itself puts into `LC_CTYPE` for these (PEP 538)."""


def plain(text: str) -> str:
    """Return a text in ASCII: drawings with similar characters, all others as escapes."""
    return (
        "".join(_PLAIN.get(character, character) for character in text)
        .encode("ascii", "backslashreplace")
        .decode()
    )


def use_plain_streams() -> None:
    """Let standard output and error replace what they can't encode, and use ASCII if the terminal does."""
    codecs.register_error(_ERRORS, _replace)
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
    return next((locale for locale in locales if locale), "") in _NO_LOCALE


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


class OutputFile(io.FileIO):
    """The file below standard output's buffers. `fault` is the error of the last write that failed."""

    fault: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def note_output() -> OutputFile | None:
    """Have `sys.stdout` note its errors. Without standard output, it discards what is written.

    Returns:
        The file that notes them; `None` without standard output, or if it is not a file.
    """
    if sys.stdout is None:  # nobody has opened file descriptor 1
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return None
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        number = stream.fileno()
    except OSError:
        return None
    output = OutputFile(number, "wb", closefd=False)
    buffer: Any = output if stream.write_through else io.BufferedWriter(output)  # as Python's -u has it
    sys.stdout = io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return output


def is_output_error(error: BaseException | None, output: OutputFile | None) -> bool:
    """Return whether an error, or one that it follows from, is that of a write to standard output."""
    while error is not None and output is not None:
        if error is output.fault:
            return True
        error = error.__cause__ or error.__context__
    return False
