"""What has happened in a case, from what its ranks have written. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Digests = Mapping[str, str]
"""The digest of each part of a rank's state at the end of a turn."""


@dataclass(frozen=True)
class Attempt:
    """One start of both ranks.

    Attributes:
        outcome: ended, killed (by plan), refused (a CheckmateError), failed, hung or died (otherwise).
        why: The first error.
        events: What both ranks have written, in order of time.
        output: What they have printed.
    """

    outcome: str
    why: str
    events: tuple[Mapping[str, Any], ...]
    output: str = ""

    @classmethod
    def of(
        cls, events: Sequence[Mapping[str, Any]], output: str, codes: Sequence[int | None], *, hung: bool
    ) -> Attempt:
        """Return the attempt with these events and exit statuses: its first end explains the others."""
        ordered = tuple(sorted(events, key=lambda event: float(event["time"])))
        ends = [event for event in ordered if event["event"] in ("killed", "failed")]
        if hung:
            return cls("hung", "a rank does not end", ordered, output)
        if not ends:
            if all(code == 0 for code in codes):
                return cls("ended", "", ordered, output)
            if refusal := _refusal_at_exit(ordered):
                return cls("refused", refusal, ordered, output)
            return cls("died", _statuses(codes), ordered, output)
        first = next((end for end in ends if not _follows(end)), ends[0])
        if first["event"] == "killed":
            return cls("killed", f"turn {first['turn']}", ordered, output)
        outcome = "refused" if first["kind"] == "CheckmateError" else "failed"
        return cls(outcome, str(first["error"]), ordered, output)

    @property
    def resumed(self) -> int | None:
        """The turn with which it resumed."""
        return next((int(event["turn"]) for event in self.events if event["event"] == "resumed"), None)

    @property
    def warnings(self) -> list[str]:
        """What Checkmate has warned of."""
        levels = ("WARNING", "ERROR", "CRITICAL")
        return [
            str(event["text"])
            for event in self.events
            if event["event"] == "logged" and event["level"] in levels
        ]

    @property
    def reached(self) -> int:
        """The last turn that rank 0 has ended, in this attempt or before it; -1 if there is none."""
        return max([(self.resumed or 0) - 1, *self.turns(0)])

    def turns(self, rank: int) -> dict[int, Digests]:
        """Return the digests of the turns that a rank has ended."""
        return {
            int(event["turn"]): event["digests"]
            for event in self.events
            if event["event"] == "turn" and event["rank"] == rank
        }


@dataclass(frozen=True)
class History:
    """The undisturbed run of a plain script, and the attempts of the protected one."""

    plain: Attempt
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        """The last attempt."""
        return self.attempts[-1]


def _refusal_at_exit(events: Sequence[Mapping[str, Any]]) -> str:
    """Return why a protection has failed as the interpreter ended, when nothing can catch the error."""
    errors = (str(event["text"]) for event in events if event.get("level") == "ERROR")
    return next((text for text in errors if re.match(r"\w+Error: ", text)), "")


def _follows(end: Mapping[str, Any]) -> bool:
    """Return whether an error only says that the other rank has ended."""
    if end["event"] != "failed":
        return False
    text = str(end["error"])
    return end["kind"] == "RingError" or any(
        words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )


def _statuses(codes: Sequence[int | None]) -> str:
    names = [signal.Signals(-code).name if code and code < 0 else f"status {code}" for code in codes]
    return f"the ranks ended with {' and '.join(names)}"
