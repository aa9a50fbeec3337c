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


def main(options: argparse.Namespace) -> int:
    """Run the command line; return 1 for a broken promise, 2 without a verdict."""
    if options.features:
        print("\n".join(f"{name:17} {description}" for name, description in FEATURES.items()))
        return 0
    try:
        return _run(options)
    except (UnknownFeature, HarnessError, LabError, OSError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _run(options: argparse.Namespace) -> int:
    ForkedLab.serve()
    if options.shrink is not None:
        smallest = shrink(
            generate(options.shrink, _without(options)),
            lambda candidate: _run_trial(candidate, options),
            _say,
        )
        print(report.table(smallest) if smallest else "it passes")
        print(smallest.scenario.to_json() if smallest else "")
        return 1 if smallest else 0
    outcomes = []
    for scenario in _scenarios(options):
        if options.show:
            print("\n".join(f"{name:10} {text}" for name, text in report.describe(scenario)))
            print(scenario.to_json())
            continue
        outcome = _run_trial(scenario, options)
        outcomes.append(outcome)
        _say(report.line(outcome))
        if not options.json and (not outcome.has_passed or options.seed is not None or options.scenario):
            print(report.table(outcome), flush=True)
    if options.json:
        print(json.dumps(report.as_data(outcomes)))
    _say(f"{len(outcomes)} scenarios, {sum(not outcome.has_passed for outcome in outcomes)} failed")
    return int(any(not outcome.has_passed for outcome in outcomes))


def _scenarios(options: argparse.Namespace) -> Iterator[Scenario]:
    without = _without(options)
    if options.scenario is not None:
        yield Scenario.from_json(options.scenario.read_text())
        return
    if options.minutes is None:
        yield from (generate(seed, without) for seed in options.seeds or [options.seed])
        return
    end, seed = time.monotonic() + 60 * options.minutes, options.first
    while time.monotonic() < end:
        yield generate(random.randrange(10**6) if seed is None else seed, without)
        seed = None if seed is None else seed + 1


def _without(options: argparse.Namespace) -> list[str]:
    return [name for name in options.without.split(",") if name]


def _run_trial(scenario: Scenario, options: argparse.Namespace) -> TrialOutcome:
    try:
        return run(scenario, keep=options.keep, progress=lambda phase: _progress(scenario.seed, phase))
    except HarnessError as error:
        return replace(TrialOutcome(scenario), problems=[f"no verdict: {error}"])


def _progress(seed: int, phase: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[Kseed {seed}: {phase} ", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(("\r\033[K" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)
