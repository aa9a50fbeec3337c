"""The user's cache, in which what takes time to make is kept, and programs that are compiled into it."""

from __future__ import annotations

import atexit
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

WRITTEN_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder: `$XDG_CACHE_HOME/checkmate`, or `~/.cache/checkmate`. It may be missing.

    Raises:
        OSError: This user has no home.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "checkmate")
    try:
        return Path.home() / ".cache" / "checkmate"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def code_folder() -> Path:
    """Return a folder for compiled code, which nobody but this user and root can change.

    That is the cache. But root may have an ordinary user's environment, as by `su` or `sudo -E`, and would
    run what that user has put there: then it is the cache in the own home, or else a folder for as long as
    this process runs.

    Raises:
        OSError: None can be made.
    """
    for folder in _candidates():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(folder)
            if os.access(folder, os.R_OK | os.X_OK):  # root may have made it for itself
                return folder
    return _passing()


def _candidates() -> list[Path]:
    folders = []
    with suppress(OSError):
        folders.append(cache_folder())
    with suppress(KeyError):  # a user without a name
        folders.append(Path(pwd.getpwuid(os.geteuid()).pw_dir, ".cache", "checkmate"))
    return folders


@cache
def _passing() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="checkmate-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_own(path: Path) -> None:
    """Raise `PermissionError` if another user than root can change what is at a path, or where it leads."""
    owners = {os.geteuid(), 0}
    real, named_path = Path(os.path.realpath(path)), Path(os.path.abspath(path))
    about = real.stat()
    if about.st_uid not in owners or about.st_mode & WRITTEN_BY_OTHERS:
        raise PermissionError(f"another user can write to {path}")
    for parent in {*real.parents, *named_path.parents}:
        about = parent.stat()
        sticky = about.st_mode & stat.S_ISVTX  # as /tmp: nobody else renames what is in it
        if about.st_uid not in owners or (about.st_mode & stat.S_IWOTH and not sticky):
            raise PermissionError(f"another user can write to {parent}")
    if named_path.lstat().st_uid not in owners:  # a link in such a folder
        raise PermissionError(f"another user has made {path}")


def c_compiler() -> str | None:
    """Return the path of this machine's C compiler, or `None` if it has none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


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
    arguments = command()
    # Several ranks may compile at once, each into its own file; the rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / name
        result = subprocess.run([*arguments, "-o", str(fresh)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompilerRefused((result.stderr.strip().splitlines() or [f"exit {result.returncode}"])[0])
        fresh.replace(target)
    return target
