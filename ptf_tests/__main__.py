"""`python -m ptf_tests`: run the suites on a target."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import signal
import sys
import unittest
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType
from typing import NoReturn

from rich.console import Console

from ptf_tests import targets
from ptf_tests.namespace import NamespaceError
from ptf_tests.report import Row, Teller
from ptf_tests.targets import TargetError

SUITES = ("forwarding", "replication", "streams", "stub")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 some failed, 2 the tests couldn't be run."""
    options = _parser().parse_args(arguments)
    logging.getLogger("scapy").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        targets.command(options.target)
        out = Console(highlight=False, soft_wrap=True, quiet=options.json)
        teller = Teller(out, Console(stderr=True), verbose=options.verbose)
        rows = run(options.target, options.suite or SUITES, teller)
    except (TargetError, NamespaceError) as error:
        print(f"ptf_tests: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ptf_tests: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps({"target": options.target, "tests": [asdict(row) for row in rows]}, indent=1))
    return 1 if any(row.outcome == "failed" for row in rows) else 0


def run(target: str, suites: Sequence[str], teller: Teller) -> list[Row]:
    """Run suites in a network namespace of this process's own, which it enters for good."""
    # Imported late: nobody should wait for them to read --help; and PTF greets on stdout.
    with contextlib.redirect_stdout(io.StringIO()):
        from ptf_tests.base import SwitchTest  # noqa: PLC0415
        from ptf_tests.lab import Lab  # noqa: PLC0415

    lab = Lab(target)
    rows: list[Row] = []
    try:
        with teller.running():
            SwitchTest.lab, SwitchTest.switch = lab, lab.start()
            loader = unittest.defaultTestLoader
            for suite in suites:
                tests = loader.loadTestsFromModule(importlib.import_module(f"ptf_tests.{suite}"))
                rows += teller.suite(suite, tests)
        teller.end(target, rows)
    finally:
        lab.close()
    return rows


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
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="a line for each test, not only for those that fail"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON instead of text")
    return parser


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
