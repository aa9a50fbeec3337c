"""Compiles the NCCL plugin into a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from checkmate.base.cache import CompilerRefused, c_compiler, compiled

SOURCES: Final = Path(__file__).with_name("plugin")
SONAME: Final = "libnccl-net-checkmate.so"
"""The name under which NCCL finds the plugin once the process has loaded it."""
PACKAGES: Final = "apt-get install gcc libc6-dev linux-libc-dev"
"""Debian's names of the packages that the compilation needs."""
_FLAGS: Final = (
    *("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}"),
    # NCCL 2.26 closes a library once too often, which would unload it while it is used.
    "-Wl,-z,nodelete",
)
_TAGGER_HEADER: Final = SOURCES.parent.parent / "tagger" / "tagger.h"


class PluginError(RuntimeError):
    """The NCCL plugin can't be built or loaded; the message has the reason and the remedy."""

    exit_code = 1


def shared_object(cache: Path | None = None) -> Path:
    """Return the path of the plugin. Compile it unless it is in the cache.

    The cache is `$XDG_CACHE_HOME/checkmate` by default, or `~/.cache/checkmate`, if it is this user's own.

    Raises:
        PluginError: A C compiler or a header is missing, or the cache can't be written.
    """
    files = [*sorted(SOURCES.glob("*.[ch]")), _TAGGER_HEADER]
    try:
        return compiled(SONAME, files, _FLAGS, _command, cache)
    except CompilerRefused as error:
        raise PluginError(f"the C compiler refused the NCCL plugin ({error}): {PACKAGES}") from None
    except OSError as error:
        remedy = "choose another folder" if cache else "set XDG_CACHE_HOME to a folder you can write to"
        raise PluginError(f"no access to the compiled plugin ({error}): {remedy}") from None


def _command() -> list[str]:
    compiler = c_compiler()
    if compiler is None:
        raise PluginError(f"the NCCL plugin needs a C compiler: {PACKAGES}")
    return [compiler, *_FLAGS, *map(str, sorted(SOURCES.glob("*.c")))]
