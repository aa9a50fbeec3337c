"""Decides whether a rank that has ended is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from checkmate.base.wording import signal_name
from checkmate.launch.word import Word

MAX_UNMET: Final = 3
"""Processes in a row of one rank that may end before they have met the others."""
MAX_UNTRAINED: Final = 6
"""The same, before they have trained an iteration."""


@dataclass
class RankHistory:
    """What is known of a rank's processes."""

    restarts: int = 0
    has_met: bool = False
    """Whether the present process has met the other ranks."""
    is_done: bool = False
    """Whether all ranks are done with training."""
    is_final: bool = False
    """Whether it has said that no process in its place could go on."""
    has_trained: bool = False
    """Whether it has trained an iteration."""
    unmet: int = 0
    """Processes in a row that have ended without having met the others."""
    untrained: int = 0
    """Processes in a row that have ended without having trained."""
    heard_at: float | None = None
    """When it was heard last, if it was."""


@dataclass
class Restarts:
    """All ranks of a host."""

    most: int
    """Restarts of each rank."""
    patience: float
    """Seconds that a rank may be silent, once it was heard."""
    ranks: dict[int, RankHistory] = field(default_factory=dict)

    def hear(self, rank: int, word: str, now: float) -> None:
        """Take a word from a rank."""
        history = self.ranks.setdefault(rank, RankHistory())
        history.heard_at = None if word == Word.END else now
        history.has_met |= word == Word.MET
        history.has_trained |= word == Word.TRAINED
        history.is_done |= word == Word.CONCLUDED
        history.is_final |= word == Word.FINAL

    def is_done(self, rank: int) -> bool:
        """Return whether a rank has said that all ranks are done with training."""
        return rank in self.ranks and self.ranks[rank].is_done

    def silent(self, now: float) -> list[int]:
        """Return ranks that were heard before, and not for longer than the patience lasts."""
        return [
            rank
            for rank, history in self.ranks.items()
            if history.heard_at is not None and now - history.heard_at > self.patience
        ]

    def end(self, rank: int, status: int) -> str:
        """Note that a rank's process has ended; return why it is not started again, or "".

        `status`: as `subprocess.Popen.returncode` has it: a signal is negative.
        """
        history = self.ranks.setdefault(rank, RankHistory())
        history.unmet = 0 if history.has_met else history.unmet + 1
        history.untrained = 0 if history.has_trained else history.untrained + 1
        history.heard_at, history.has_met, history.has_trained = None, False, False
        how = exit_words(status)
        if history.is_final:
            return f"rank {rank} {how}, and can't go on: see its error above"
        if history.unmet >= MAX_UNMET:
            return f"rank {rank} {how}, as {MAX_UNMET} in a row did before they had met the other ranks"
        if history.untrained >= MAX_UNTRAINED:
            return f"rank {rank} {how}, as {MAX_UNTRAINED} in a row did before they had trained an iteration"
        if history.restarts >= self.most:
            return f"rank {rank} {how}, and was started again {self.most} times already (--max-restarts)"
        history.restarts += 1
        return ""


def exit_words(status: int) -> str:
    """Return how a process has ended, in words that follow its name."""
    if status >= 0:
        return f"has ended with status {status}"
    return f"was killed by {signal_name(-status)}"
