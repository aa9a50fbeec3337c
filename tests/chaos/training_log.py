"""What the ranks of a job have written, over all its starts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.compare import differences
from tests.chaos.oracle import PastStart

_OF_ANY_RANK: Final = ("unresumable", "unrestorable")


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


@dataclass
class AttemptLog:
    """What the ranks have written of one attempt: a start of all ranks, or a recovery in place."""

    resumed: int | None = None
    """Its first iteration, once rank 0 has restored."""
    completed: int | None = None
    """The newest iteration that any rank has completed."""
    at: float = 0.0
    """When that was, or when rank 0 has restored."""


class TrainingLog:
    """The logs of all ranks, and how far training is."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Prepare to read `folder/rank*.jsonl`."""
        self._folder = folder
        self._logs = [RankLog(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
        self._attempts: dict[int, AttemptLog] = {}
        self.newest = -1
        """The newest iteration that rank 0 has completed, ever."""
        self.repeated = 0
        """Iterations that rank 0 has completed again."""
        self.longest = 0.0
        """The longest time in seconds between two iterations of rank 0."""
        self._last_at: float | None = None

    def look(self) -> list[dict[str, Any]]:
        """Read what is new. Return rank 0's lines but its iterations, and from others that they can't resume.

        Rank 0 is read first: what others have completed before it has restored is read, too, then.
        """
        events = []
        for rank, log in enumerate(self._logs):
            for line in log.look():
                if line["event"] == "iteration":
                    self._count(rank, line)
                elif rank == 0 or line["event"] in _OF_ANY_RANK:
                    events.append(line)
                    if line["event"] == "resumed":
                        attempt = self._attempts.setdefault(line["attempt"], AttemptLog())
                        attempt.resumed, attempt.at = int(line["iteration"]), line["at"]
        return events

    def past_start(self, since: int, until: int, clean: Collection[int] = ()) -> PastStart | None:
        """Return the last of the attempts `since` to `until` - 1 that has restored; all but `clean` crashed.

        It ended with its last iteration, or a moment later: a shadow node that fails in between counts as
        one that fails afterwards.
        """
        for number in sorted(self._attempts, reverse=True):
            attempt = self._attempts[number]
            if since <= number < until and attempt.resumed is not None:
                return PastStart(attempt.resumed, attempt.completed, attempt.at, number in clean)
        return None

    @property
    def next_attempt(self) -> int:
        """The number after the last attempt that has restored or trained."""
        return max(self._attempts, default=-1) + 1

    def phase(self, rank: int, process: int | None) -> str:
        """Return the last event of a rank's process."""
        lines = self._logs[rank].lines
        pids = [int(line["pid"]) for line in lines if "pid" in line]
        return str(lines[-1]["event"]) if pids[-1:] == [process] else "starting"

    def _count(self, rank: int, line: Mapping[str, Any]) -> None:
        iteration = int(line["iteration"])
        self.repeated += rank == 0 and iteration <= self.newest
        self.newest = max(self.newest, iteration) if rank == 0 else self.newest
        attempt = self._attempts.setdefault(line["attempt"], AttemptLog())
        attempt.completed = max(iteration, -1 if attempt.completed is None else attempt.completed)
        attempt.at = max(attempt.at, line["at"])
        if rank == 0:
            self.longest = max(self.longest, line["at"] - (self._last_at or line["at"]))
            self._last_at = line["at"]

    def differences(self, *, broadcast: bool) -> list[str]:
        """Return how iterations differ from those of the undisturbed run, in `folder/reference`."""
        problems: list[str] = []
        for rank, log in enumerate(self._logs):
            expected = RankLog(self._folder / "reference" / log.file.name)
            expected.look()
            problems += differences(rank, log.lines, expected.lines, broadcast=broadcast)
        return problems
