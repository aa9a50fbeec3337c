"""The schedule of a game day: incidents drawn from a seed. Pure.

Every kind of incident comes once before any comes again. Two incidents of different jobs may come together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from tests.gameday.acts import Act, Incident
from tests.gameday.parties import CABLES, CONTROLLERS, PARTIES, SWITCHES, Party

Maker = Callable[[random.Random, Party], list[Act]]
_TOGETHER: Final = 0.35
"""Share of a job's incidents that come with one of another job."""


def schedule(seed: int, *, kinds: tuple[str, ...] = ()) -> Iterator[Incident]:
    """Yield incidents without end, of these kinds only if any are given."""
    draw = random.Random(seed)
    kinds_drawn = kinds or (*OF_A_JOB, *OF_THE_FABRIC)
    while True:
        deck = list(kinds_drawn)
        draw.shuffle(deck)
        while deck:
            kind = deck.pop()
            if kind in OF_THE_FABRIC:
                yield Incident(kind, _in_order(OF_THE_FABRIC[kind](draw, draw.choice([*PARTIES.values()]))))
                continue
            first, second = draw.sample([*PARTIES.values()], 2)
            acts, name = OF_A_JOB[kind](draw, first), f"{first.name}: {kind}"
            candidates = [second_kind for second_kind in deck if second_kind in OF_A_JOB]
            if candidates and draw.random() < _TOGETHER:
                second_kind = candidates[-1]
                deck.remove(second_kind)
                acts += _later(OF_A_JOB[second_kind](draw, second), round(draw.uniform(0, 2), 2))
                name += f", {second.name}: {second_kind}"
            yield Incident(name, _in_order(acts))


def _in_order(acts: list[Act]) -> tuple[Act, ...]:
    return tuple(sorted(acts, key=lambda act: act.at))


def _later(acts: list[Act], seconds: float) -> list[Act]:
    return [Act(round(act.at + seconds, 2), act.kind, act.who, act.seconds) for act in acts]


def _rank(draw: random.Random, job: Party) -> str:
    return f"{job.name}.rank{draw.randrange(job.network.world)}"


def _node(draw: random.Random, job: Party) -> str:
    return f"{job.name}.shadow{draw.choice(job.nodes)}"


def _holders(draw: random.Random, job: Party) -> list[str]:
    """Return the holders of one shard."""
    return [f"{job.name}.shadow{node}" for node in sorted(draw.choice([*job.shards().values()]))]


def _killed_rank(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "kill", _rank(draw, job))]


def _stalled_rank(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "stall", _rank(draw, job), round(draw.uniform(1, 5), 2))]


def _short_node(draw: random.Random, job: Party) -> list[Act]:
    """One holder dies, and then a rank: the other holder has everything."""
    after = round(draw.uniform(0, 1), 2)
    return [Act(0, "kill", _node(draw, job), 2.0), Act(after, "kill", _rank(draw, job))]


def _long_node(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "kill", _node(draw, job), 12.0)]


def _stalled_node(draw: random.Random, job: Party) -> list[Act]:
    """A rank dies while a node is stopped."""
    seconds = round(draw.uniform(2, 8), 2)
    after = round(draw.uniform(0, seconds), 2)
    return [Act(0, "stall", _node(draw, job), seconds), Act(after, "kill", _rank(draw, job))]


def _lost_shard(draw: random.Random, job: Party) -> list[Act]:
    """Both holders of a shard die, and then a rank: what is left is on disk."""
    kills = [Act(0, "kill", node, 2.0) for node in _holders(draw, job)]
    return [*kills, Act(0.4, "kill", _rank(draw, job))]


def _no_holder(draw: random.Random, job: Party) -> list[Act]:
    """Both holders of a shard are away until the alert has fired; training goes on."""
    return [Act(0, "kill", node, 26.0) for node in _holders(draw, job)]


def _node_link(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "down", _node(draw, job), round(draw.uniform(0.5, 3), 2))]


def _full_disk(draw: random.Random, job: Party) -> list[Act]:
    """Checkpoints cannot be written while a rank dies."""
    return [Act(0, "fill", f"{job.name}.disk", 10.0), Act(4, "kill", _rank(draw, job))]


def _full_for_long(draw: random.Random, job: Party) -> list[Act]:
    """Checkpoints cannot be written until the alert has fired."""
    return [Act(0, "fill", f"{job.name}.disk", 110.0)]


def _full_log(draw: random.Random, job: Party) -> list[Act]:
    """A node begins on a full disk."""
    return [Act(0, "fill", f"{job.name}.events", 8.0), Act(1, "kill", f"{job.name}.shadow0", 2.0)]


def _primary(draw: random.Random, job: Party) -> list[Act]:
    """The standby connects a node that comes back."""
    return [Act(0, "kill", "primary", 6.0), Act(1, "kill", _node(draw, job), 1.5)]


def _no_controller(draw: random.Random, job: Party) -> list[Act]:
    """Nobody serves; a rank that dies meanwhile is restarted, but its streams wait."""
    return [Act(0, "kill", controller, 16.0) for controller in CONTROLLERS]


def _short_switch(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "kill", draw.choice(SWITCHES), round(draw.uniform(0.5, 2), 2))]


def _long_switch(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "kill", draw.choice(SWITCHES), 26.0)]


def _cable(draw: random.Random, job: Party) -> list[Act]:
    return [Act(0, "down", draw.choice(CABLES), round(draw.uniform(0.5, 3), 2))]


OF_A_JOB: Final[dict[str, Maker]] = {
    "killed rank": _killed_rank,
    "stalled rank": _stalled_rank,
    "killed node": _short_node,
    "node away": _long_node,
    "stalled node": _stalled_node,
    "lost shard": _lost_shard,
    "shard without holder": _no_holder,
    "node's link": _node_link,
    "full disk": _full_disk,
    "disk full for long": _full_for_long,
    "full event log": _full_log,
}
OF_THE_FABRIC: Final[dict[str, Maker]] = {
    "killed primary": _primary,
    "no controller": _no_controller,
    "restarted switch": _short_switch,
    "switch away": _long_switch,
    "cable": _cable,
}
