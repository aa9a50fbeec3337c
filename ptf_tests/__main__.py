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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from ptf_tests.report import SuiteRow, Teller
from ptf_tests.stage import targets
from ptf_tests.stage.config import ConfigError, StandingConfig, read_config
from ptf_tests.stage.namespace import NamespaceError
from ptf_tests.stage.targets import TargetError

SUITES = ("guard", "forwarding", "stub", "replication", "streams")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all tests passed, 1 if some failed, 2 if they could not run."""
    options = _parser().parse_args(arguments)
    logging.getLogger("scapy").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        config = _config(options.target, options.config)
        target = config.target if config else options.target or "softswitch"
        if config is None:
            targets.command(target)
        out = Console(highlight=False, soft_wrap=True, quiet=options.json)
        teller = Teller(out, Console(stderr=True), verbose=options.verbose)
        rows = run(config or target, options.suite or SUITES, teller)
    except (TargetError, NamespaceError, ConfigError) as error:
        for line in str(error).splitlines():
            print(f"ptf_tests: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ptf_tests: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps({"target": target, "tests": [asdict(row) for row in rows]}, indent=1))
    return 1 if any(row.outcome == "failed" for row in rows) else 0


def _config(target: str | None, file: Path | None) -> StandingConfig | None:
    """Return the configuration of a running switch, which must be of the requested target."""
    if file is None:
        if target in targets.STANDING:
            raise TargetError(
                f"a {target} cannot be started here: specify a running one with --config FILE "
                f"(make ptf TARGET={target} PTF_CONFIG=FILE; docs/tofino.md)"
            )
        return None
    config = read_config(file)
    if target not in (None, config.target):
        raise ConfigError(f"{file}: target: is {config.target}, but {target} was requested")
    return config


def run(where: StandingConfig | str, suites: Sequence[str], teller: Teller) -> list[SuiteRow]:
    """Run suites on a target in a network namespace, which this process enters, or on a running switch."""
    # Imported late, because they are slow for --help, and PTF prints to stdout.
    with contextlib.redirect_stdout(io.StringIO()):
        from ptf_tests.base import SwitchTest  # noqa: PLC0415
        from ptf_tests.stage.lab import NamespaceStage  # noqa: PLC0415
        from ptf_tests.stage.standing import StandingSwitch  # noqa: PLC0415

    lab = NamespaceStage(where) if isinstance(where, str) else StandingSwitch(where)
    rows: list[SuiteRow] = []
    try:
        with teller.running():
            SwitchTest.lab, SwitchTest.switch = lab, lab.start()
            loader = unittest.defaultTestLoader
            for suite in suites:
                tests = loader.loadTestsFromModule(importlib.import_module(f"ptf_tests.{suite}"))
                rows += teller.suite(suite, tests)
        teller.end(lab.target, rows)
    finally:
        lab.close()
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptf_tests",
        description="Packet tests of the P4 program on a target, in a network namespace of their own.",
        epilog="example: python -m ptf_tests --target bmv2 --suite streams",
    )
    kinds = (*targets.TARGETS, *targets.STANDING)
    parser.add_argument("--target", choices=kinds, help="default: softswitch, or the file's")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a running switch, described by this YAML file"
    )
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="run only this suite; may be repeated"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print a line for each test, not only for failed ones"
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON instead of text")
    return parser


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
