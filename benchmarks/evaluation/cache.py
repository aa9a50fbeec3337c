"""Raw data of the cells that are measured: a file with a line of JSON for each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.evaluation.cells import Cell, Extent
from benchmarks.evaluation.record import Record, read


class Cache:
    """A file of records, to which cells are added."""

    def __init__(self, file: Path, extent: Extent) -> None:
        """Read it; it may be missing. A line that is not complete is left out, and removed by `put`.

        Cells of another extent were measured for another time, and do not count.
        """
        self._file, self._extent = file, extent
        self._lines: dict[str, str] = {}
        text = file.read_text() if file.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            key, record = json.loads(line)
            self._lines[key] = json.dumps(record, separators=(",", ":"))

    def __contains__(self, cell: Cell) -> bool:
        return self._key(cell) in self._lines

    def put(self, cell: Cell, record: Record) -> None:
        """Keep what was measured."""
        self._lines[self._key(cell)] = record.to_json()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f".{self._file.name}")
        with temporary.open("w") as out:
            for key in sorted(self._lines):
                out.write(f"[{json.dumps(key)},{self._lines[key]}]\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._file)

    def records(self, wanted: Iterable[Cell]) -> dict[Cell, Record]:
        """Return those that are there."""
        return {cell: read(self._lines[self._key(cell)]) for cell in wanted if cell in self}

    def _key(self, cell: Cell) -> str:
        return f"{self._extent.name}/{cell.key}"
