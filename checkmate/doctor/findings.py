"""Findings of checks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """The role works, but slower, or not for ever, or something could not be seen."""
    FAILED = "failed"
    """The role does not work."""
    SKIPPED = "not applicable"


@dataclass(frozen=True)
class Finding:
    """The finding of a check, and its remedy, as parts of sentences that fit any line."""

    check: str
    outcome: Outcome
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.detail}{self.remedy and '; '}{self.remedy}"

    @property
    def is_bad(self) -> bool:
        """True if there is something to do."""
        return self.outcome in (Outcome.WARNING, Outcome.FAILED)


def ok(check: str, detail: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, Outcome.OK, detail)


def skipped(check: str, detail: str) -> Finding:
    """Return that a check does not concern this host, or why it was not made."""
    return Finding(check, Outcome.SKIPPED, detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    """Return what does not keep the role from working."""
    return Finding(check, Outcome.WARNING, detail, remedy)


def failed(check: str, detail: str, remedy: str) -> Finding:
    """Return what keeps the role from working."""
    return Finding(check, Outcome.FAILED, detail, remedy)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Return whether something keeps the role from working."""
    return any(finding.outcome is Outcome.FAILED for finding in findings)


def finding_from_error(check: str, message: str, remedy: str) -> Finding:
    """Return the failure that an error's message tells.

    Messages have their remedy after a semicolon, or a colon and "run". `remedy` stands in for it.
    """
    detail, *remedies = re.split(r"; |: (?=run )", message, maxsplit=1)
    return failed(check, detail, *(remedies or [remedy]))
