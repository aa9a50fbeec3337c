"""Generation of scenarios from seeds, with all or some features. Pure: a seed always has the same scenario.

Each feature has its own random generator, so that excluding one does not change the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from tests.chaos.scenario import FEATURES, Event, ModelSpec, NetworkSpec, Scenario

_PARTS: Final = {
    "scalar": 0.5,
    "wide": 0.3,
    "half": 0.25,
    "float16": 0.15,
    "empty": 0.3,
    "tied": 0.3,
    "frozen": 0.4,
    "unused": 0.3,
    "sometimes": 0.2,
    "norm": 0.5,
    "embedding": 0.4,
    "dropout": 0.4,
    "buffer": 0.3,
    "groups": 0.5,
    "autocast": 0.15,
    "ema": 0.3,
    "validation": 0.3,
    "loader": 0.25,
    "scaler": 0.25,
}
"""Probability of each part of a model."""

_SHARDABLE: Final = frozenset(
    {"tied", "frozen", "unused", "sometimes", "norm", "embedding", "dropout", "buffer", "groups"}
    | {"autocast", "validation", "loader"}
)
"""Parts that FSDP2 and `protect` accept in a sharded model."""

_OPTIMIZERS: Final = (
    *("SGD", "SGD", "Adam", "AdamW", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
_SCHEDULES: Final = ("lambda", "cosine", "onecycle", "step", "warm-restarts")
_COMPOUND: Final = ("sequential", "chained", "plateau")
_RANKS: Final = (2, 2, 2, 3, 3, 4, 5)
_BY_HOSTS: Final = 0.3
"""Share of scenarios whose hosts copy gradients."""
_IN_PLACE: Final = 0.35
"""Share of scenarios whose ranks recover in place."""
_DENSE_EVENTS: Final = ("rank-kills", "rank-kills", "stalls", "stalled-kills", "shadow-kills", "closes")
_RARE_EVENTS: Final = (
    *("double-kills", "terminations", "errors", "switch-kills", "controller-kills", "links", "stalls"),
)
_OF_SWITCHES: Final = frozenset({"switch-kills", "controller-kills"})


class UnknownFeature(ValueError):
    """An unknown feature that should be excluded."""


def generate(seed: int, without: Collection[str] = ()) -> Scenario:
    """Return the scenario of a seed without these features; raise `UnknownFeature` for an unknown one."""
    if unknown := sorted(set(without) - set(FEATURES)):
        raise UnknownFeature(f"no feature {', '.join(unknown)}; there are {', '.join(FEATURES)}")
    draw = _Draw(seed, frozenset(without))
    network = _network(draw)
    model = _model(draw)
    if network.sharded:
        model = _sharded(draw, model)
    events = _events(draw, network, model.iterations)
    events += _events_in_place(draw, network, model.iterations) if network.in_place else ()
    if draw.has("lost-shards", 0.15):
        events += _lost_shards(draw.of("which lost shards"), network, model.iterations)
    return Scenario(seed, model, network, tuple(sorted(events, key=lambda event: (event.at, event.delay))))


class _Draw:
    """Random choices, each with its own generator by name."""

    def __init__(self, seed: int, without: frozenset[str]) -> None:
        self._seed, self._without = seed, without

    def of(self, name: str) -> random.Random:
        """Return the generator of that name."""
        return random.Random(f"{self._seed} {name}")

    def allows(self, feature: str) -> bool:
        """Return whether it is not excluded."""
        return feature not in self._without

    def has(self, feature: str, share: float) -> bool:
        """Return whether this scenario has a feature, given its share of all scenarios."""
        is_drawn = self.of(feature).random() < share
        return is_drawn and self.allows(feature)


def _network(draw: _Draw) -> NetworkSpec:
    network = _switched(draw)
    network = _copied_by_hosts(draw, network) if draw.has("by-hosts", _BY_HOSTS) else network
    if not draw.has("in-place", _IN_PLACE):
        return network
    recovery = "spare" if draw.has("spares", 0.6) else "in-place"
    return replace(network, recovery=recovery, keeping=draw.has("keeping", 0.5))


def _copied_by_hosts(draw: _Draw, network: NetworkSpec) -> NetworkSpec:
    """Return the network of as many shadow nodes, without a switch."""
    kinds = ["replicas", "replicas"]
    kinds += ["sharded replicas", "shards"] if draw.allows("shards") else []
    kinds += ["together"] if draw.allows("together") else []
    kind = draw.of("what hosts copy").choice(kinds)
    ranks = draw.of("ranks").choice(_RANKS)
    shapes = {
        "replicas": (ranks, 1),
        "together": (min(ranks, 3), 2),
        "sharded replicas": (2, draw.of("shards that hosts copy").choice((2, 2, 3))),
        "shards": (1, draw.of("shards that hosts copy").choice((2, 3, 4))),
    }
    return replace(
        network,
        copies="host",
        ranks=shapes[kind][0],
        shards=shapes[kind][1],
        together=kind == "together",
        switches=0,
        channels=1,
        nodes=(1,) * len(network.nodes),
        loss=0.0,
        copy_loss=0.0,
        trees=False,
    )


def _switched(draw: _Draw) -> NetworkSpec:
    nodes = draw.of("nodes").choice((1, 2, 2, 3))
    ranks = draw.of("ranks").choice(_RANKS)
    shards = draw.of("how many shards").choice((2, 2, 3)) if draw.has("shards", 0.25) else 1
    ranks = ranks if shards == 1 else min(ranks, 5 - shards)
    trees = ranks > 2 and draw.has("trees", 0.3)
    loses = not trees and draw.has("copy-loss", 0.25)
    return NetworkSpec(
        ranks=ranks,
        shards=shards,
        switches=draw.of("how many switches").choice((2, 3)) if draw.has("switches", 0.25) else 1,
        channels=2 if draw.has("channels", 0.4) else 1,
        nodes=tuple(draw.of(f"nics of {node}").choice((1, 1, 2)) for node in range(nodes)),
        replicas=2 if nodes > 1 and draw.has("replicas", 0.4) else 1,
        loss=draw.of("loss").choice((0.005, 0.01)) if draw.has("packet-loss", 0.1) else 0.0,
        copy_loss=draw.of("copy loss").choice((0.001, 0.01, 0.05)) if loses else 0.0,
        trees=trees,
        every=draw.of("every").choice((3, 10)) if draw.has("disk", 0.15) else 0,
        together=shards > 1 and draw.has("together", 0.4),
    )


def _model(draw: _Draw) -> ModelSpec:
    parts = tuple(name for name, share in _PARTS.items() if draw.has(name, share))
    if "scaler" in parts:  # a GradScaler refuses to unscale gradients of float16
        parts = tuple(name for name in parts if name != "float16")
    turned = [part for part in ("flat", "deep", "weight") if draw.of(f"turned {part}").random() < 0.6]
    iterations = draw.of("iterations").choice((30, 40, 50))
    accumulate = draw.of("micro-batches").choice((2, 3)) if draw.has("accumulate", 0.25) else 1
    fast = draw.has("fast", 0.3)
    boundaries: tuple[str, ...] = ("steps", "mark", "none")
    if {"ema", "validation"} & set(parts):  # work after the step needs a marked boundary
        boundaries = ("steps", "mark")
    if "loader" in parts:
        boundaries = ("steps",)
    optimizer, options = _optimizer(draw.of("optimizer"), half=bool({"half", "float16"} & set(parts)))
    infinite = draw.of("infinite").sample(range(iterations), 4) if "scaler" in parts else []
    return ModelSpec(
        parts=parts,
        turned=tuple(turned) if draw.has("memory-format", 0.5) else (),
        width=draw.of("width").choice((16, 24, 64, 128)),
        optimizer=optimizer,
        options=options,
        schedule=_schedule(draw),
        clip=draw.of("clip at").choice((0.05, 0.5, 5.0)) if draw.has("clip", 0.5) else 0.0,
        clip_norm=draw.of("clip norm").choice((2.0, 2.0, 1.0)),
        accumulate=accumulate,
        infinite=tuple(sorted(infinite)),
        boundary=draw.of("boundary").choice(boundaries),
        bucket_mb=draw.of("bucket").choice((0.002, 0.01, 0.05)),
        iterations=iterations * (3 if fast else 1),
        pause=0.0 if fast else draw.of("pause").choice((0.02, 0.05, 0.1)),
    )


def _sharded(draw: _Draw, model: ModelSpec) -> ModelSpec:
    """Return a model that can be sharded: without some parts, and with an optimizer that DTensor knows."""
    parts = tuple(part for part in model.parts if part in _SHARDABLE)
    options = dict(model.options)
    name = "SGD" if model.optimizer == "Rprop" else model.optimizer
    if name not in ("Adam", "AdamW") and options.pop("fused", False):
        options["foreach"] = True
    precisions: tuple[str, ...] = ("fp32",)
    if "norm" not in parts and draw.allows("low-precision"):  # BatchNorm's buffers stay fp32
        precisions = ("fp32", "bf16", "bf16-gradients")
    return replace(
        model,
        parts=parts,
        turned=(),
        optimizer=name,
        options=options,
        infinite=(),
        precision=draw.of("precision").choice(precisions),
    )


def _schedule(draw: _Draw) -> str:
    if draw.has("compound", 0.2):
        return draw.of("which compound").choice(_COMPOUND)
    return draw.of("which schedule").choice(_SCHEDULES) if draw.has("schedule", 0.6) else "none"


def _optimizer(draw: random.Random, *, half: bool) -> tuple[str, dict[str, Any]]:
    """Return a class and options with which training does not diverge."""
    name = draw.choice(_OPTIMIZERS)
    options: dict[str, Any] = {"lr": draw.choice((0.01, 0.003))}
    if name == "SGD":
        options |= {"momentum": draw.choice((0.0, 0.9))}
        options |= {"nesterov": bool(options["momentum"]) and draw.random() < 0.5}
    if name == "RMSprop":
        options |= {"momentum": draw.choice((0.0, 0.5)), "centered": draw.random() < 0.5}
    if name in ("Adam", "AdamW"):
        options |= {"amsgrad": draw.random() < 0.4, "betas": (0.8, 0.95)}
    if name != "Rprop":  # which has neither
        options |= {"weight_decay": draw.choice((0.0, 0.01)), "maximize": draw.random() < 0.1}
    if options.get("maximize"):
        options["lr"] = 0.0001  # otherwise it soon results in NaN, which hides differences
    ways = ["foreach", "neither"] + (["fused"] if name in ("SGD", "Adam", "AdamW", "Adagrad") else [])
    way = draw.choice(ways)
    if way == "fused" and half:
        way = "foreach"  # refused: fused SGD with momentum of 16-bit parameters
    if way == "fused" and options.get("momentum"):
        way = "foreach"  # torch's fused SGD fails if only some parameters have momentum yet
    options["foreach"] = way == "foreach"
    if "fused" in ways:
        options["fused"] = way == "fused"
    return name, options


def _events(draw: _Draw, network: NetworkSpec, iterations: int) -> tuple[Event, ...]:
    """Return one to four incidents in order; some consist of two events."""
    choices = draw.of("events")
    events: list[Event] = []
    rare = _RARE_EVENTS if network.switches else [kind for kind in _RARE_EVENTS if kind not in _OF_SWITCHES]
    for index in range(choices.choice((1, 2, 2, 3, 4))):
        kind = choices.choice(_DENSE_EVENTS if choices.random() < 0.7 else rare)
        incident = _happening(kind, draw.of(f"event {index}"), network, iterations)
        if any(event.kind in ("close", "error") and event.at == incident[0].at for event in events):
            continue  # each rank carries these out by itself: of two at once, some ranks would do but one
        if draw.allows(kind) and (kind != "stalled-kills" or draw.allows("stalls")):
            events += incident
    return tuple(events)


def _lost_shards(draw: random.Random, network: NetworkSpec, iterations: int) -> tuple[Event, ...]:
    """Return kills of a shadow node and a rank at the same time."""
    at, seconds = draw.randrange(iterations // 2, iterations - 4), round(draw.uniform(0.2, 3), 2)
    node, rank = f"shadow{draw.randrange(len(network.nodes))}", f"rank{draw.randrange(network.world)}"
    return Event(at, "kill", node, 0.0, seconds), Event(at, "kill", rank, 0.005)


def _events_in_place(draw: _Draw, network: NetworkSpec, iterations: int) -> tuple[Event, ...]:
    """Return one or two more incidents, which only recovery in place has."""
    choices = draw.of("events in place")
    events: list[Event] = []
    for index in range(choices.choice((1, 1, 2))):
        kinds = ["recovery-kills", "recovery-kills", "host-kills"]
        kind = choices.choice([*kinds, *(["spare-kills"] if network.recovery == "spare" else [])])
        incident = _happening_in_place(kind, draw.of(f"event in place {index}"), network, iterations)
        events += incident if draw.allows(kind) else []
    return tuple(events)


def _happening_in_place(kind: str, draw: random.Random, network: NetworkSpec, iterations: int) -> list[Event]:
    at, delay = draw.randrange(2, iterations - 4), round(draw.uniform(0, 0.1), 3)
    ranks = [f"rank{draw.randrange(network.world)}" for _ in range(3)]
    seconds = [round(draw.uniform(0, 2 if network.recovery == "spare" else 5), 2) for _ in range(2)]
    first = Event(at, "kill", ranks[0], delay)
    if kind == "recovery-kills":
        later = zip(ranks[1:], seconds[: draw.choice((1, 1, 2))], strict=False)
        return [first, *(Event(at, "kill", rank, round(delay + after, 3)) for rank, after in later)]
    host = draw.randrange(network.by_host[0])
    if kind == "host-kills":
        return [Event(at, "kill", f"host{host}", delay, draw.choice((0.2, 1.0, 3.0)))]
    spare = Event(at, "kill", f"spare{host}", delay)
    return [spare, first] if draw.random() < 0.6 else [spare]


def _happening(kind: str, draw: random.Random, network: NetworkSpec, iterations: int) -> list[Event]:
    at = draw.randrange(1, iterations - 4) if draw.random() < 0.9 else 0
    delay = round(draw.choice((0.0, 0.0, draw.uniform(0, 0.1))), 3)
    rank, second_rank = (f"rank{draw.randrange(network.world)}" for _ in range(2))
    node = f"shadow{draw.randrange(len(network.nodes))}"
    switch = f"tor{draw.randrange(network.switches)}" if network.switches else node
    seconds = round(draw.choice((0.2, 0.5, draw.uniform(0.5, 2), draw.uniform(2, 6))), 2)
    if kind == "rank-kills":
        return [Event(at, "kill", rank, delay)]
    if kind == "double-kills":
        return [Event(at, "kill", rank, delay), Event(at, "kill", second_rank, delay + min(seconds, 2.5))]
    if kind == "terminations":
        return [Event(at, "terminate", rank, delay)]
    if kind == "errors":
        return [Event(at, "error", rank)]
    if kind == "closes":
        return [Event(at, "close", "job")]
    if kind == "stalls":
        target = draw.choice((node, node, rank, switch))
        return [Event(at, "stall", target, delay, seconds)]
    if kind == "stalled-kills":
        after = round(delay + draw.uniform(0, seconds), 3)
        return [Event(at, "stall", node, delay, seconds), Event(at, "kill", rank, after)]
    if kind == "shadow-kills":
        return [Event(at, "kill", node, delay, seconds)]
    if kind == "switch-kills":
        return [Event(at, "kill", switch, delay, min(seconds, 2.0))]
    if kind == "controller-kills":
        return [Event(at, "kill", "ctl", delay, seconds)]
    target = draw.choice((rank, node))
    return [Event(at, "down", target, delay, min(seconds, 3.0))]
