"""Opens files that others may have replaced by a pipe, whose other end could keep a reader waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe. It is an `opener` of `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Raise `OSError` if it is not one: a check before could be of another."""
    file = open(path, "rb", opener=at_once)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file")
    return file
