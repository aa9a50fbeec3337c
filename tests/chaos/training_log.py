"""What the ranks of a job have written, over all its starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.compare import differences


@dataclass
class RankLog:
    """A rank's log, read as it grows."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def look(self) -> list[dict[str, Any]]:
        """Return the new complete lines."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.lines += new
        return new


class TrainingLog:
    """The logs of all ranks, and how far training is."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Prepare to read `folder/rank*.jsonl`."""
        self._folder = folder
        self._logs = [RankLog(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
        self.newest = -1
        """The newest iteration that rank 0 has completed, ever."""
        self.repeated = 0
        """Iterations that rank 0 has completed again."""
        self.resumed: int | None = None
        """The first iteration of this start."""
        self.completed: int | None = None
        """The newest iteration that any rank has completed in this start."""

    def begin(self) -> None:
        """Forget the start before."""
        self.resumed = self.completed = None

    def look(self, attempt: int) -> Iterator[str]:
        """Read what is new of a start. Yield an `error` of any rank, and rank 0's other events."""
        for rank, log in enumerate(self._logs):
            for line in log.look():
                if line["attempt"] != attempt:
                    continue
                if line["event"] == "iteration":
                    self._count(rank, int(line["iteration"]))
                elif rank == 0 or line["event"] == "error":
                    if line["event"] == "resumed":
                        self.resumed = int(line["iteration"])
                    yield line["event"]

    def _count(self, rank: int, iteration: int) -> None:
        self.repeated += rank == 0 and iteration <= self.newest
        self.newest = max(self.newest, iteration) if rank == 0 else self.newest
        self.completed = max(iteration, -1 if self.completed is None else self.completed)

    def differences(self, *, broadcast: bool) -> list[str]:
        """Return how iterations differ from those of the undisturbed run, in `folder/reference`."""
        problems: list[str] = []
        for rank, log in enumerate(self._logs):
            expected = RankLog(self._folder / "reference" / log.file.name)
            expected.look()
            problems += differences(rank, log.lines, expected.lines, broadcast=broadcast)
        return problems
