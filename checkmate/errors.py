"""The base of the errors that `checkmate`'s functions raise on purpose."""

from __future__ import annotations


class CheckmateError(Exception):
    """Something is wrong that the message explains, with a remedy."""
