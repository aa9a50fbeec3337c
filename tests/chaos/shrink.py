"""Reduction of a failing scenario by one event or feature at a time, while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.chaos.run import TrialOutcome
from tests.chaos.scenario import Event, ModelSpec, NetworkSpec, Scenario

_TRIES = 2
"""Runs of a smaller scenario before it counts as passing, because the timing of faults varies."""


def shrink(
    scenario: Scenario,
    attempt: Callable[[Scenario], TrialOutcome],
    say: Callable[[str], None] = lambda _: None,
) -> TrialOutcome | None:
    """Return the outcome of the smallest failing scenario; `None` if the original one passes."""
    smallest = _fails(scenario, attempt)
    failing = smallest
    while failing is not None:
        failing = None
        for feature, smaller in smaller_ones(smallest.scenario if smallest else scenario):
            failing = _fails(smaller, attempt)
            say(f"without {feature}: {'still fails' if failing else 'passes'}")
            if failing is not None:
                smallest = failing
                break
    return smallest


def smaller_ones(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Yield scenarios without one event or feature, with its name. Pure."""
    model, network, events = scenario.model, scenario.network, scenario.events
    for number, event in enumerate(events):
        yield f"event {event}", replace(scenario, events=events[:number] + events[number + 1 :])
    for part in model.parts:
        fewer = tuple(kept_part for kept_part in model.parts if kept_part != part)
        infinite = () if part == "scaler" else model.infinite
        yield part, replace(scenario, model=replace(model, parts=fewer, infinite=infinite))
    plain = ModelSpec(optimizer=model.optimizer, options=model.options)
    for name in ("turned", "schedule", "clip", "accumulate", "precision", "boundary"):
        if getattr(model, name) != getattr(plain, name):
            yield name, replace(scenario, model=replace(model, **{name: getattr(plain, name)}))
    for name in ("loss", "every", "channels", "replicas", "keeping", *_recovery(events)):
        if getattr(network, name) != getattr(NetworkSpec(), name):
            smaller = replace(network, **{name: getattr(NetworkSpec(), name)})
            yield name, replace(scenario, network=smaller)
    if network.together:
        yield "one model of all", replace(scenario, network=replace(network, together=False))
    targets = {event.who for event in events}
    least_ranks = 1 + max(
        (int(target.removeprefix("rank")) for target in targets if target.startswith("rank")), default=0
    )
    if network.shards > 1 and least_ranks <= network.ranks * (network.shards - 1):
        yield "a shard", replace(scenario, network=replace(network, shards=network.shards - 1))
    if network.ranks > 2 and least_ranks <= (network.ranks - 1) * network.shards:
        yield "a rank", replace(scenario, network=replace(network, ranks=network.ranks - 1))
    if network.switches > 1 and f"tor{network.switches - 1}" not in targets:
        yield "a switch", replace(scenario, network=replace(network, switches=network.switches - 1))
    last = len(network.nodes) - 1
    if last >= network.replicas and f"shadow{last}" not in targets:
        yield "a shadow node", replace(scenario, network=replace(network, nodes=network.nodes[:-1]))


def _recovery(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the name of the way to recover, unless an event needs it."""
    return () if any(event.who.startswith(("host", "spare")) for event in events) else ("recovery",)


def _fails(scenario: Scenario, attempt: Callable[[Scenario], TrialOutcome]) -> TrialOutcome | None:
    for _ in range(_TRIES):
        outcome = attempt(scenario)
        if not outcome.has_passed:
            return outcome
    return None
