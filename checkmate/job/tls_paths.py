"""Where a fabric's TLS files are. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def resolve_tls(fabric: Any, folder: Path) -> None:
    """Resolve the names of a fabric's TLS files against the folder of its file, in place."""
    switches = fabric.get("switches") if isinstance(fabric, dict) else None
    for switch in switches if isinstance(switches, list) else []:
        tls = switch.get("tls") if isinstance(switch, dict) else None
        if isinstance(tls, dict):
            tls.update({key: str(folder / value) for key, value in tls.items() if isinstance(value, str)})
