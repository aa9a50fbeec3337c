"""The harness of random scripts: its pure parts, a fixed corpus of plans, and ten minutes of random ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.script_fuzz.generate import generate, sound
from tests.script_fuzz.history import Attempt, History
from tests.script_fuzz.oracle import Fate, elements, keeps_all, problems
from tests.script_fuzz.plan import (
    DEEDS,
    PARTS,
    Deed,
    Kill,
    LoopPlan,
    ModelPlan,
    OptimizerPlan,
    ScriptPlan,
)
from tests.script_fuzz.shrink import shrink, smaller_plans
from tests.support import terminated

CORPUS_SECONDS, RANDOM_SECONDS = 200, 990
"""Within which the harness must end."""

KEPT_PLANS = {
    "torch's clipping": ScriptPlan(loop=LoopPlan(clip="torch"), kills=(Kill(3, "top"),)),
    "buffers and extra state": ScriptPlan(
        model=ModelPlan(
            ("norm", "growing", "retyped", "negative-zero", "hidden", "extra-counter", "extra-tensor")
        ),
        optimizer=OptimizerPlan("Adam", "foreach"),
        kills=(Kill(2, "after-step"), Kill(4, "top", (0, 1))),
    ),
    "many kinds of parameters": ScriptPlan(
        model=ModelPlan(
            (
                *("shared", "tied", "parametrized", "spectral", "frozen", "empty", "many", "sometimes"),
                *("wide", "hooked"),
            ),
            ddp=("views", "buckets"),
        ),
        optimizer=OptimizerPlan("AdamW", "fused", groups=2),
        loop=LoopPlan(boundary="mark", scheduler="cosine", extra="ema", clip="ours", validation=True),
        deeds=(Deed("frozen-write", 3, "after-step"),),
        kills=(Kill(3, "after-scheduler", (1,), lone=True),),
    ),
    "micro-batches and a scaler": ScriptPlan(
        model=ModelPlan(("dropout",)),
        loop=LoopPlan(
            micro=2,
            drawn=True,
            zero="backward",
            skipped=(1,),
            overflows=(2,),
            scaler="given",
            extra="counter",
            end="with",
        ),
        kills=(Kill(3, "before-backward"), Kill(4, "after-backward", (1,), delay=0.03)),
        nodes=2,
    ),
    "gradients changed by hand, which hosts copy": ScriptPlan(
        model=ModelPlan(("wide", "norm", "many"), ddp=("buckets",)),
        loop=LoopPlan(micro=2, skipped=(1,), overflows=(2,), scaler="given", extra="counter", clip="torch"),
        deeds=(
            Deed("grad-scale", 0, "after-backward"),
            Deed("grad-one", 3, "before-step", 2),
            Deed("hook-scale", 0, "before-step"),
            Deed("backward-second", 4, "after-backward"),
        ),
        kills=(Kill(2, "after-backward"), Kill(4, "after-step", (1,), lone=True)),
        nodes=2,
        copies="host",
    ),
    "no marks and no step in the first turn, with copies by hosts": ScriptPlan(
        model=ModelPlan(("wide", "dropout", "sometimes")),
        loop=LoopPlan(boundary="none", skipped=(0, 3), clip="torch"),
        kills=(Kill(1, "after-scheduler"), Kill(4, "top", (0, 1))),
        copies="host",
    ),
    "no marks": ScriptPlan(
        model=ModelPlan(("norm",)),
        loop=LoopPlan(boundary="none", scheduler="lambda", clip="ours", end="exit"),
        deeds=(
            Deed("rate-set", 1, "before-step"),
            Deed("momentum-set", 2, "before-backward"),
            Deed("buffer-write", 3, "after-backward"),
        ),
        kills=(Kill(4, "after-mark"),),
    ),
    "changes that change nothing": ScriptPlan(
        model=ModelPlan(("norm",), ddp=("own-buffers",)),
        loop=LoopPlan(scheduler="step", epoch=2, zero="top"),
        deeds=(
            Deed("param-swap", 1, "after-scheduler"),
            Deed("param-exchange", 2, "before-step"),
            Deed("param-moved", 2, "top"),
            Deed("optimizer-reloaded", 3, "after-step"),
        ),
        kills=(Kill(4, "before-step"),),
    ),
}
REFUSED_PLANS = {
    "steps by hand": ScriptPlan(deeds=(Deed("param-step", 2, "after-step"),), kills=(Kill(3, "top"),)),
    "one element": ScriptPlan(
        model=ModelPlan(("many",)),
        loop=LoopPlan(boundary="mark"),
        deeds=(Deed("param-element", 2, "top", 9),),
    ),
    "gradients": ScriptPlan(
        loop=LoopPlan(boundary="none", end="exit"), deeds=(Deed("grad-scale", 2, "before-step"),)
    ),
    "another optimizer": ScriptPlan(deeds=(Deed("optimizer-second", 1, "after-step"),)),
    "a scheduler": ScriptPlan(loop=LoopPlan(scheduler="step", scheduler_given=False)),
    "two backwards": ScriptPlan(deeds=(Deed("backward-second", 2, "after-backward"),)),
    "optimizer state": ScriptPlan(deeds=(Deed("state-entry", 2, "after-step"),), kills=(Kill(3, "top"),)),
}
MORE_REFUSED = {
    "a scaler": ScriptPlan(loop=LoopPlan(scaler="forgotten")),
    "sparse gradients": ScriptPlan(model=ModelPlan(("sparse",))),
    "an embedding that its forward changes": ScriptPlan(model=ModelPlan(("max-norm",))),
    "a closure": ScriptPlan(deeds=(Deed("step-closure", 2, "before-step"),)),
    "a parameter unfrozen": ScriptPlan(model=ModelPlan(("frozen",)), deeds=(Deed("unfreeze", 2, "top"),)),
    "parameters through .data": ScriptPlan(deeds=(Deed("param-data", 2, "after-scheduler"),)),
}
NAMED_PLANS = {
    "an optimizer whose first step overflows": ScriptPlan(
        loop=LoopPlan(overflows=(2,), scaler="given"),
        deeds=(Deed("optimizer-replaced", 1, "after-step"),),
        kills=(Kill(2, "after-backward", (1,), lone=True),),
    ),
    "two steps in a turn": ScriptPlan(
        loop=LoopPlan(boundary="none"), deeds=(Deed("step-second", 1, "after-scheduler"),)
    ),
}


def script_fuzz(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run the harness."""
    return terminated.run([sys.executable, "-m", "tests.script_fuzz", *arguments], seconds)


def results_of(folder: Path, plans: dict[str, ScriptPlan]) -> dict[str, dict[str, Any]]:
    """Run plans in one process; return what came of each, by its name."""
    file = folder / "plans"
    file.write_text("\n".join(plan.to_json() for plan in plans.values()))
    result = script_fuzz("--plan", str(file), "--no-shrink", "--json", seconds=CORPUS_SECONDS)
    assert result.stdout, result.stderr
    return dict(zip(plans, json.loads(result.stdout)["cases"], strict=True))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield what came of the corpus."""
    yield results_of(tmp_path_factory.mktemp("corpus"), KEPT_PLANS | REFUSED_PLANS)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("script_fuzz")
@pytest.mark.parametrize(
    ("name", "end"),
    [*((name, "ended") for name in KEPT_PLANS), *((name, "refused") for name in REFUSED_PLANS)],
)
def test_a_fixed_corpus(corpus: dict[str, dict[str, Any]], name: str, end: str) -> None:
    assert (corpus[name]["end"], corpus[name]["problems"]) == (end, [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_that_is_refused_or_named(tmp_path: Path) -> None:
    results = results_of(tmp_path, MORE_REFUSED | NAMED_PLANS)
    ends = dict.fromkeys(MORE_REFUSED, "refused") | dict.fromkeys(NAMED_PLANS, "named")
    assert {name: (result["end"], result["problems"]) for name, result in results.items()} == {
        name: (end, []) for name, end in ends.items()
    }


@pytest.mark.slow
@terminated.time_limit(RANDOM_SECONDS)
def test_ten_minutes_of_random_plans() -> None:
    result = script_fuzz("--minutes", "10", seconds=RANDOM_SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_seed_gives_one_plan_that_torch_can_run() -> None:
    plans = [generate(seed) for seed in range(500)]
    assert plans == [generate(seed) for seed in range(500)]
    assert plans == [ScriptPlan.from_json(plan.to_json()) for plan in plans]
    assert plans == [sound(plan) for plan in plans]
    assert {deed.kind for plan in plans for deed in plan.deeds} == set(DEEDS)
    assert {part for plan in plans for part in plan.model.parts} == set(PARTS)
    assert all(deed.turn < plan.turns for plan in plans for deed in plan.deeds)
    assert 150 < sum(map(keeps_all, plans)) < 350


def test_the_corpus_has_every_part_and_what_it_says() -> None:
    plans = [*KEPT_PLANS.values(), *REFUSED_PLANS.values(), *MORE_REFUSED.values(), *NAMED_PLANS.values()]
    assert plans == [sound(plan) for plan in plans]
    assert all(map(keeps_all, KEPT_PLANS.values()))
    assert all(Fate.REFUSE in {element.fate for element in elements(plan)} for plan in REFUSED_PLANS.values())
    assert {part for plan in plans for part in plan.model.parts} == set(PARTS) - {"lazy"}


def attempt(outcome: str, first: int, turns: str, *, why: str = "", warns: str = "") -> Attempt:
    """Return an attempt whose turns from `first` on have these digests, on both ranks."""
    events: list[dict[str, Any]] = [{"event": "resumed", "turn": first, "rank": 0}]
    events += [{"event": "logged", "level": "WARNING", "text": warns}] if warns else []
    events += [
        {"event": "turn", "turn": first + number, "rank": rank, "digests": {"loss": digest}}
        for number, digest in enumerate(turns)
        for rank in range(2)
    ]
    return Attempt(outcome, why, tuple(events))


PLAIN = attempt("ended", 0, "abcd")
FOUR = ScriptPlan(turns=4)
UNMARKED = replace(FOUR, loop=LoopPlan(boundary="none", skipped=(2,)))
BY_HAND = replace(FOUR, deeds=(Deed("param-step", 1, "after-step"),))


@pytest.mark.parametrize(
    ("plan", "attempts", "kinds"),
    [
        (FOUR, [attempt("ended", 0, "abcd")], []),
        (FOUR, [attempt("killed", 0, "abc"), attempt("ended", 2, "cd")], []),
        (FOUR, [attempt("killed", 0, "abc"), attempt("ended", 1, "bcd")], ["repeats"]),
        (UNMARKED, [attempt("killed", 0, "abc"), attempt("ended", 1, "bcd")], []),
        (UNMARKED, [attempt("killed", 0, "abcd"), attempt("ended", 1, "bcd")], ["repeats"]),
        (FOUR, [attempt("killed", 0, "a"), attempt("ended", 2, "cd")], ["missing turns"] * 2),
        (FOUR, [attempt("killed", 0, "abc"), attempt("ended", 2, "xd")], ["silent difference"]),
        (FOUR, [attempt("refused", 0, "ab", why="no")], ["needless refusal"]),
        (FOUR, [attempt("ended", 0, "abcd", warns="hm")], ["needless warning"]),
        (FOUR, [attempt("failed", 0, "ab")], ["failed"]),
        (BY_HAND, [attempt("refused", 0, "a"), attempt("refused", 1, "")], []),
        (BY_HAND, [attempt("refused", 0, "a"), attempt("ended", 1, "bcd")], ["refused, then accepted"]),
        (BY_HAND, [attempt("killed", 0, "ab"), attempt("ended", 1, "xcd")], ["silent difference"]),
        (BY_HAND, [attempt("killed", 0, "ab", warns="hm"), attempt("ended", 1, "xcd")], []),
        (
            BY_HAND,
            [attempt("killed", 0, "ab"), attempt("ended", 1, "xcd", warns="hm")],
            ["difference named late"],
        ),
    ],
)
def test_what_a_history_shows(plan: ScriptPlan, attempts: list[Attempt], kinds: list[str]) -> None:
    assert [problem.kind for problem in problems(plan, History(PLAIN, tuple(attempts)))] == kinds


def test_the_first_end_explains_the_others() -> None:
    def failed(time: float, kind: str, error: str) -> dict[str, Any]:
        return {"event": "failed", "time": time, "kind": kind, "error": error, "rank": 0}

    consequence = failed(1, "other", "RuntimeError: Connection closed by peer")
    cause = failed(2, "CheckmateError", "RefusedError: no")
    for events, outcome in (
        ([consequence, cause], "refused"),
        ([{"event": "killed", "time": 3, "turn": 1}, consequence], "killed"),
        ([failed(1, "other", "TypeError: no"), cause], "failed"),
        ([{"event": "logged", "time": 1, "level": "ERROR", "text": "RefusedError: no"}], "refused"),
        ([], "died"),
    ):
        assert Attempt.of(events, "", [1, 1], hung=False).outcome == outcome
    assert Attempt.of([], "", [0, 0], hung=False).outcome == "ended"
    assert Attempt.of([], "", [0, None], hung=True).outcome == "hung"


def test_shrinking_leaves_what_fails() -> None:
    plan = next(
        plan
        for plan in map(generate, range(1000))
        if plan.does("param-step") and len(plan.deeds) > 1 and plan.kills
    )
    smallest = shrink(
        plan, lambda candidate_plan: candidate_plan.does("param-step") and bool(candidate_plan.kills)
    )
    assert [deed.kind for deed in smallest.deeds] == ["param-step"]
    assert (smallest.model.parts, smallest.loop, len(smallest.kills)) == ((), LoopPlan(), 1)
    assert all(plan != smaller for _, smaller in smaller_plans(plan))
