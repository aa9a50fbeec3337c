"""`python -m ptf_tests`: run the suites on a target."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import signal
import sys
import time
import unittest
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from ptf_tests import targets
from ptf_tests.namespace import NamespaceError
from ptf_tests.targets import TargetError

SUITES = ("forwarding", "replication", "streams", "stub")


@dataclass
class Row:
    """A test and what became of it: `passed`, `failed` or `skipped`, and why."""

    suite: str
    test: str
    says: str
    outcome: str
    seconds: float
    why: str = ""


class Rows(unittest.TestResult):
    """Collects a row for each test."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()
        suite, name = test.id().split(".", 1)[1].split(".", 1)
        self.rows.append(Row(suite, name, test.shortDescription() or "", "passed", 0.0))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.rows[-1].seconds = round(time.monotonic() - self._began, 3)

    def _note(self, outcome: str, why: str) -> None:
        row = self.rows[-1]
        row.outcome = outcome
        row.why = f"{row.why}\n{why}".strip()

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note("failed", str(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        if not isinstance(test, unittest.TestCase) or not self.rows:  # setUpClass, for one
            self.rows.append(Row("", str(test), "", "failed", 0.0))
        self._note("failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note("failed", f"{subtest}: {err[1]}")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note("skipped", reason)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 some failed, 2 the tests couldn't be run."""
    options = _parser().parse_args(arguments)
    logging.getLogger("scapy").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        targets.command(options.target)
        rows = run(options.target, options.suite or SUITES)
    except (TargetError, NamespaceError) as error:
        print(f"ptf_tests: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ptf_tests: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps({"target": options.target, "tests": [asdict(row) for row in rows]}, indent=1))
    else:
        _show(options.target, rows)
    return 1 if any(row.outcome == "failed" for row in rows) else 0


def run(target: str, suites: tuple[str, ...] | list[str]) -> list[Row]:
    """Run suites in a network namespace of this process's own, which it enters for good."""
    # Imported late: nobody should wait for them to read --help; and PTF greets on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        from ptf_tests.base import SwitchTest  # noqa: PLC0415
        from ptf_tests.lab import Lab  # noqa: PLC0415

    lab = Lab(target)
    try:
        SwitchTest.lab, SwitchTest.switch = lab, lab.start()
        rows = Rows()
        loader = unittest.defaultTestLoader
        for suite in suites:
            loader.loadTestsFromModule(importlib.import_module(f"ptf_tests.{suite}")).run(rows)
        return rows.rows
    finally:
        lab.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptf_tests",
        description="Packet tests of the P4 program on a target, in a network namespace of their own.",
        epilog="example: python -m ptf_tests --target bmv2 --suite streams",
    )
    parser.add_argument("--target", choices=targets.TARGETS, default="softswitch", help="default: softswitch")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="only this one; may be given more than once"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON instead of a table")
    return parser


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _show(target: str, rows: list[Row]) -> None:
    console = Console(highlight=False)
    table = Table("suite", "test", "result", "s", title=f"packet tests on {target}")
    colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for row in rows:
        colour = colours[row.outcome]
        table.add_row(row.suite, row.says or row.test, f"[{colour}]{row.outcome}[/]", f"{row.seconds:.2f}")
    console.print(table)
    for row in rows:
        if row.why:
            console.rule(f"{row.outcome}: {row.suite}.{row.test}")
            console.print(row.why, markup=False)
    console.print(summary(rows))


def summary(rows: list[Row]) -> str:
    """Such as `57 passed, 0 failed`."""
    counted = {o: sum(row.outcome == o for row in rows) for o in ("passed", "failed", "skipped")}
    skipped = f", {counted['skipped']} skipped" if counted["skipped"] else ""
    return f"{counted['passed']} passed, {counted['failed']} failed{skipped}"


if __name__ == "__main__":
    sys.exit(main())
