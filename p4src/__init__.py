"""Where the compiled data plane lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent


def artifacts(target: str = "bmv2") -> Path:
    """The folder with the compiler's output for `target`; the embedded target runs BMv2's."""
    return ROOT / "build" / ("bmv2" if target == "softswitch" else target)
