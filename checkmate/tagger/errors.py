"""Errors of the tagger."""

from __future__ import annotations

from checkmate.errors import CheckmateError


class TaggerError(CheckmateError, RuntimeError):
    """The tagger was used incorrectly."""


class TaggerUnavailable(TaggerError):
    """This machine or process can't tag. `missing` is the reason, `remedy` a suggestion."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"the tagger can't run here: {missing}; {remedy}")
        self.missing = missing
        self.remedy = remedy
