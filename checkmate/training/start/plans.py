"""Rank 0's decision on how a start of training begins, as it tells all ranks. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from checkmate.nodes.standing import Shard

PlanKind = Literal["nodes", "nothing", "reset", "none", "refused"]
_START: Final = re.compile("[0-9a-f]{32}")
_CONTINUED: Final = re.compile("([0-9a-f]{32})?")
_SHOWN: Final = 200
"""Characters of a malformed message in an error."""


@dataclass(frozen=True)
class RestartPlan:
    """Rank 0's decision, for all ranks, on how this start of training begins.

    `kind` is `nodes` to resume from `iteration` of `holders`, `nothing` if no node holds anything, `reset` if
    `checkmate reset` has discarded everything and nothing has begun since, `none` if no complete state is
    available, for the reason in `trouble`, or `refused` if there is one that other ranks have left.
    """

    kind: PlanKind
    incarnation: int
    run: str
    iteration: int = -1
    holders: Mapping[Shard, list[int]] = field(default_factory=dict)
    trouble: str = ""
    generation: int = 0
    """The run's generation: a continued run keeps its own, a new one gets a greater one than all seen."""
    generation_seen: int = 0
    """The greatest generation that any node knows."""
    discarded: int = 0
    """Runs up to this generation were discarded by `checkmate reset`, on disk too; 0: none."""
    start: bytes = field(default_factory=lambda: uuid.uuid4().bytes, compare=False)
    """Identifies this start of training, because incarnations wrap and a run continues over restarts."""
    marks: bool = False
    """Whether the start before, which was refused, is known to have marked its iterations."""
    continued: bytes = b""
    """The start whose state it continues; empty for a new run."""

    @property
    def continues(self) -> bytes:
        """The start to which the state before its first iteration belongs."""
        return self.continued or self.start

    def message(self) -> dict[str, object]:
        """Return what JSON can express, for `of_message`."""
        holders = [[*shard, *nodes] for shard, nodes in self.holders.items()]
        return {
            **vars(self),
            "holders": holders,
            "start": self.start.hex(),
            "continued": self.continued.hex(),
        }

    @classmethod
    def of_message(cls, message: Any) -> RestartPlan:
        """Return the plan of a `message` of another rank. Raise `ValueError` if it is something else."""
        if not _is_plan(message):
            raise ValueError(f"not a plan: {str(message)[:_SHOWN]}")
        holders = {(group, shard): nodes for group, shard, *nodes in message["holders"]}
        starts = {name: bytes.fromhex(message[name]) for name in ("start", "continued")}
        return cls(**{**message, **starts, "holders": holders})


_SENT: Final[Mapping[str, type]] = {
    "kind": str,
    "incarnation": int,
    "run": str,
    "iteration": int,
    "holders": list,
    "trouble": str,
    "generation": int,
    "generation_seen": int,
    "discarded": int,
    "start": str,
    "continued": str,
    "marks": bool,
}
"""The keys of a plan's message, and their types in JSON."""


def _is_plan(message: Any) -> bool:
    """Return whether a message has all that a plan has, of the right types, and within their limits."""
    given = message if isinstance(message, dict) else {}
    if {name: type(value) for name, value in given.items()} != _SENT:
        return False
    numbers = all(
        isinstance(one, list) and len(one) >= 2 and all(type(number) is int for number in one)
        for one in given["holders"]
    )
    starts = _START.fullmatch(given["start"]) and _CONTINUED.fullmatch(given["continued"])
    limits = 0 <= given["incarnation"] < 256 and given["iteration"] >= -1
    return bool(numbers and starts and limits and given["kind"] in get_args(PlanKind))


def plan_new_run(incarnation: int, trouble: str, generation_seen: int = 0, discarded: int = 0) -> RestartPlan:
    """Return a plan of a new run, without the shadow nodes' state. `trouble` is the reason."""
    return RestartPlan(
        "none",
        incarnation,
        uuid.uuid4().hex,
        trouble=trouble,
        generation=generation_seen + 1,
        generation_seen=generation_seen,
        discarded=discarded,
    )


def after_disk(plan: RestartPlan, generation: int) -> RestartPlan:
    """Return the plan with a generation greater than the greatest one on disk."""
    return replace(plan, generation=max(plan.generation, generation + 1))
