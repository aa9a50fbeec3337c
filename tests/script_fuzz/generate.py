"""Draws plans from seeds. Pure: a seed always has the same plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from tests.script_fuzz.plan import (
    AFTER_BACKWARD,
    IN_TURN,
    PARTS,
    PLACES,
    UP_TO_STEP,
    Deed,
    Kill,
    LoopPlan,
    ModelPlan,
    OptimizerPlan,
    ScriptPlan,
)

Happening = TypeVar("Happening", Deed, Kill)

_PARTS: Final[Mapping[str, float]] = {  # the probability of each
    "shared": 0.15,
    "tied": 0.15,
    "parametrized": 0.15,
    "spectral": 0.1,
    "frozen": 0.25,
    "empty": 0.15,
    "norm": 0.25,
    "dropout": 0.2,
    "many": 0.3,
    "sometimes": 0.15,
    "wide": 0.15,
    "growing": 0.15,
    "retyped": 0.15,
    "negative-zero": 0.15,
    "hidden": 0.15,
    "extra-counter": 0.15,
    "extra-tensor": 0.15,
    "hooked": 0.1,
    "lazy": 0.05,
}
_WRAPPING: Final[Mapping[str, float]] = {"views": 0.2, "own-buffers": 0.15, "buckets": 0.2}
"""The same of DDP's options."""

_BUFFERS: Final = frozenset({"norm", "growing", "retyped", "negative-zero", "hidden"})
_PARAMETERS: Final = ("param-clamp", "param-reinit", "param-element", "param-data", "param-load")
_IN_PLACE: Final = frozenset(
    {"param-clamp", "param-reinit", "param-element", "param-load", "param-swap", "param-reloaded"}
    | {"buffer-write", "frozen-write"}
)
"""What raises the version of tensors."""
_EVALUATING: Final = ("param-swap", "param-exchange", "forward-evaluating")
_AFTER_GRADIENTS: Final = (*AFTER_BACKWARD, "after-step", "after-scheduler")

_HARMLESS: Final = (
    *("param-swap", "param-exchange", "param-moved", "param-reloaded", "optimizer-reloaded"),
    *("rate-set", "momentum-set", "forward-evaluating", "forward-discarded"),
    *("frozen-write", "buffer-write"),
)
_HARMFUL: Final[Mapping[str, Sequence[str]]] = {
    "param-step": _AFTER_GRADIENTS,
    **dict.fromkeys(_PARAMETERS, PLACES),
    "grad-scale": AFTER_BACKWARD,
    "grad-noise": AFTER_BACKWARD,
    "grad-one": AFTER_BACKWARD,
    "grad-dropped": AFTER_BACKWARD,
    "freeze": ("top", "after-scheduler", "after-mark"),
    "unfreeze": ("top", "after-scheduler", "after-mark"),
    "optimizer-replaced": ("top", "after-step", "after-scheduler", "after-mark"),
    "optimizer-second": ("after-step",),
    "group-added": ("top", "before-step", "after-step", "after-mark"),
    "group-removed": ("top", "before-step", "after-step", "after-mark"),
    "param-replaced": ("top", "after-scheduler", "after-mark"),
    "hook-clamp": ("before-step",),
    "hook-scale": ("before-step",),
    "state-cleared": PLACES,
    "state-entry": PLACES,
    "step-closure": ("before-step",),
    "backward-second": ("after-backward",),
    "step-second": ("after-scheduler",),
    "forward-discarded": AFTER_BACKWARD,
}
"""What Checkmate may refuse or name, with the places at which a script may do it."""
_HARMFUL_OPTIONS: Final = ("scheduler", "scaler", "extra", "sparse", "max-norm")
_ONLY_STEPPED: Final = ("before-step", "after-step")
"""Places that a turn without a step does not reach."""


def generate(seed: int) -> ScriptPlan:
    """Return the plan of a seed: nearly half have nothing that may be refused, and most others one thing."""
    draw = _Draw(seed)
    plan = ScriptPlan(
        seed=seed,
        turns=draw.of("turns").randint(5, 8),
        model=_model(draw),
        optimizer=_optimizer(draw.of("optimizer")),
        loop=_loop(draw),
        nodes=draw.of("nodes").choice((1, 1, 1, 2)),
        copies=draw.of("copies").choice(("switch", "host")),
    )
    for number in range(draw.of("harmless").choice((0, 0, 1, 1, 2))):
        plan = _with_harmless(plan, draw.of(f"harmless {number}"))
    for number in range(draw.of("harmful").choice((0, 0, 0, 1, 1, 1, 1, 2))):
        plan = _with_harmful(plan, draw.of(f"harmful {number}"))
    return sound(replace(plan, kills=_kills(plan, draw.of("kills"))))


class _Draw:
    """Random choices, each with a generator of its own by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, name: str) -> random.Random:
        """Return the generator of that name."""
        return random.Random(f"{self._seed} {name}")


def _model(draw: _Draw) -> ModelPlan:
    parts = tuple(name for name, share in _PARTS.items() if draw.of(name).random() < share)
    wrapping = tuple(name for name, share in _WRAPPING.items() if draw.of(name).random() < share)
    return ModelPlan(parts, draw.of("width").choice((4, 6, 12)), wrapping)


def _optimizer(draw: random.Random) -> OptimizerPlan:
    kind = draw.choice(("SGD", "SGD", "Adam", "AdamW"))
    return OptimizerPlan(kind, draw.choice(("foreach", "fused", "neither")), draw.choice((1, 1, 2)))


def _loop(draw: _Draw) -> LoopPlan:
    choices = draw.of("loop")
    boundary = choices.choice(("steps", "steps", "mark", "none"))
    micro = choices.choice((1, 1, 1, 2, 3))
    marked = boundary != "none"
    scaler = choices.choice(("none", "none", "none", "given"))
    return LoopPlan(
        boundary=boundary,
        micro=micro,
        drawn=micro > 1 and choices.random() < 0.5,
        epoch=choices.choice((0, 0, 0, 2, 3)),
        breaks=choices.random() < 0.15,
        zero=choices.choice(("end", "end", "top", "backward", "zeros")),
        skipped=tuple(sorted(choices.sample(range(5), choices.choice((0, 0, 0, 1, 2))))),
        overflows=tuple(choices.sample(range(1, 5), choices.choice((0, 1)) if scaler == "given" else 0)),
        scheduler=choices.choice(("none", "none", "step", "lambda", "cosine", "cycle")),
        scaler=scaler,
        extra=choices.choice(("none", "none", "counter", "ema")) if marked else "none",
        clip=choices.choice(("none", "none", "ours", "torch")),
        validation=marked and choices.random() < 0.25,
        end=choices.choice(("close", "with", "exit")),
    )


def _with_harmless(plan: ScriptPlan, draw: random.Random) -> ScriptPlan:
    kind = draw.choice(_HARMLESS)
    places: Sequence[str] = UP_TO_STEP if plan.loop.boundary == "none" else IN_TURN
    if kind in _IN_PLACE:
        places = _without_graph(places)
    if kind == "forward-discarded":
        places = ("top",) if plan.loop.boundary == "none" else ("top", "after-step", "after-scheduler")
    if kind == "frozen-write" and not plan.has("frozen"):
        plan = _with_part(plan, "frozen")
    if kind == "buffer-write" and not _BUFFERS & set(plan.model.parts):
        plan = _with_part(plan, draw.choice(sorted(_BUFFERS)))
    return _with_deed(plan, kind, places, draw)


def _with_harmful(plan: ScriptPlan, draw: random.Random) -> ScriptPlan:
    kind = draw.choice((*_HARMFUL, *_HARMFUL_OPTIONS))
    loop = plan.loop
    options: dict[str, Callable[[], LoopPlan]] = {
        "scheduler": lambda: replace(loop, scheduler=draw.choice(("step", "lambda")), scheduler_given=False),
        "scaler": lambda: replace(loop, scaler="forgotten", overflows=()),
        "extra": lambda: replace(
            loop, boundary="none", validation=False, extra=draw.choice(("counter", "ema"))
        ),
    }
    if kind in options:
        return replace(plan, loop=options[kind]())
    if kind in PARTS:
        return _with_part(plan, kind)
    if kind == "unfreeze" and not plan.has("frozen"):
        plan = _with_part(plan, "frozen")
    if kind == "group-removed":
        plan = replace(plan, optimizer=replace(plan.optimizer, groups=2))
    if kind in ("group-added", "group-removed"):  # torch's schedulers do not expect it
        plan = replace(plan, loop=replace(loop, scheduler="none", scheduler_given=True))
    places = _HARMFUL[kind]
    return _with_deed(plan, kind, _without_graph(places) if kind in _IN_PLACE else places, draw)


def _without_graph(places: Sequence[str]) -> tuple[str, ...]:
    """Return places without the one at which autograd still needs the values of tensors."""
    return tuple(place for place in places if place != "before-backward")


def _with_part(plan: ScriptPlan, part: str) -> ScriptPlan:
    return replace(plan, model=replace(plan.model, parts=(*plan.model.parts, part)))


def _with_deed(plan: ScriptPlan, kind: str, places: Sequence[str], draw: random.Random) -> ScriptPlan:
    deed = Deed(kind, draw.randrange(plan.turns), draw.choice(places), draw.randrange(20))
    return replace(plan, deeds=(*plan.deeds, deed))


def _kills(plan: ScriptPlan, draw: random.Random) -> tuple[Kill, ...]:
    """Return kills in order; the first of a script with a harmful deed mostly follows this."""
    result = []
    first = max((deed.turn for deed in plan.deeds if deed.kind in _HARMFUL), default=0)
    if draw.random() < 0.15:
        first = 0
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2))):
        result.append(
            Kill(
                turn=min(draw.randrange(first, plan.turns), first + draw.choice((1, 2, 9))),
                place=draw.choice(PLACES),
                ranks=draw.choice(((0,), (1,), (0, 1))),
                delay=draw.choice((0.0, 0.0, 0.03)),
                lone=draw.random() < 0.3,
            )
        )
    return tuple(sorted(result, key=lambda kill: (kill.turn, PLACES.index(kill.place))))


_OWN_BUFFERS: Final = ("norm", "retyped")
"""What has buffers of a rank's own batches. In a forward and in a restore, all ranks get the first one's."""


def sound(plan: ScriptPlan) -> ScriptPlan:
    """Return a plan without what torch itself does not do, and what docs/training.md excludes."""
    loop, optimizer = plan.loop, plan.optimizer
    if loop.boundary != "steps" or loop.micro == 1:
        loop = replace(loop, drawn=False)
    if loop.boundary != "steps" or loop.drawn:
        loop = replace(loop, epoch=0, breaks=False)
    if plan.does("optimizer-second") or plan.does("step-closure"):  # which a GradScaler refuses
        loop = replace(loop, scaler="none", overflows=())
    if plan.has("extra-tensor") and any(map(plan.has, _OWN_BUFFERS)):  # which a validation would change
        loop = replace(loop, epoch=0)
    if loop.epoch:
        loop = replace(loop, breaks=False)
    if plan.has("sparse"):
        loop = replace(loop, scaler="none", overflows=(), clip="none", zero="end")
        optimizer = replace(optimizer, kind="SGD", way="neither")
    partly = plan.leaves_out or loop.overflows or plan.does("grad-dropped") or plan.does("unfreeze")
    if optimizer.kind == "SGD" and optimizer.way == "fused" and (partly or loop.scaler != "none"):
        optimizer = replace(optimizer, way="foreach")
    deeds = (_reached(_after_forward(deed, plan), loop) for deed in plan.deeds if not _excluded(deed, plan))
    kills = (_reached(kill, loop) for kill in plan.kills)
    return replace(plan, loop=loop, optimizer=optimizer, deeds=tuple(deeds), kills=tuple(kills))


def _excluded(deed: Deed, plan: ScriptPlan) -> bool:
    """Return whether a plan can't have a deed."""
    if deed.kind == "forward-discarded":
        return plan.leaves_out or plan.loop.micro > 1  # DDP then expects its backward, and reduces the next
    if deed.kind == "optimizer-reloaded":
        return plan.does("group-removed")  # torch can't save state of parameters without a group
    if deed.kind in ("group-added", "group-removed"):
        return plan.loop.scheduler != "none"  # another deed has brought one, which does not expect it
    # Without marks, an iteration without a step ends with its backward: this would belong to none.
    late = deed.place in (*AFTER_BACKWARD, "after-step") and deed.turn in plan.loop.skipped
    return late and plan.loop.boundary == "none" and deed.kind in _HARMLESS


def _after_forward(deed: Deed, plan: ScriptPlan) -> Deed:
    """Have a validation of buffers that depend on a rank's batches follow a forward.

    DDP gives all ranks the first one's in a forward, and so does `restore`: before it, they differ.
    """
    has_own_buffers = deed.kind in _EVALUATING and any(map(plan.has, _OWN_BUFFERS))
    return replace(deed, place="after-backward") if has_own_buffers and deed.place == "top" else deed


def _reached(happening: Happening, loop: LoopPlan) -> Happening:
    """Return a deed or a kill at a place that its turn reaches."""
    if happening.place == "after-mark" and loop.drawn:
        return replace(happening, place="after-scheduler")
    if happening.place in _ONLY_STEPPED and happening.turn in loop.skipped:
        return replace(happening, place="after-backward")
    return happening
