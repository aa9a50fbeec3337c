"""Trainings of any kind with PyTorch's own optimizer, and their messages to shadow nodes.

`AnyTraining.iterate` runs one iteration and returns the gradients, in buckets, and the record's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from checkmate.optim.supported import SUPPORTED, beginnings, options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import DTYPES, dtype_name, to_held
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter

State = dict[int, tuple[torch.Tensor, dict[str, object]]]

SHAPES: Sequence[tuple[int, ...]] = (
    *((), (), (0,), (1,), (1, 1), (3, 0), (2,), (5,), (65,), (129,), (193,)),
    *((4, 3), (1, 9), (33, 5), (3, 2, 2, 2), (2, 3, 1, 4, 2)),
)
TYPES = ("float32", "float64", "bfloat16", "float16")
MOMENTUM = ("torch.optim.SGD", "torch.optim.RMSprop")
FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW", "torch.optim.Adagrad")


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter: its shape and type, and the order of its dimensions in memory, the outermost first."""

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Iteration:
    """An iteration. `clipped` has the parameters to clip, possibly repeated; `None` for no clipping."""

    without: frozenset[int] = frozenset()
    clipped: tuple[int, ...] | None = None
    norm: float = 2.0
    infinite: bool = False
    unscaled: bool = False
    skipped: bool = False


@dataclass(frozen=True)
class TrainingPlan:
    """A model, an optimizer, and its iterations."""

    parameters: tuple[ParameterPlan, ...]
    optimizer: str
    options: tuple[dict[str, Any], ...]
    """Options of each parameter group."""
    flags: dict[str, bool]
    """The implementation."""
    iterations: tuple[Iteration, ...]
    scaled: bool = False
    threads: int = 1
    default: str = "float32"
    shards: int = 1
    bucket_bytes: int = 4000
    seeded: int = 0
    """Number of iterations before replicas are seeded."""
    schedule: tuple[float, ...] = field(default=(1.0, 0.7))


@contextmanager
def torch_with(threads: int, default: str) -> Iterator[None]:
    """Set PyTorch's options for a while, like a script."""
    before = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(threads)
    torch.set_default_dtype(DTYPES[default])
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])


class AnyTraining:
    """Parameters, and PyTorch's optimizer of all of them."""

    def __init__(self, plan: TrainingPlan, seed: int = 0) -> None:
        self.plan = plan
        self._random = torch.Generator().manual_seed(seed)
        self.parameters = [nn.Parameter(self._noise(parameter_plan)) for parameter_plan in plan.parameters]
        parameters = [
            Parameter.of(f"p{i}", p.shape, p.stride(), dtype_name(p.dtype))
            for i, p in enumerate(self.parameters)
        ]
        self.layout: Layout = make_layout(parameters, plan.shards, plan.bucket_bytes)
        groups: list[dict[str, Any]] = [
            {
                **options,
                "params": [p for p, o in zip(self.parameters, plan.parameters, strict=True) if o.group == i],
            }
            for i, options in enumerate(plan.options)
        ]
        kind: Any = SUPPORTED[plan.optimizer]
        with torch_with(plan.threads, plan.default):
            self.optimizer: torch.optim.Optimizer = kind([g for g in groups if g["params"]], **plan.flags)
            self.spec = spec_of(self.optimizer, {p: i for i, p in enumerate(self.parameters)})
            self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**5, enabled=plan.scaled)
            self._scaler.scale(torch.ones(()))
        self.iteration = -1

    def iterate(self) -> tuple[dict[int, torch.Tensor], pb.Step]:
        """Run one iteration; return the reduced gradients and the record's step."""
        self.iteration += 1
        doing, step = self.plan.iterations[self.iteration], pb.Step()
        buckets = self._backward(doing)
        with torch_with(self.plan.threads, self.plan.default):
            self._step(doing, step)
        step.without_gradient.extend(doing.without)
        for group, factor in zip(self.optimizer.param_groups, itertools.cycle(self.plan.schedule)):
            group["lr"] = group["lr"] * factor
        return buckets, step

    def state(self) -> State:
        """Return the expected state of shadow nodes."""
        return {
            number: to_held(
                self.layout.parameters[number],
                parameter.detach().clone(),
                {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in self.optimizer.state.get(parameter, {}).items()
                },
            )
            for number, parameter in enumerate(self.parameters)
        }

    def _noise(self, parameter_plan: ParameterPlan) -> torch.Tensor:
        values = torch.randn(parameter_plan.shape, generator=self._random).to(DTYPES[parameter_plan.dtype])
        back = [parameter_plan.order.index(d) for d in range(len(parameter_plan.shape))]
        return values.permute(parameter_plan.order).contiguous().permute(back)

    def _backward(self, doing: Iteration) -> dict[int, torch.Tensor]:
        flat = {}
        for number, (parameter, parameter_plan) in enumerate(
            zip(self.parameters, self.plan.parameters, strict=True)
        ):
            gradient = self._noise(parameter_plan)
            if doing.infinite and number == 0 and gradient.numel():
                gradient.view(-1)[0] = torch.inf if gradient.is_contiguous() else 0
            parameter.grad = None if number in doing.without else gradient.clone()
            flat[number] = to_held(self.layout.parameters[number], gradient, {})[0].reshape(-1)
        return {
            index: torch.cat([flat[place.parameter] for place in bucket.places])
            for index, bucket in enumerate(self.layout.buckets)
        }

    def _step(self, doing: Iteration, step: pb.Step) -> None:
        """Step like a user's script, and record it like a trainer."""
        scaler, fused = self._scaler, bool(self.plan.flags.get("fused"))
        scale = torch.tensor(scaler.get_scale(), dtype=torch.float32)
        if self.plan.scaled and (doing.unscaled or not fused):
            scaler.unscale_(self.optimizer)
            inverse = scale.double().reciprocal().float()
            step.scalings.add(kind=pb.Scaling.UNSCALE, factor=inverse.item())
        if doing.clipped is not None:
            self._clip(doing, step)
        if doing.skipped:
            step.skipped = True
            if step.scalings and step.scalings[0].kind == pb.Scaling.UNSCALE:
                scaler.update(scale.item())
            return
        noted = self.optimizer.register_step_pre_hook(lambda optimizer, *_: _note(optimizer, step))
        scaler.step(self.optimizer)  # which is only the optimizer's if the scaler is disabled
        noted.remove()
        if self.plan.scaled:
            infinities = scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
            step.skipped = any(bool(tensor) for tensor in infinities.values())
            if fused and not doing.unscaled:
                step.scalings.add(kind=pb.Scaling.FUSED, factor=scale.item())
            scaler.update(scale.item())

    def _clip(self, doing: Iteration, step: pb.Step) -> None:
        assert doing.clipped is not None
        clipped = [self.parameters[number] for number in doing.clipped]
        norm = torch.nn.utils.clip_grad_norm_(clipped, 0.5, doing.norm)
        if all(p.grad is None for p in clipped):
            return
        factor = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
        is_whole = sorted(doing.clipped) == [*range(len(self.parameters))]
        step.scalings.add(
            kind=pb.Scaling.CLIP,
            factor=factor.item(),
            dtype=dtype_name(factor.dtype),
            parameters=() if is_whole else sorted(doing.clipped),
        )


def _note(optimizer: torch.optim.Optimizer, step: pb.Step) -> None:
    """Record the optimizer before its step, like a trainer."""
    step.options.extend(options_of(group) for group in optimizer.param_groups)
    step.beginnings.extend(beginnings(optimizer))


@st.composite
def plans(draw: st.DrawFn) -> TrainingPlan:
    """Return trainings that PyTorch itself supports."""
    name = draw(st.sampled_from(sorted(SUPPORTED)))
    flags = draw(st.sampled_from([{}, {"foreach": True}, {"foreach": False}, {"fused": True}]))
    if "fused" in flags and name not in FUSED:
        flags = {}
    fused = "fused" in flags
    momentum = draw(st.sampled_from([0.0, 0.9])) if name in MOMENTUM else None
    scaled = draw(st.booleans())
    types = [parameter_plan for parameter_plan in TYPES if not (scaled and parameter_plan == "float16")]
    if fused and momentum and name == "torch.optim.SGD":
        types = ["float32", "float64"]
    types = draw(st.lists(st.sampled_from(types), min_size=1, max_size=3))
    groups = draw(st.integers(1, 3))
    parameter_plans = []
    for shape in [(2,), *draw(st.lists(st.sampled_from(SHAPES), max_size=7))]:
        order = tuple(draw(st.permutations(range(len(shape)))))
        parameter_plans.append(
            ParameterPlan(shape, draw(st.sampled_from(types)), order, draw(st.integers(0, groups - 1)))
        )
    numbers = st.integers(0, len(parameter_plans) - 1)
    empty = any(
        0 in parameter_plan.shape for parameter_plan in parameter_plans
    )  # PyTorch has no maximum norm without gradients
    several = fused and momentum is not None  # PyTorch fails if some lack momentum
    iterations = tuple(
        Iteration(
            without=frozenset() if several else draw(st.frozensets(numbers, max_size=2)) - {0},
            clipped=draw(
                st.none()
                | st.just(tuple(range(len(parameter_plans))))
                | st.lists(numbers, min_size=1, max_size=4).map(tuple)
            ),
            norm=draw(st.sampled_from([2.0, 1.0] if empty else [2.0, torch.inf])),
            infinite=scaled and not several and draw(st.integers(0, 3)) == 0,
            unscaled=draw(st.booleans()),
            skipped=draw(st.integers(0, 4)) == 0,
        )
        for i in range(draw(st.integers(1, 5)))
    )
    tensor = draw(st.sampled_from([None, torch.float32, torch.float64])) if not flags.get("foreach") else None
    options = tuple(dict(_options(draw, name, momentum, tensor)) for _ in range(groups))
    return TrainingPlan(
        tuple(parameter_plans),
        name,
        options,
        dict(flags),
        iterations,
        scaled=scaled,
        threads=draw(st.sampled_from([1, 2, 3])),
        default=draw(st.sampled_from(["float32", "float32", "float64", "bfloat16"])),
        shards=draw(st.integers(1, 3)),
        bucket_bytes=draw(st.sampled_from([1, 400, 4000])),
        seeded=draw(st.integers(0, len(iterations) - 1)),
    )


def _options(
    draw: st.DrawFn, name: str, momentum: float | None, tensor: torch.dtype | None
) -> Mapping[str, Any]:
    """Return the options of one parameter group."""
    rate = draw(st.sampled_from([0.1, 0.013]))
    options: dict[str, Any] = {"lr": rate if tensor is None else torch.tensor(rate, dtype=tensor)}
    options["maximize"] = draw(st.booleans())
    if name != "torch.optim.Rprop":
        options["weight_decay"] = draw(st.sampled_from([0.0, 0.01]))
    if momentum is not None:
        options["momentum"] = momentum
    if name == "torch.optim.SGD" and momentum:
        options["nesterov"] = draw(st.booleans())
    if name in ("torch.optim.Adam", "torch.optim.AdamW"):
        options["amsgrad"] = draw(st.booleans())
        options["eps"] = 1e-4
    if name == "torch.optim.RMSprop":
        options["centered"] = draw(st.booleans())
    if name in ("torch.optim.NAdam", "torch.optim.RAdam"):
        options["decoupled_weight_decay"] = draw(st.booleans())
    if name == "torch.optim.ASGD":
        options["t0"] = draw(st.sampled_from([1.0, 1e6]))
    return options
