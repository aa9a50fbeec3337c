"""Standard output that notes whether it could not be written, which an error alone does not tell."""

from __future__ import annotations

import io
import sys


class NotedOutput(io.TextIOWrapper):
    """The same as another standard output. `fault` is the error of the first write that failed."""

    fault: OSError | None = None

    def __init__(self, like: io.TextIOWrapper) -> None:
        unbuffered = like.write_through
        raw = open(like.fileno(), "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        super().__init__(
            raw,
            encoding=like.encoding,
            errors=like.errors,
            line_buffering=like.line_buffering,
            write_through=unbuffered,
        )

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.fault = self.fault or error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.fault = self.fault or error
            raise


def note_output() -> None:
    """Have `sys.stdout` note its errors, if there is one."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not isinstance(sys.stdout, NotedOutput):
        sys.stdout = NotedOutput(sys.stdout)


def output_fault() -> OSError | None:
    """Return why standard output could not be written, if that has happened."""
    return sys.stdout.fault if isinstance(sys.stdout, NotedOutput) else None
