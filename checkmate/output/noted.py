"""Standard output that notes what could not be written, which an error alone does not tell."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class NotedFile(io.FileIO):
    """The file below standard output's buffers. `fault` is the error of the last write that failed."""

    fault: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def note_output() -> NotedFile | None:
    """Have `sys.stdout` note its errors. Without standard output, it discards what is written.

    Returns:
        What notes them; `None` without standard output, or if it is not a file.
    """
    if sys.stdout is None:  # nobody has opened file descriptor 1
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return None
    like = sys.stdout
    if not isinstance(like, io.TextIOWrapper):
        return None
    try:
        number = like.fileno()
    except OSError:
        return None
    raw = NotedFile(number, "wb", closefd=False)
    buffer: Any = raw if like.write_through else io.BufferedWriter(raw)  # as Python's -u has it
    sys.stdout = io.TextIOWrapper(
        buffer,
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
    return raw


def is_of_output(error: BaseException | None, output: NotedFile | None) -> bool:
    """Return whether an error, or one that it follows from, is that of a write to standard output."""
    while error is not None and output is not None:
        if error is output.fault:
            return True
        error = error.__cause__ or error.__context__
    return False
