"""Which elements of a script Checkmate must keep or may refuse, and what a case's history has to be. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tests.script_fuzz.history import Attempt, History
from tests.script_fuzz.plan import AFTER_BACKWARD, IN_TURN, UP_TO_STEP, Deed, ScriptPlan


class Fate(Enum):
    """What is to become of an element.

    KEEP: it trains as without Checkmate, kills or not. REFUSE: it is refused or named in a warning, each time
    that it happens. NAME: the same, but after a warning anything may follow. LATE: it is refused, but a
    restart may go on, because it takes effect only after the iteration in which it happens; then a warning
    says that the start before was refused. DOUBT: it is refused, named, or nothing goes wrong.
    """

    KEEP = "keep"
    REFUSE = "refuse"
    NAME = "name"
    LATE = "late"
    DOUBT = "doubt"


@dataclass(frozen=True)
class Element:
    """An element of a script: its name, and its fate."""

    name: str
    fate: Fate


@dataclass(frozen=True)
class Problem:
    """A defect: its class, and what was seen."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


_FATES: Final = {"sparse": Fate.REFUSE, "max-norm": Fate.REFUSE, "lazy": Fate.DOUBT}
"""Of parts of models; all others are kept."""
_KEPT_BY_HAND: Final = frozenset(
    {"param-swap", "param-exchange", "param-moved", "param-reloaded", "optimizer-reloaded"}
    | {"frozen-write", "buffer-write", "rate-set", "momentum-set", "forward-evaluating"}
)
_SAMPLED: Final = ("grad-one", "grad-dropped")
"""What is seen at once only if the gradient is one of those sampled in that iteration."""
_KEPT_BY_HOSTS: Final = frozenset({"grad-scale", "grad-noise", *_SAMPLED, "hook-scale", "backward-second"})
"""What changes gradients before the step, which uses what is copied."""
_AFTER_STEP: Final = ("after-step", "after-scheduler", "after-mark")
_IRRELEVANT: Final = re.compile("without keys|was not sent completely")
"""Warnings that do not concern what a script does."""
_REFUSAL: Final = "the last start was refused"
_DRIFT: Final = "and the next forward. If that change belongs to the iteration"


def elements(plan: ScriptPlan) -> list[Element]:
    """Return the elements of a script."""
    loop = plan.loop
    result = [Element(part, _FATES.get(part, Fate.KEEP)) for part in plan.model.parts]
    result += [Element(option, Fate.KEEP) for option in plan.model.ddp]
    for name, there, keep in (
        ("scheduler", loop.scheduler != "none", loop.scheduler_given),
        ("scaler", loop.scaler != "none", loop.scaler == "given"),
        ("extra", loop.extra != "none", loop.boundary != "none"),
        ("clip", loop.clip != "none", True),
        ("validation", loop.validation, loop.boundary != "none"),
        ("micro", loop.micro > 1, True),
        ("skipped", bool(loop.skipped), True),
        ("epoch", bool(loop.epoch), True),
        ("breaks", loop.breaks, True),
        (f"zero {loop.zero}", loop.zero != "end", True),
        (f"boundary {loop.boundary}", loop.boundary != "steps", True),
    ):
        if there:
            result.append(Element(name, Fate.KEEP if keep else Fate.REFUSE))
    return result + [Element(deed.kind, _fate(deed, plan)) for deed in plan.deeds]


def _fate(deed: Deed, plan: ScriptPlan) -> Fate:
    if deed.kind in _KEPT_BY_HAND:
        places = UP_TO_STEP if plan.loop.boundary == "none" else IN_TURN
        return Fate.KEEP if deed.place in places else Fate.REFUSE
    if deed.kind == "forward-discarded":
        return _fate_of_forward(deed, plan)
    if deed.kind in ("backward-second", "step-second") and plan.loop.boundary == "none":
        return Fate.NAME  # turns are not known to have several backwards
    if deed.kind in _KEPT_BY_HOSTS and plan.copies == "host":
        return Fate.KEEP
    if deed.kind == "optimizer-replaced" and (deed.place in _AFTER_STEP or deed.turn in plan.loop.skipped):
        return Fate.LATE  # the next step shows it
    if deed.kind == "hook-scale" and deed.target % 2:
        return Fate.DOUBT  # it comes after Checkmate's own hook
    return Fate.DOUBT if deed.kind in (*_SAMPLED, "freeze") else Fate.REFUSE


def _fate_of_forward(deed: Deed, plan: ScriptPlan) -> Fate:
    """Return the fate of a forward in training without a backward."""
    if deed.place in AFTER_BACKWARD or (deed.turn in plan.loop.skipped and deed.place != "top"):
        # It ends the iteration, if nothing else is known to.
        return Fate.NAME if plan.loop.boundary == "none" else Fate.REFUSE
    if plan.loop.micro == 1:
        return Fate.KEEP
    # DDP reduces the gradients of the micro-batch that follows, although that is in no_sync.
    if plan.loop.drawn:
        return Fate.NAME  # each of them has a mark of its own
    return Fate.REFUSE if deed.place == "top" else Fate.LATE


def keeps_all(plan: ScriptPlan) -> bool:
    """Return whether nothing of a script may be refused."""
    return all(element.fate is Fate.KEEP for element in elements(plan))


def warnings(attempt: Attempt) -> list[str]:
    """Return the warnings of an attempt that concern what the script does."""
    return [text for text in attempt.warnings if not _IRRELEVANT.search(text)]


def _needless(plan: ScriptPlan, history: History) -> list[str]:
    """Return warnings about a script that does nothing that may be refused.

    Without marks, a change at the top of a turn may as well belong to the turn before.
    """
    texts = [text for attempt in history.attempts for text in warnings(attempt)]
    at_top = plan.loop.boundary == "none" and any(deed.place == "top" for deed in plan.deeds)
    return [text for text in texts if not (at_top and _DRIFT in text)]


def problems(plan: ScriptPlan, history: History) -> list[Problem]:
    """Return the defects that a history shows; the first is the gravest."""
    result = [*_ends(history), *_differences(plan, history)]
    has_warned = any(warnings(attempt) for attempt in history.attempts)
    if not result and history.last.outcome == "ended" and not has_warned:
        result += _missing(plan, history)
    refusals = [attempt for attempt in history.attempts if attempt.outcome == "refused"]
    if keeps_all(plan):
        result += [Problem("needless refusal", attempt.why) for attempt in refusals[:1]]
        result += [Problem("needless warning", text) for text in _needless(plan, history)[:1]]
        result += _repeated(plan, history)
    elif refusals and history.last.outcome == "ended" and not _may_go_on(plan, history):
        result.append(Problem("refused, then accepted", refusals[0].why))
    return result


def _may_go_on(plan: ScriptPlan, history: History) -> bool:
    """Return whether a restart may go on after a refusal."""
    fates = {element.fate for element in elements(plan)}
    texts = [text for attempt in history.attempts for text in warnings(attempt)]
    if Fate.NAME in fates and any(_REFUSAL not in text for text in texts):
        return True
    if Fate.REFUSE in fates:
        return False
    return Fate.LATE not in fates or any(_REFUSAL in text for text in texts)


def _ends(history: History) -> Iterator[Problem]:
    for number, attempt in enumerate(history.attempts):
        if attempt.outcome in ("failed", "hung", "died"):
            yield Problem(attempt.outcome, f"start {number}: {attempt.why}")


def _differences(plan: ScriptPlan, history: History) -> Iterator[Problem]:
    """Yield the first difference that no warning before its start has named.

    What takes effect late may be named by that start itself, which says that the one before was refused, and
    can't be noticed if the ranks die before the next step.
    """
    late = {turn for deed in plan.deeds if _fate(deed, plan) is Fate.LATE for turn in _until_step(deed, plan)}
    texts: list[str] = []
    reached = -1
    for number, attempt in enumerate(history.attempts):
        now = warnings(attempt)
        is_named = texts or (late and any(_REFUSAL in text for text in now)) or reached in late
        for rank in range(2):
            expected = history.plain.turns(rank)
            for turn, digests in attempt.turns(rank).items():
                parts = [name for name, digest in digests.items() if expected[turn].get(name) != digest]
                if parts and not is_named:
                    where = f"rank {rank}, start {number}, resumed at {attempt.resumed}, after turn {turn}"
                    kind = "difference named late" if now else "silent difference"
                    yield Problem(kind, f"{where}: {', '.join(parts)}")
                    return
        texts += now
        reached = max([reached, *attempt.turns(0)])


def _until_step(deed: Deed, plan: ScriptPlan) -> Iterator[int]:
    """Yield the turn of a deed, and those that follow before the next step."""
    yield deed.turn
    yield from itertools.takewhile(plan.loop.skipped.__contains__, itertools.count(deed.turn + 1))


def _missing(plan: ScriptPlan, history: History) -> Iterator[Problem]:
    for rank in range(2):
        there = {turn for attempt in history.attempts for turn in attempt.turns(rank)}
        if missing := sorted(set(range(plan.turns)) - there):
            yield Problem("missing turns", f"rank {rank}: {missing}")


def _repeated(plan: ScriptPlan, history: History) -> Iterator[Problem]:
    """Yield a start that repeats more than one iteration that was completed.

    Each turn is one, but if nothing marks its end, a turn without a step belongs to that of the next step.
    """
    within = plan.loop.skipped if plan.loop.boundary == "none" else ()
    newest = -1
    for number, attempt in enumerate(history.attempts):
        repeated = set(range(newest + 1 if attempt.resumed is None else attempt.resumed, newest + 1))
        if len(repeated.difference(within)) > 1:
            yield Problem("repeats", f"start {number} resumed at {attempt.resumed} after turn {newest}")
        newest = max([newest, *attempt.turns(0)])
