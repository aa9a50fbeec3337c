"""Reduction of a failing plan by one element at a time, while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from tests.script_fuzz.generate import sound
from tests.script_fuzz.plan import Kill, LoopPlan, OptimizerPlan, ScriptPlan

_TRIES = 2
"""Runs of a smaller plan before it counts as passing, because the moment of a kill varies."""


def shrink(
    plan: ScriptPlan, fails: Callable[[ScriptPlan], bool], say: Callable[[str], None] = lambda _: None
) -> ScriptPlan:
    """Return the smallest plan that `fails`, by leaving out elements of one that does."""
    while True:
        for feature, smaller in smaller_plans(plan):
            still = any(fails(smaller) for _ in range(_TRIES))
            say(f"without {feature}: {'still fails' if still else 'passes'}")
            if still:
                plan = smaller
                break
        else:
            return plan


def smaller_plans(plan: ScriptPlan) -> Iterator[tuple[str, ScriptPlan]]:
    """Yield plans without an element, with its name. Pure."""
    for feature, smaller in _smaller(plan):
        if smaller != plan and sound(smaller) == smaller:
            yield feature, smaller


def _smaller(plan: ScriptPlan) -> Iterator[tuple[str, ScriptPlan]]:
    """Yield smaller plans, the smallest first."""
    parts_needed = {"frozen"} if plan.does("unfreeze") or plan.does("frozen-write") else set()
    parts = tuple(part for part in plan.model.parts if part in parts_needed)
    bare = replace(plan, model=replace(plan.model, parts=parts, ddp=()))
    yield "all parts and options", replace(bare, loop=LoopPlan(plan.loop.boundary))
    yield "all parts", bare
    yield "all options", replace(plan, loop=LoopPlan(plan.loop.boundary))
    for part in plan.model.parts:
        if part not in parts_needed:
            parts = tuple(kept_part for kept_part in plan.model.parts if kept_part != part)
            yield part, replace(plan, model=replace(plan.model, parts=parts))
    for option in plan.model.ddp:
        options = tuple(flag for flag in plan.model.ddp if flag != option)
        yield option, replace(plan, model=replace(plan.model, ddp=options))
    for number, deed in enumerate(plan.deeds):
        yield str(deed), replace(plan, deeds=plan.deeds[:number] + plan.deeds[number + 1 :])
    for number, kill in enumerate(plan.kills):
        yield str(kill), replace(plan, kills=plan.kills[:number] + plan.kills[number + 1 :])
        plain = Kill(kill.turn, kill.place)
        if kill != plain:
            kills = (*plan.kills[:number], plain, *plan.kills[number + 1 :])
            yield f"the details of {kill}", replace(plan, kills=kills)
    if plan.optimizer != OptimizerPlan():
        yield "the optimizer", replace(plan, optimizer=OptimizerPlan())
    for name, value in asdict(LoopPlan()).items():
        if getattr(plan.loop, name) != value:
            loop = replace(plan.loop, **{name: value})
            if loop.micro == 1:
                loop = replace(loop, drawn=False)
            if loop.drawn:
                loop = replace(loop, epoch=0, breaks=False)
            if loop.scaler != "given":
                loop = replace(loop, overflows=())
            yield name, replace(plan, loop=loop)
    if plan.nodes > 1:
        yield "a node", replace(plan, nodes=1)
    last = max([0, *(deed.turn for deed in plan.deeds), *(kill.turn for kill in plan.kills)])
    if plan.turns > last + 2:
        yield "turns at the end", replace(plan, turns=last + 2)
