"""Doubt about a hold: since when, whether to reseed it, and when it is trusted again. Pure."""

from __future__ import annotations

RENEW_SECONDS = (60.0, 3600.0)
"""First and longest interval between reseeds of a hold that stays doubtful; it doubles each time."""


class Doubt:
    """Whether a hold may differ from the trainers. While `active`, its state is not offered."""

    def __init__(self) -> None:
        self.active = False
        self._first = self._last = 0
        self.past: list[range] = []
        """Iterations whose saved state stays doubtful and must not be used."""
        self._renewed = self._patience = 0.0

    def found(self, iteration: int, equal: int) -> None:
        """Record a difference after an iteration. All was last found equal after `equal`."""
        first = equal + 1
        self._first = min(first, self._first) if self.active else first
        self.active, self._last = True, iteration

    def stood(self, iteration: int) -> None:
        """Record that the state up to an iteration was discarded; if in doubt, it stays doubtful."""
        if self.active:
            self._last = max(self._last, iteration)

    def continue_from(self, earlier: Doubt) -> None:
        """Keep in mind what was doubtful in the same state before a restart."""
        self.past = earlier.past

    def covers(self, iteration: int) -> bool:
        """Return whether saved state of an iteration may be wrong."""
        return self.active or any(iteration in doubtful for doubtful in self.past)

    def over(self) -> str:
        """End the doubt. Return what to report, or an empty text if there was no doubt."""
        if not self.active:
            return ""
        self.active = False
        self.past.append(range(self._first, self._last + 1))
        return f"checkpoints of iterations {self._first} to {self._last} are doubtful, newer ones are not"

    def may_renew(self, now: float) -> bool:
        """Return whether to reseed the hold: less and less often if that does not help."""
        if self._patience and now - self._renewed < self._patience:
            return False
        least, most = RENEW_SECONDS
        self._renewed, self._patience = now, min(max(2 * self._patience, least), most)
        return True
