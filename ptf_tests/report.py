"""Results of the tests: as data, and as a report with a line per suite and all failures."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}


@dataclass
class SuiteRow:
    """The result of a test: `passed`, `failed` or `skipped`, and the reason."""

    suite: str
    test: str
    says: str
    outcome: str
    seconds: float
    why: str = ""


class Rows(unittest.TestResult):
    """A row for each test of a suite; `ended` is called with each."""

    def __init__(self, suite: str, on_end: Callable[[SuiteRow], None] = lambda _: None) -> None:
        super().__init__()
        self.rows: list[SuiteRow] = []
        self._suite = suite
        self._on_end = on_end
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()
        name = ".".join(test.id().split(".")[-2:])  # class and method
        self.rows.append(SuiteRow(self._suite, name, test.shortDescription() or "", "passed", 0.0))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.rows[-1].seconds = round(time.monotonic() - self._began, 3)
        self._on_end(self.rows[-1])

    def _note(self, outcome: str, why: str) -> None:
        row = self.rows[-1]
        row.outcome = outcome
        row.why = f"{row.why}\n{why}".strip()

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note("failed", str(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        why = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        if isinstance(test, unittest.TestCase):
            self._note("failed", why)
        else:  # such as an error in setUpClass, before any test
            self.rows.append(SuiteRow(self._suite, str(test), "", "failed", 0.0, why.strip()))
            self._on_end(self.rows[-1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note("failed", f"{subtest}: {err[1]}")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note("skipped", reason)


class Teller:
    """The report of running suites: a line each, with all tests that did not pass; with `verbose`, all tests.

    On a terminal, it shows the progress of the current suite.
    """

    def __init__(self, out: Console, err: Console, *, verbose: bool = False) -> None:
        self._out = out
        self._verbose = verbose
        # If both are a terminal, one console has both; otherwise they would overwrite each other.
        self._status = (out if out.is_terminal and not out.quiet else err).status("starting the switch")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the progress until the block ends."""
        with self._status:
            yield

    def suite(self, name: str, tests: unittest.TestSuite) -> list[SuiteRow]:
        """Run a suite; return its rows."""
        total = tests.countTestCases()
        self._status.update(f"{name}: 0 of {total} tests")

        def on_end(row: SuiteRow) -> None:
            self._status.update(f"{name}: {len(result.rows)} of {total} tests")
            if self._verbose:
                self._out.print(_line(row))

        result = Rows(name, on_end)
        tests.run(result)
        self._out.print(suite_line(name, result.rows))
        for row in result.rows:
            if row.outcome != "passed":
                self._out.print(f"{_line(row)}\n{_indent(row.why)}")
        return result.rows

    def end(self, target: str, rows: Sequence[SuiteRow]) -> None:
        """Print the summary."""
        self._out.print(f"{target}: {summary(rows)} in {sum(row.seconds for row in rows):.1f} s")


def suite_line(suite: str, rows: Sequence[SuiteRow]) -> str:
    """Return a suite in one line, in rich's markup: `replication  25 passed, 0 failed  4.1 s`."""
    colour = "red" if any(row.outcome == "failed" for row in rows) else "green"
    seconds = sum(row.seconds for row in rows)
    return f"{suite:<12} [{colour}]{summary(rows)}[/]  {seconds:.1f} s"


def summary(rows: Sequence[SuiteRow]) -> str:
    """Return a summary such as `57 passed, 0 failed`."""
    counts = {o: sum(row.outcome == o for row in rows) for o in ("passed", "failed", "skipped")}
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"


def _line(row: SuiteRow) -> str:
    says = f"{row.says} ({row.test})" if row.says else row.test
    return f"  [{_COLOURS[row.outcome]}]{row.outcome:<7}[/] {row.seconds:5.2f} s  {_plain(says)}"


def _indent(why: str) -> str:
    return "\n".join(f"      {_plain(line)}" for line in why.splitlines())


def _plain(text: str) -> str:
    """Return text without rich markup."""
    return text.replace("[", r"\[")
