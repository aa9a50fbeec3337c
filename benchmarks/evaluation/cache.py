"""Raw data of cells that are measured, a file each."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.evaluation.cells import Cell
from benchmarks.report import machine


class Cache:
    """A folder of raw data. A file is complete: it gets its name last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, cell: Cell) -> bool:
        return self._file(cell).exists()

    def put(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep what was measured, with the commit, the day and the machine."""
        said = {
            "commit": _commit(),
            "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            **found,
        }
        temporary = self._folder / ".unfinished"
        temporary.write_text(json.dumps(said))
        temporary.replace(self._file(cell))

    def cells(self, wanted: Iterable[Cell]) -> dict[Cell, dict[str, Any]]:
        """Return the raw data of those that are there."""
        return {cell: json.loads(self._file(cell).read_text()) for cell in wanted if cell in self}

    def _file(self, cell: Cell) -> Path:
        return self._folder / f"{cell.key}.json"


def _commit() -> str:
    """Return the commit that is measured, with + if the tree differs from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "unknown"
