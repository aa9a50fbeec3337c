"""Repair of a stream: which bytes to ask of the rank that has sent them, and when. Pure.

The kernel delivers nothing behind a lost frame, so the stream stands there. Once its record shows that more
was sent, the rank is asked for some bytes from there on. It sends them again, on a connection of the same
addresses, and the kernel delivers them with what it has behind them. How much is lost, nobody sees: one frame
at first, and twice as much each time that the stream stands again before it has reached its recorded end.

Until the rank's digest of what it has sent again was found equal, the bytes from there on do not count.
"""

from __future__ import annotations

from typing import Final

from checkmate.base.wording import counted
from checkmate.wire.repair import COMPARED_BYTES, MAX_BYTES, RepairRequest

FIRST_BYTES: Final = 64 << 10
"""Bytes of the first request: the longest segment of a host that leaves segmentation to its NIC."""
STANDS_SECONDS: Final = 0.05
"""A stream that stands below its recorded end for this time has lost something: copies precede records."""
NEXT_STANDS_SECONDS: Final = 0.003
"""The same after a repair in the same iteration: what is behind a hole was there before."""
PAUSE_SECONDS: Final = (0.1, 1.0)
"""Until a request without effect is repeated, at first and at most: request and repair may be lost, too."""


class StreamRepair:
    """The repair of one stream."""

    def __init__(self, requested: int = 0, count: int = 0) -> None:
        self.requested = requested
        """Bytes asked for so far."""
        self.count = count
        """Repairs that have been confirmed."""
        self._request: RepairRequest | None = None
        self._opened_at = self._asked_at = self._pause = 0.0
        self._size = FIRST_BYTES
        self._iteration = -1  # the first byte of that of the last request
        self._fault = ""

    def renewed(self) -> StreamRepair:
        """Return a repair that asks for nothing yet, with the same counts."""
        return StreamRepair(self.requested, self.count)

    @property
    def is_open(self) -> bool:
        """Whether bytes were asked for that are not confirmed yet."""
        return self._request is not None

    @property
    def repeats(self) -> bool:
        """Whether the stream has stood before since it was last at its recorded end."""
        return self._size > FIRST_BYTES

    def checked(self, position: int) -> int:
        """Return the byte up to which a stream at `position` counts."""
        return position if self._request is None else min(position, self._request.start)

    def request(
        self, position: int, end: int, stands: float, now: float, nbytes: int
    ) -> RepairRequest | None:
        """Return what to ask now, if anything.

        Args:
            position: The stream's next byte.
            end: Its recorded end.
            stands: Seconds for which it has not moved below that.
            now: The time.
            nbytes: Bytes of an iteration. Only those of the iteration at `position` are asked for: what
                precedes them may have left the buckets, and for what follows there may be no room, so that it
                would never be confirmed.
        """
        begin = position - position % max(nbytes, 1)
        within = range(begin, begin + max(nbytes, 1))
        if self._request is None:
            if position >= end:
                self._size = FIRST_BYTES
                return None
            if stands < (NEXT_STANDS_SECONDS if self.repeats else STANDS_SECONDS):
                return None
            if within.start != self._iteration:
                self._size, self._iteration = FIRST_BYTES, within.start
                if stands < STANDS_SECONDS:
                    return None
            self._opened_at = now
            start = max(within.start, position - COMPARED_BYTES)
            stop = min(within.stop, end, position + self._size)
            return self._ask(start, position, stop, now, PAUSE_SECONDS[0])
        if now - self._asked_at < self._pause:
            return None
        start, _, stop = self._request
        pause = min(2 * self._pause, PAUSE_SECONDS[1])
        return self._ask(start, min(max(start, position), stop), stop, now, pause)

    def awaits(self, start: int, stop: int, position: int) -> bool:
        """Return whether a digest of bytes [start, stop) is that of the open request, and they are there."""
        request = self._request
        return request is not None and (request.start, request.stop) == (start, stop) and position >= stop

    def note(self, start: int, stop: int, position: int, *, is_equal: bool) -> None:
        """Note whether bytes [start, stop) are as they were sent, if they are those of the open request."""
        if not self.awaits(start, stop, position):
            return
        if not is_equal:
            self._fault = "what its rank has sent again differs from what has come"
            return
        self._request = None
        self.count += 1
        self._size = min(2 * self._size, MAX_BYTES)

    def fault(self, now: float, patience: float) -> str:
        """Return why the repair has failed, if it has: at the latest after `patience` seconds."""
        if not self._fault and self._request is not None and now - self._opened_at > patience:
            missing = self._request.stop - self._request.start
            return f"{counted(missing, 'byte was', 'bytes were')} asked for again, and not repaired"
        return self._fault

    def _ask(self, start: int, missing: int, stop: int, now: float, pause: float) -> RepairRequest:
        self._request = RepairRequest(start, missing, stop)
        self._asked_at, self._pause = now, pause
        self.requested += stop - missing
        return self._request
