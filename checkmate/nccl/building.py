"""Compiles the NCCL plugin into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).with_name("plugin")
PACKAGES: Final = "apt-get install gcc libc6-dev linux-libc-dev"
"""Debian's names of the packages that the compilation needs."""
_FLAGS: Final = (
    *("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror"),
)
_TAGGER_HEADER: Final = SOURCES.parent.parent / "tagger" / "tagger.h"


class PluginError(RuntimeError):
    """The NCCL plugin can't be built or loaded; the message has the reason and the remedy."""

    exit_code = 1


def shared_object(cache: Path | None = None) -> Path:
    """Return the path of the plugin. Compile it unless it is in the cache.

    The cache is `$XDG_CACHE_HOME/checkmate` by default, or `~/.cache/checkmate`.

    Raises:
        PluginError: A C compiler or a header is missing, or the cache can't be written.
    """
    files = [*sorted(SOURCES.glob("*.[ch]")), _TAGGER_HEADER]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files) + " ".join(_FLAGS).encode())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = (cache or base / "checkmate") / f"libnccl-net-checkmate-{digest.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(target)
    except OSError as error:
        raise PluginError(
            f"no access to the compiled plugin ({error}): set XDG_CACHE_HOME to a folder you can write to"
        ) from None
    return target


def _compile(target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise PluginError(f"the NCCL plugin needs a C compiler: {PACKAGES}")
    # Several ranks may compile at once, each into its own file; the rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "plugin.so"
        sources = [str(file) for file in sorted(SOURCES.glob("*.c"))]
        command = [compiler, *_FLAGS, *sources, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            raise PluginError(f"{compiler} refused the NCCL plugin ({words[0]}): {PACKAGES}")
        fresh.replace(target)
