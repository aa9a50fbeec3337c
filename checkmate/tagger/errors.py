"""What can go wrong with the tagger."""

from __future__ import annotations


class TaggerError(RuntimeError):
    """The tagger was used in a way that it can't serve."""


class TaggerUnavailable(TaggerError):
    """This machine or process can't tag: what is missing, and what would help."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"the tagger can't run here: {missing}; {remedy}")
        self.missing = missing
        self.remedy = remedy
