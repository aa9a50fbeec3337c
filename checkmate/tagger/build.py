"""Compiles the tagger's C source with clang, once per version of the source."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from checkmate.tagger.errors import TaggerUnavailable

SOURCE = Path(__file__).with_name("tagger.c")
HEADER = Path(__file__).with_name("tagger.h")
PACKAGES = "apt-get install clang libbpf-dev linux-libc-dev"
"""Debian's names of the packages that the compilation needs."""

_FLAGS = ("-target", "bpf", "-g", "-O2", "-Wall", "-Werror")


def object_file(cache: Path | None = None) -> Path:
    """Return the path of the compiled program. Compile it unless it is in the cache.

    The cache is `$XDG_CACHE_HOME/checkmate` by default, or `~/.cache/checkmate`.

    Raises:
        TaggerUnavailable: clang or a header is missing, or the cache can't be written.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes() + " ".join(_FLAGS).encode())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = (cache or base / "checkmate") / f"tagger-{digest.hexdigest()[:16]}.o"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(target)
    except OSError as error:
        raise TaggerUnavailable(
            f"no access to its compiled program: {error}", "set XDG_CACHE_HOME to a folder you can write to"
        ) from None
    return target


def _compile(target: Path) -> None:
    clang = shutil.which("clang")
    if clang is None:
        raise TaggerUnavailable("clang, which compiles its eBPF program, is not on PATH", PACKAGES)
    # Debian has asm/types.h in the architecture's own folder, which clang's bpf target doesn't search.
    include = f"-I/usr/include/{platform.machine()}-linux-gnu"
    # Several ranks may compile at once, each into its own file; the rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "tagger.o"
        command = [clang, *_FLAGS, include, "-c", str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            raise TaggerUnavailable(f"clang refused {SOURCE.name}: {words[0]}", PACKAGES)
        fresh.replace(target)
