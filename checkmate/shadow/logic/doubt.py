"""A hold in doubt: since when, whether it is seeded anew, and when it is trusted again. Pure."""

from __future__ import annotations

RENEW_SECONDS = (60.0, 3600.0)
"""A hold that turns doubtful is seeded anew at once; again after so long, and twice as long each time."""


class Doubt:
    """Whether a hold has what the trainers have. `active`: it may not; nothing of it is offered."""

    def __init__(self) -> None:
        self.active = False
        self._first = self._last = 0
        self.past: list[range] = []
        """Iterations that were in doubt, and stay so: what was kept of them is not to be used."""
        self._renewed = self._patience = 0.0

    def found(self, iteration: int, equal: int) -> None:
        """Comparing has found something wrong after an iteration; all was last found right after `equal`."""
        first = equal + 1
        self._first = min(first, self._first) if self.active else first
        self.active, self._last = True, iteration

    def stood(self, iteration: int) -> None:
        """What was stepped up to an iteration is given up: if it was in doubt, then as far as that."""
        if self.active:
            self._last = max(self._last, iteration)

    def covers(self, iteration: int) -> bool:
        """Return whether what is kept of an iteration may be wrong."""
        return self.active or any(iteration in doubtful for doubtful in self.past)

    def over(self) -> str:
        """Nothing is suspect any more. Return what to remember, or an empty text if it was not in doubt."""
        if not self.active:
            return ""
        self.active = False
        self.past.append(range(self._first, self._last + 1))
        return f"checkpoints of iterations {self._first} to {self._last} are doubtful, newer ones are not"

    def may_renew(self, now: float) -> bool:
        """Return whether to seed the hold anew: less and less often if that doesn't help."""
        if self._patience and now - self._renewed < self._patience:
            return False
        least, most = RENEW_SECONDS
        self._renewed, self._patience = now, min(max(2 * self._patience, least), most)
        return True
