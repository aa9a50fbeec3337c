"""Faults of a YAML file, by their path in it."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Fault:
    """One fault: its path in the YAML, and a message with a correction."""

    path: Path
    message: str


def show_path(path: Path) -> str:
    """Return a path as text, such as `dp_groups[0].ranks[1].ip`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(top level)"
