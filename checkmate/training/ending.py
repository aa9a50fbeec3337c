"""The end of a script's protection: whether the script ends well, and what is said about it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from checkmate.events.kinds import TRAINER_ENDED
from checkmate.events.process_log import say


def ends_well(error: BaseException | None) -> bool:
    """Return whether a script that ends with this error, if any, ends regularly; `sys.exit(0)` does."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


@contextmanager
def said_end(
    newest: Callable[[], int], broken: BaseException | None, *, completed: Callable[[], bool], well: bool
) -> Iterator[None]:
    """Say, once the protection is closed, how far this rank has come, and why it ends.

    Args:
        newest: Returns the last iteration whose record was sent.
        broken: The error of the ring, if there is one.
        completed: Returns whether training is complete.
        well: Whether the script ends without an error.
    """
    error = broken if well else broken or sys.exc_info()[1] or getattr(sys, "last_value", None)
    try:
        yield
    except Exception as failure:
        error = error or failure
        raise
    finally:
        complete = completed() and error is None
        why = "" if complete or error is None else f"{type(error).__name__}: {error}"
        event = TRAINER_ENDED(iteration=newest(), completed=complete, why=why)
        say(logging.DEBUG, event, "training ends on this rank")
