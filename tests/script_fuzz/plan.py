"""Plans of training scripts: what a script does in each turn of its loop, and when its ranks die. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

PARTS: Final[Mapping[str, str]] = {
    "shared": "a module that is applied twice",
    "tied": "two layers with one weight",
    "parametrized": "weight_norm by torch.nn.utils.parametrizations",
    "spectral": "spectral_norm, whose buffers each forward changes",
    "frozen": "a frozen parameter, which the optimizer has",
    "empty": "a parameter without elements",
    "norm": "BatchNorm",
    "dropout": "dropout",
    "many": "twelve more parameters, so that samples do not cover all",
    "sometimes": "a layer that every other turn leaves out",
    "wide": "a parameter in float64",
    "growing": "a buffer that each forward makes longer",
    "retyped": "buffers that become int64 and float64 in the third forward",
    "negative-zero": "a buffer of zeros whose sign each forward changes",
    "hidden": "a non-persistent buffer",
    "extra-counter": "get_extra_state with a counter",
    "extra-tensor": "get_extra_state with a tensor",
    "hooked": "a parameter with a hook that halves its gradient before the reduction",
    "lazy": "a buffer that is None before the first forward",
    "sparse": "an embedding with sparse gradients",
    "max-norm": "an embedding whose forward makes rows shorter",
}
"""Parts of models."""

PLACES: Final = (
    *("top", "before-backward", "after-backward", "before-step"),
    *("after-step", "after-scheduler", "after-mark"),
)
"""Places of a turn, in their order; `after-mark` is also where `steps` draws the next turn."""
AFTER_BACKWARD: Final = ("after-backward", "before-step")
UP_TO_STEP: Final = PLACES[:4]
IN_TURN: Final = PLACES[:6]

DEEDS: Final[Mapping[str, str]] = {
    "param-step": "p.sub_(lr * p.grad) by hand",
    "param-clamp": "all parameters clamped",
    "param-reinit": "a parameter drawn again",
    "param-element": "an element of a parameter changed",
    "param-data": "a parameter changed through .data",
    "param-load": "load_state_dict with smaller values",
    "param-swap": "parameters swapped by copies for others in validation, and back",
    "param-exchange": "the same by exchange of .data",
    "param-replaced": "another parameter in place of one",
    "param-moved": "a parameter's .data replaced by a clone",
    "param-reloaded": "load_state_dict of the model's own state",
    "frozen-write": "a frozen parameter changed in place",
    "grad-scale": "all gradients halved",
    "grad-noise": "noise added to all gradients",
    "grad-one": "an element of a gradient changed",
    "grad-dropped": "a gradient set to None",
    "buffer-write": "a buffer changed by hand",
    "freeze": "a parameter that needs no gradient from now on",
    "unfreeze": "a frozen parameter that needs one from now on",
    "rate-set": "the learning rate set by hand",
    "momentum-set": "momentum or betas set by hand",
    "optimizer-replaced": "a new optimizer, in place of the protected one",
    "optimizer-second": "a second optimizer steps the same parameters in every other turn",
    "optimizer-reloaded": "load_state_dict of the optimizer's own state",
    "group-added": "a parameter group added",
    "group-removed": "a parameter group removed",
    "hook-clamp": "a hook after the optimizer's step clamps parameters; if `target` is odd, of after protect",
    "hook-scale": "a hook before the optimizer's step halves gradients; likewise",
    "state-cleared": "the optimizer's state cleared",
    "state-entry": "an entry of the optimizer's state changed",
    "step-closure": "optimizer.step(closure)",
    "backward-second": "a second synchronising backward before the step",
    "step-second": "another forward, backward and step in the same turn",
    "forward-discarded": "a forward in training whose result is not used",
    "forward-evaluating": "a forward in validation, of a random batch",
}
"""What scripts do by hand at a place of a turn."""


@dataclass(frozen=True)
class ModelPlan:
    """The model. `parts` are names in PARTS.

    `ddp` has options of DDP: views (gradients are views of buckets), own-buffers (ranks have their own),
    buckets (many small ones).
    """

    parts: tuple[str, ...] = ()
    width: int = 6
    ddp: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer. `way`: foreach, fused or neither."""

    kind: str = "SGD"
    way: str = "neither"
    groups: int = 1


@dataclass(frozen=True)
class LoopPlan:
    """The training loop.

    Attributes:
        boundary: steps, mark or none.
        micro: The number of micro-batches of a turn.
        drawn: Whether each micro-batch is drawn from `steps`; otherwise each turn.
        epoch: The number of turns of a loop with `steps`, after which validation and the scheduler follow; if
            it is 0, there is one loop.
        breaks: Whether the script leaves its loop by `break`.
        zero: When zero_grad is called: at the end or the top of a turn, before its (first) backward, or
            `zeros`: at the end, to zeros.
        skipped: Turns without a step.
        overflows: Turns with an infinite loss, if there is a scaler.
        scheduler: none, step, lambda, cosine or cycle.
        scaler: none, given or forgotten.
        extra: none, counter or ema.
        clip: none, ours or torch.
        validation: Whether each turn ends with a validation that draws random numbers.
        end: How the script ends the protection: close, with or exit.
    """

    boundary: str = "steps"
    micro: int = 1
    drawn: bool = False
    epoch: int = 0
    breaks: bool = False
    zero: str = "end"
    skipped: tuple[int, ...] = ()
    overflows: tuple[int, ...] = ()
    scheduler: str = "none"
    scheduler_given: bool = True
    scaler: str = "none"
    extra: str = "none"
    clip: str = "none"
    validation: bool = False
    end: str = "close"


@dataclass(frozen=True)
class Deed:
    """Something done by hand; `target` selects a parameter, a buffer or a variant."""

    kind: str
    turn: int
    place: str
    target: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.target} in turn {self.turn}, {self.place}"


@dataclass(frozen=True)
class Kill:
    """SIGKILL of `ranks` by themselves at a place, after `delay` s.

    `lone`: the other rank is not killed, and ends by an error.
    """

    turn: int
    place: str
    ranks: tuple[int, ...] = (0,)
    delay: float = 0.0
    lone: bool = False

    def __str__(self) -> str:
        ranks_text = " and ".join(map(str, self.ranks)) + (" alone" if self.lone else "")
        return f"kill {ranks_text} in turn {self.turn}, {self.place}" + (
            f" + {self.delay} s" if self.delay else ""
        )


@dataclass(frozen=True)
class ScriptPlan:
    """A script, and what happens to its ranks. After an error it is started again `restarts` times.

    `copies`: the job's way of copies, switch or host.
    """

    seed: int = 0
    turns: int = 6
    model: ModelPlan = ModelPlan()
    optimizer: OptimizerPlan = OptimizerPlan()
    loop: LoopPlan = LoopPlan()
    deeds: tuple[Deed, ...] = ()
    kills: tuple[Kill, ...] = ()
    nodes: int = 1
    restarts: int = 3
    copies: str = "switch"

    def has(self, part: str) -> bool:
        """Return whether the model has a part."""
        return part in self.model.parts

    def does(self, kind: str) -> bool:
        """Return whether the script does something of this kind."""
        return any(deed.kind == kind for deed in self.deeds)

    @property
    def leaves_out(self) -> bool:
        """Whether some forwards do not use all parameters, which DDP has to look for."""
        return self.has("sometimes") or self.does("freeze") or self.does("param-replaced")

    def to_json(self) -> str:
        """Return JSON for `from_json`, without values that are the default."""
        return json.dumps(_without_defaults(asdict(self), asdict(ScriptPlan())))

    @classmethod
    def from_json(cls, text: str) -> ScriptPlan:
        """Return the plan that `to_json` wrote."""
        data = json.loads(text)
        return cls(
            **data
            | {
                "model": ModelPlan(**_tuples(data.get("model", {}))),
                "optimizer": OptimizerPlan(**data.get("optimizer", {})),
                "loop": LoopPlan(**_tuples(data.get("loop", {}))),
                "deeds": tuple(Deed(**deed) for deed in data.get("deeds", ())),
                "kills": tuple(Kill(**_tuples(kill)) for kill in data.get("kills", ())),
            }
        )

    def describe(self) -> str:
        """Return the plan in words, without what is the default."""
        loop, default = self.loop, LoopPlan()
        words = [f"{name}={value}" for name, value in asdict(loop).items() if value != getattr(default, name)]
        optimizer = self.optimizer
        lines = [
            f"{self.turns} turns of {', '.join(self.model.parts + self.model.ddp) or 'a plain model'}",
            f"{optimizer.kind} ({optimizer.way}, groups: {optimizer.groups}), {' '.join(words) or 'steps'}",
            *([f"copies by {self.copies}"] if self.copies != "switch" else []),
            *map(str, self.deeds),
            *map(str, self.kills),
        ]
        return "; ".join(lines)


def _without_defaults(data: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in data.items():
        if isinstance(value, dict):
            value = _without_defaults(value, default[name])  # noqa: PLW2901
            if not value:
                continue
        elif value == default[name]:
            continue
        result[name] = value
    return result


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
