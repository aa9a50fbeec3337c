"""Raw data of the cells that are measured: a file with a line of JSON for each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from benchmarks.evaluation.cells import Cell, MeasuredExtent, matrix
from benchmarks.evaluation.record import CONDITIONS, Record


class Unusable(Exception):
    """The evaluation cannot begin or go on; the message has the reason."""


class Cache:
    """A file of records, to which cells are added."""

    def __init__(self, file: Path, extent: MeasuredExtent) -> None:
        """Read it; it may be missing. A last line that is not complete is left out, and removed by `put`.

        Cells of another extent were measured for another time, and do not count.

        Raises:
            Unusable: Another line is not a record.
        """
        self._file, self._extent = file, extent
        self._records: dict[str, Record] = {}
        text = file.read_text() if file.exists() else ""
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
            try:
                self._records.update([_LINE.validate_json(line)])
            except ValueError as error:
                raise Unusable(f"{file}, line {number} is not a cell's record: {error}") from None

    def require_same(self, cells: Iterable[Cell], record: Record) -> None:
        """Raise `Unusable` unless all cells of a round were measured alike: by a commit, on a machine.

        Systems are compared within a round, so that other rounds may be of another commit or machine.

        Args:
            cells: The cells that are to be measured as `record` is.
            record: The conditions that must be the same.
        """
        rounds = {cell.round for cell in cells}
        for cell in (cell for cell in matrix(self._extent) if cell in self and cell.round in rounds):
            for condition in CONDITIONS:
                old, new = getattr(self._records[self._key(cell)], condition), getattr(record, condition)
                if old != new:
                    raise Unusable(
                        f"{self._file} has cells of another {condition.replace('_', ' ')}: {cell.key} is of "
                        f"{old}, this is {new}; remove that start's lines, or measure with --raw in "
                        "another file"
                    )

    def __contains__(self, cell: Cell) -> bool:
        return self._key(cell) in self._records

    def put(self, cell: Cell, record: Record) -> None:
        """Keep what was measured."""
        self._records[self._key(cell)] = record
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f".{self._file.name}")
        with temporary.open("w") as out:
            for key in sorted(self._records):
                out.write(f"[{json.dumps(key)},{self._records[key].to_json()}]\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._file)

    def records(self, cells: Iterable[Cell]) -> dict[Cell, Record]:
        """Return those that are there."""
        return {cell: self._records[self._key(cell)] for cell in cells if cell in self}

    def _key(self, cell: Cell) -> str:
        return f"{self._extent.name}/{cell.key}"


_LINE: Final = TypeAdapter(tuple[str, Record])
