"""A campaign: it runs plans in turn, shows what fails, and shrinks the first plan of each kind."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.script_fuzz.case import Cases, HarnessError
from tests.script_fuzz.generate import generate
from tests.script_fuzz.history import History
from tests.script_fuzz.oracle import Fate, Problem, elements, problems, warnings
from tests.script_fuzz.plan import DEEDS, PARTS, ScriptPlan
from tests.script_fuzz.shrink import shrink

_SHRINK_SECONDS: Final = 120.0
_SEEDS: Final = 8
"""Seeds that are shown of each kind."""
_MAX_SHOWN: Final = 40
"""Lines of output that are shown of an attempt that fails."""


@dataclass(frozen=True)
class CaseResult:
    """A plan and what came of it. `smallest`: the smallest plan that fails in the same way."""

    plan: ScriptPlan
    problems: tuple[Problem, ...]
    history: History | None = None
    seconds: float = 0.0
    smallest: ScriptPlan | None = None

    @property
    def end(self) -> str:
        """How the last start ended: as in `Attempt`; `named` if it ended well, and Checkmate has warned."""
        if self.history is None:
            return "none"
        end = self.history.last.outcome
        has_warned = any(warnings(attempt) for attempt in self.history.attempts)
        return "named" if has_warned and end == "ended" else end

    @property
    def key(self) -> tuple[str, ...]:
        """What failures of one kind have in common: the problem, and what may be refused, or all."""
        if self.smallest is not None:
            return self._key(self.smallest, harmless=True)
        return self._key(self.plan, harmless=False)

    def _key(self, plan: ScriptPlan, *, harmless: bool) -> tuple[str, ...]:
        all_elements = elements(plan)
        names = sorted(
            {element.name for element in all_elements if element.fate is not Fate.KEEP or harmless}
        )
        first = self.problems[0]
        parts = first.text.rpartition(": ")[2] if first.kind == "silent difference" and not names else ""
        return (first.kind, *names, parts)


def main(options: argparse.Namespace) -> int:
    """Run the command line; return 1 for a defect."""
    if options.elements:
        print("\n".join(f"{name:18} {words}" for name, words in {**PARTS, **DEEDS}.items()))
        return 0
    try:
        with Cases(options.keep) as cases:
            return Campaign(cases, options).run()
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


class Campaign:
    """The plans of a command line, and their results."""

    def __init__(self, cases: Cases, options: argparse.Namespace) -> None:
        """Prepare to run what the `options` ask for."""
        self._cases, self._options = cases, options
        self._failures: dict[tuple[str, ...], list[CaseResult]] = defaultdict(list)
        self._smallest: dict[tuple[str, ...], tuple[str, ...]] = {}
        """The key of the smallest plan, by that of the first one."""
        self._cases_data: list[dict[str, Any]] = []
        self._accepted_seeds: dict[str, list[int]] = defaultdict(list)
        """Seeds whose elements that may be refused were not, by element."""
        self._ends: dict[str, Counter[str]] = defaultdict(Counter)
        """How cases with an element that may be refused ended, by element."""

    def run(self) -> int:
        """Run all plans; return 1 if one shows a defect."""
        began, count = time.monotonic(), 0
        try:
            for plan in self._plans():
                if self._options.show:
                    print(plan.to_json(), plan.describe(), sep="\n")
                    continue
                self._take(self.try_plan(plan))
                count += 1
                seconds = time.monotonic() - began
                failed = sum(map(len, self._failures.values()))
                _progress(f"{count} cases, {failed} failed, {seconds / 60:.1f} minutes")
        finally:
            self._report(count, time.monotonic() - began)
        return int(bool(self._failures))

    def _plans(self) -> Iterator[ScriptPlan]:
        options = self._options
        if options.plan is not None:
            yield from _read(options.plan)
            return
        if options.seed is not None:
            yield generate(options.seed)
            return
        end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        first = random.randrange(10**6) if options.first is None else options.first
        without, number = set(options.without.split(",")), 0
        while (end is None or time.monotonic() < end) and (options.cases is None or number < options.cases):
            plan = generate(first + number)
            number += 1
            if not without.intersection(_names(plan)):
                yield plan

    def try_plan(self, plan: ScriptPlan) -> CaseResult:
        """Run a plan."""
        began = time.monotonic()
        try:
            history = self._cases.run(plan)
        except HarnessError as error:
            return CaseResult(plan, (Problem("no verdict", str(error)),), None, time.monotonic() - began)
        return CaseResult(plan, tuple(problems(plan, history)), history, time.monotonic() - began)

    def _take(self, result: CaseResult) -> None:
        self._cases_data.append(
            {
                "plan": json.loads(result.plan.to_json()),
                "end": result.end,
                "problems": list(map(str, result.problems)),
                "seconds": round(result.seconds, 2),
            }
        )
        self._count(result)
        if not result.problems:
            if self._options.seed is not None or self._options.plan is not None:
                _say(_text(result))
            return
        rough = result.key
        if rough not in self._smallest and not self._options.no_shrink:
            result = self._shrunk(result)
        key = self._smallest.setdefault(rough, result.key)
        new = key not in self._failures
        self._failures[key].append(result)
        _say(_text(result) if new else f"seed {result.plan.seed}: again {_words(key)}")

    def _count(self, result: CaseResult) -> None:
        for element in elements(result.plan):
            if element.fate is not Fate.KEEP:
                self._ends[element.name][result.end] += 1
            if element.fate is Fate.REFUSE and result.end == "ended":
                self._accepted_seeds[element.name].append(result.plan.seed)

    def _shrunk(self, result: CaseResult) -> CaseResult:
        deadline = time.monotonic() + _SHRINK_SECONDS

        def fails(plan: ScriptPlan) -> bool:
            if time.monotonic() > deadline:
                return False
            again = self.try_plan(plan)
            return bool(again.problems) and again.problems[0].kind == result.problems[0].kind

        smallest = shrink(
            result.plan, fails, lambda feature: _progress(f"seed {result.plan.seed}: {feature}")
        )
        return replace(result, smallest=smallest)

    def _report(self, count: int, seconds: float) -> None:
        failed = [result for results in self._failures.values() for result in results]
        if self._options.json:
            data = [
                {
                    "key": key,
                    "count": len(results),
                    "seeds": [result.plan.seed for result in results],
                    "problems": [str(problem) for problem in results[0].problems],
                    "smallest": json.loads((results[0].smallest or results[0].plan).to_json()),
                }
                for key, results in self._failures.items()
            ]
            report = {"seconds": seconds, "cases": self._cases_data, "ends": self._ends, "failures": data}
            print(json.dumps(report))
        elif count > 1:
            for name, ends in sorted(self._ends.items()):
                _say(f"{name:20} {', '.join(f'{end} {n}' for end, n in ends.most_common())}")
            for name, seeds in sorted(self._accepted_seeds.items()):
                _say(f"{name} went unnoticed: seeds {', '.join(map(str, seeds[:_SEEDS]))}")
            for key, results in self._failures.items():
                _say(f"{len(results):4} {_words(key)}: seeds {_seeds(results)}")
        if count:
            mean = sum(data["seconds"] for data in self._cases_data) / count
            _say(f"{count} cases, {len(failed)} failed, {mean:.2f} s each, {seconds / 60:.1f} minutes")


def _names(plan: ScriptPlan) -> set[str]:
    """Return the names by which `--without` leaves a plan out."""
    return {deed.place for deed in plan.deeds} | {element.name for element in elements(plan)}


def _words(key: tuple[str, ...]) -> str:
    return ", ".join(filter(None, key))


def _read(plan: str) -> list[ScriptPlan]:
    """Return plans from JSON, or from a file with one in each line."""
    lines = [plan] if plan.lstrip().startswith("{") else Path(plan).read_text().splitlines()
    return [ScriptPlan.from_json(line) for line in lines if line]


def _seeds(results: list[CaseResult]) -> str:
    return ", ".join(str(result.plan.seed) for result in results[:_SEEDS])


def _text(result: CaseResult) -> str:
    """Return a result in lines."""
    lines = [f"seed {result.plan.seed}, {result.seconds:.1f} s: {result.plan.describe()}"]
    attempts = result.history.attempts if result.history else ()
    for number, attempt in enumerate(attempts):
        turns = sorted(attempt.turns(0))
        lines.append(f"  start {number} at {attempt.resumed}, turns {turns}: {attempt.outcome} {attempt.why}")
        lines += [f"    warns: {text}" for text in warnings(attempt)]
        if attempt.outcome in ("failed", "hung", "died"):
            lines += [f"    | {line}" for line in attempt.output.splitlines()[-_MAX_SHOWN:]]
    lines += [f"  {problem}" for problem in result.problems]
    if result.smallest is not None:
        lines += [f"  smallest: {result.smallest.describe()}", f"  {result.smallest.to_json()}"]
    return "\n".join(lines)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(("\r\033[K" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)
