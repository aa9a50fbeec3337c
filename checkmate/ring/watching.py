"""Notices that the next rank of a ring has ended, also while nothing is sent to it or received from it.

A rank that waits for a live one reads no other connection, so it would not see that a third rank has gone.
Data goes one way on a ring's connections. The way back has one byte, of a rank that closes without an error.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

from checkmate.ring.connections import Ring
from checkmate.ring.place import RingError

_FAREWELL: Final = b"\x02"
_GRACE: Final = 0.5
"""Seconds in which what the next rank has sent before its end can still complete an iteration."""


class NextWatch:
    """Watches the next rank from its own thread until `close`."""

    def __init__(self, ring: Ring, on_ended: Callable[[RingError], None]) -> None:
        """Start. `on_ended` is called at most once, by the thread."""
        self._ring, self._on_ended = ring, on_ended
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="ring watch", daemon=True)
        self._thread.start()

    def close(self, *, well: bool) -> None:
        """End the thread. If all is `well`, the previous rank will not take this one's end for an error."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the connection is broken already
            if well:
                self._ring.receivers[0].send(_FAREWELL)
        with contextlib.suppress(OSError):
            self._ring.senders[0].socket.shutdown(socket.SHUT_RD)
        self._thread.join()

    def _wait(self) -> None:
        try:
            farewell = self._ring.senders[0].socket.recv(1)
        except OSError:
            farewell = b""
        if farewell == _FAREWELL or self._closed.wait(_GRACE):
            return
        place = self._ring.place
        peer = place.name((place.rank + 1) % place.ranks)
        self._on_ended(
            RingError(f"{place.own_name}: {peer}, on the same host, has ended, or has lost another rank")
        )
