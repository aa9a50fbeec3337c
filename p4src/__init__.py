"""Paths of the compiled data plane."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent
PIPE = "pipe"
"""The Tofino program's one pipeline."""
_TABLE: Final = re.compile(r'^tables {.*?^    alias: "(.*?)".*?^  size: (\d+)', re.MULTILINE | re.DOTALL)


def artifacts(target: str = "bmv2") -> Path:
    """Return the folder with the compiler's output for `target`; the embedded target runs BMv2's."""
    return ROOT / "build" / ("bmv2" if target == "softswitch" else target)


def table_sizes(target: str) -> dict[str, int]:
    """Return the size of each table of the program for `target`, in entries, by its P4Info.

    If a Tofino's is missing, v1model's is used: both have the same tables, of the sizes in `types.p4`.
    """
    v1model = artifacts() / "checkmate_v1model.p4info.txtpb"
    p4info = next(artifacts(target).glob("checkmate_*.p4info.txtpb"), v1model)
    return {name: int(size) for name, size in _TABLE.findall(p4info.read_text())}


def sde_install() -> Path:
    """Return the SDE's installation, for a Tofino's compiled program; `out/sde` without `SDE_INSTALL`."""
    installed = os.environ.get("SDE_INSTALL")
    return Path(installed) if installed else ROOT.parent / "out" / "sde"
