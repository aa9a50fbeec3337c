"""Log lines of long-running commands."""

from __future__ import annotations

import logging
from typing import Final

from rich.logging import RichHandler

from checkmate.cli.common import err

TIME: Final = "%Y-%m-%d %H:%M:%S"
"""Local time, as in the switch's own log."""


def log_to_stderr() -> None:
    """Log to standard error, each line with its time so that logs of several machines can be merged."""
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", TIME))
    if err.is_terminal:
        handler = RichHandler(
            console=err, show_path=False, show_level=False, log_time_format=TIME, omit_repeated_times=False
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
