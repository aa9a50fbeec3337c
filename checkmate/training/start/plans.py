"""Rank 0's decision on how a start of training begins, as it tells all ranks. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from checkmate.nodes.standing import Shard

PlanKind = Literal["nodes", "nothing", "reset", "none", "refused"]


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
        return _PlanMessage.model_validate(message).plan()


class _PlanMessage(BaseModel):
    """A `RestartPlan` as JSON expresses it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    kind: PlanKind
    incarnation: Annotated[int, Field(ge=0, lt=256)]
    run: str
    iteration: Annotated[int, Field(ge=-1)]
    holders: list[Annotated[list[int], Field(min_length=2)]]
    trouble: str
    generation: int
    generation_seen: int
    discarded: int
    start: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    continued: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]

    def plan(self) -> RestartPlan:
        """Return the plan."""
        holders = {(group, shard): nodes for group, shard, *nodes in self.holders}
        starts = {name: bytes.fromhex(getattr(self, name)) for name in ("start", "continued")}
        return RestartPlan(**{**dict(self), **starts, "holders": holders})


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
