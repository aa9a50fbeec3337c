"""Completion of arguments by a shell: job files, labs, topologies, targets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from checkmate.job.following import SUFFIXES

_PLAIN: Final = re.compile(r"[\w./+@%-]+")
"""Names that no shell has to quote. For others, shells fall back on completion of their own."""


def job_paths(incomplete: str) -> list[str]:
    """Return YAML files and folders whose path begins with a text. The only folder is opened."""
    paths = [path for path in _paths(incomplete) if _PLAIN.fullmatch(path)]
    if len(paths) == 1 and paths[0].endswith("/") and paths[0] != incomplete:
        return [paths[0], *job_paths(paths[0])]
    return paths


def _paths(incomplete: str) -> Iterator[str]:
    begin, slash, name = incomplete.rpartition("/")
    folder = Path(f"{begin}{slash}" or ".")
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # a shell has nowhere to show an error
    for entry in entries:
        if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
            continue
        if entry.is_dir():
            yield f"{begin}{slash}{entry.name}/"
        elif entry.name.endswith(SUFFIXES):
            yield f"{begin}{slash}{entry.name}"


def lab_names() -> list[str]:
    """Return the labs of this machine."""
    from topologies import state  # noqa: PLC0415 - only completion needs it

    return state.existing()


def topology_names(incomplete: str) -> list[str]:
    """Return the topologies that come with Checkmate, and paths of other ones."""
    from topologies.describe import topology  # noqa: PLC0415 - only completion needs it

    return [*topology.names(), *job_paths(incomplete)]


def target_names() -> list[str]:
    """Return the kinds of switch that a lab may have."""
    from topologies.describe.job_files import TARGETS  # noqa: PLC0415 - only completion needs it

    return list(TARGETS)
