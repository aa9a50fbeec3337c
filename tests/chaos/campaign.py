"""A campaign: it runs scenarios in turn, and shrinks those that fail."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from tests.chaos import report
from tests.chaos.forked import ForkedLab
from tests.chaos.generate import UnknownFeature, generate
from tests.chaos.run import HarnessError, TrialOutcome, run
from tests.chaos.scenario import FEATURES, Scenario
from tests.chaos.shrink import shrink
from topologies.describe.topology import LabError


def main(asked: argparse.Namespace) -> int:
    """Run the command line; return 1 for a broken promise, 2 without a verdict."""
    if asked.features:
        print("\n".join(f"{name:17} {what}" for name, what in FEATURES.items()))
        return 0
    try:
        return _run(asked)
    except (UnknownFeature, HarnessError, LabError, OSError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _run(asked: argparse.Namespace) -> int:
    ForkedLab.serve()
    if asked.shrink is not None:
        smallest = shrink(generate(asked.shrink, _without(asked)), lambda one: _one(one, asked), _say)
        print(report.table(smallest) if smallest else "it passes")
        print(smallest.scenario.to_json() if smallest else "")
        return 1 if smallest else 0
    outcomes = []
    for scenario in _scenarios(asked):
        if asked.show:
            print("\n".join(f"{name:10} {text}" for name, text in report.describe(scenario)))
            print(scenario.to_json())
            continue
        outcome = _one(scenario, asked)
        outcomes.append(outcome)
        _say(report.line(outcome))
        if not asked.json and (not outcome.passed or asked.seed is not None or asked.scenario):
            print(report.table(outcome), flush=True)
    if asked.json:
        print(json.dumps(report.as_data(outcomes)))
    _say(f"{len(outcomes)} scenarios, {sum(not outcome.passed for outcome in outcomes)} failed")
    return int(any(not outcome.passed for outcome in outcomes))


def _scenarios(asked: argparse.Namespace) -> Iterator[Scenario]:
    without = _without(asked)
    if asked.scenario is not None:
        yield Scenario.from_json(asked.scenario.read_text())
        return
    if asked.minutes is None:
        yield from (generate(seed, without) for seed in asked.seeds or [asked.seed])
        return
    end, seed = time.monotonic() + 60 * asked.minutes, asked.first
    while time.monotonic() < end:
        yield generate(random.randrange(10**6) if seed is None else seed, without)
        seed = None if seed is None else seed + 1


def _without(asked: argparse.Namespace) -> list[str]:
    return [name for name in asked.without.split(",") if name]


def _one(scenario: Scenario, asked: argparse.Namespace) -> TrialOutcome:
    try:
        return run(scenario, keep=asked.keep, progress=lambda what: _progress(scenario.seed, what))
    except HarnessError as error:
        return replace(TrialOutcome(scenario), problems=[f"no verdict: {error}"])


def _progress(seed: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[Kseed {seed}: {what} ", end="", file=sys.stderr, flush=True)


def _say(what: str) -> None:
    print(("\r\033[K" if sys.stderr.isatty() else "") + what, file=sys.stderr, flush=True)
