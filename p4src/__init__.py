"""Paths of the compiled data plane."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PIPE = "pipe"
"""The Tofino program's one pipeline."""


def artifacts(target: str = "bmv2") -> Path:
    """Return the folder with the compiler's output for `target`; the embedded target runs BMv2's."""
    return ROOT / "build" / ("bmv2" if target == "softswitch" else target)


def sde_install() -> Path:
    """Return the SDE's installation, for a Tofino's compiled program; `out/sde` without `SDE_INSTALL`."""
    installed = os.environ.get("SDE_INSTALL")
    return Path(installed) if installed else ROOT.parent / "out" / "sde"
