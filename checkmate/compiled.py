"""Programs that are compiled when they are first needed, and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from checkmate.cache import check_own, code_folder


class CompilerRefused(Exception):
    """The compiler failed; the message is the first line that it wrote."""


def compiled(
    name: str,
    files: Sequence[Path],
    flags: Sequence[str],
    command: Callable[[], Sequence[str]],
    cache: Path | None = None,
) -> Path:
    """Return the path of a compiled program. Compile it unless it is in the cache.

    The cache is `cache.code_folder` by default.

    Args:
        name: The program's file name, without the digest that is added before its ending.
        files: The files that it is made of.
        flags: The compiler's flags.
        command: Returns the compiler's command, to which its output is added.
        cache: Another cache.

    Raises:
        CompilerRefused: The compiler failed.
        OSError: The cache can't be used, or is not this user's own.
    """
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files) + " ".join(flags).encode())
    stem, ending = os.path.splitext(name)
    if cache is not None:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(cache)
    target = (cache or code_folder()) / f"{stem}-{digest.hexdigest()[:16]}{ending}"
    with suppress(FileNotFoundError):
        check_own(target)
        return target
    wanted = command()
    # Several ranks may compile at once, each into its own file; the rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / name
        done = subprocess.run([*wanted, "-o", str(fresh)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerRefused((done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[0])
        fresh.replace(target)
    return target
