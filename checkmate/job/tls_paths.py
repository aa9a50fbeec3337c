"""Where the files are that a job file or a fabric file names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def beside(folder: Path, name: str) -> Path:
    """Return the path of a name in a file of that folder: without `..`, unless links give it a meaning."""
    path = folder / name
    if "\0" in name:  # refused later
        return path
    tidy = Path(os.path.normpath(path))
    return tidy if ".." in path.parts and os.path.realpath(tidy) == os.path.realpath(path) else path


def resolve_tls(fabric: Any, folder: Path) -> None:
    """Resolve the names of a fabric's TLS files against the folder of its file, in place."""
    switches = fabric.get("switches") if isinstance(fabric, dict) else None
    for switch in switches if isinstance(switches, list) else []:
        tls = switch.get("tls") if isinstance(switch, dict) else None
        if isinstance(tls, dict):
            tls.update(
                {key: str(beside(folder, value)) for key, value in tls.items() if isinstance(value, str)}
            )
