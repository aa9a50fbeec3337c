"""Bounds of the log: what strangers send cannot fill it."""

from __future__ import annotations

import logging
import threading
import time

from checkmate.base.rates import RateLimits
from checkmate.base.wording import printable

MAX_LINE = 300
"""Characters of a message, without those of a traceback."""
MAX_TRACEBACK = 4000
AT_ONCE = 10
"""Lines of one module that may come at once; then there is one a second."""


class LineLimit(logging.Filter):
    """Shortens messages, and leaves out those of a module that come too fast; a later one has the count."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._rates = RateLimits[str](1, AT_ONCE)  # of each module
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record, which is shortened."""
        with self._lock:
            if not self._rates.admits(record.name, time.monotonic()):
                self._left_out[record.name] = self._left_out.get(record.name, 0) + 1
                return False
            left_out = self._left_out.pop(record.name, 0)
        text = record.getMessage()
        more = f" (and {left_out} more since the last such line)" if left_out else ""
        record.msg, record.args = printable(text.replace("\n", " ")[:MAX_LINE])[:MAX_LINE] + more, ()
        if record.exc_info:
            lines = logging.Formatter().formatException(record.exc_info)[-MAX_TRACEBACK:].split("\n")
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True
