"""Rank 0's decision on how a start of training begins, as it tells all ranks. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, TypeVar

from checkmate.nodes.standing import Shard

_START: Final = re.compile("[0-9a-f]{32}")
_CONTINUED: Final = re.compile("([0-9a-f]{32})?")
_HEX: Final = re.compile("([0-9a-f]{2})*")
_MAX_SHOWN: Final = 200
"""Characters of a malformed message in an error."""


@dataclass(frozen=True, kw_only=True)
class PlannedStart:
    """The fields that all ways to begin have in common."""

    kind: ClassVar[str]
    """Tells the classes apart in a message."""

    incarnation: int
    run: str
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

    @property
    def continues(self) -> bytes:
        """The start to which the state before its first iteration belongs."""
        return self.start

    def message(self) -> dict[str, Any]:
        """Return what JSON can express, for `from_message`. All kinds have the same keys."""
        return {"kind": self.kind, **_ABSENT, **vars(self), "start": self.start.hex()}


@dataclass(frozen=True, kw_only=True)
class FromNodes(PlannedStart):
    """Resume from an iteration that is complete on the shadow nodes."""

    kind = "nodes"

    iteration: int
    """-1: from before the first one."""
    holders: Mapping[Shard, list[int]]
    """The nodes that have its state, by shard."""
    continued: bytes = b""
    """The start whose state it continues."""
    former: bytes = b""
    """The ranks whose state it is, a serialized `JobRanks`; empty: the job's present ones."""

    @property
    def continues(self) -> bytes:
        """The start to which the state before its first iteration belongs."""
        return self.continued or self.start

    def message(self) -> dict[str, Any]:
        """Return what JSON can express, for `from_message`."""
        holders = [[*shard, *nodes] for shard, nodes in self.holders.items()]
        return {
            **super().message(),
            "holders": holders,
            "continued": self.continued.hex(),
            "former": self.former.hex(),
        }


@dataclass(frozen=True, kw_only=True)
class NewRun(PlannedStart):
    """Begin with iteration 0, or from a checkpoint on disk: nodes hold nothing, or are not asked for it."""

    kind = "nothing"

    trouble: str = ""
    """The state that nodes hold nevertheless, in words; "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class AfterReset(PlannedStart):
    """Begin with iteration 0: `checkmate reset` has discarded everything, and nothing has begun since."""

    kind = "reset"


@dataclass(frozen=True, kw_only=True)
class WithoutState(PlannedStart):
    """Use a checkpoint on disk, or fail: the shadow nodes have no complete state, for a reason."""

    kind = "none"

    trouble: str


@dataclass(frozen=True, kw_only=True)
class RefusedStart(PlannedStart):
    """Fail: there is state, which other ranks have left."""

    kind = "refused"

    trouble: str


RestartPlan = FromNodes | NewRun | AfterReset | WithoutState | RefusedStart
"""Rank 0's decision, for all ranks, on how this start of training begins."""

Planned = TypeVar("Planned", bound=PlannedStart)

_PLANS: Final[Mapping[str, type[RestartPlan]]] = {
    plan.kind: plan for plan in (FromNodes, NewRun, AfterReset, WithoutState, RefusedStart)
}
_ABSENT: Final = {"iteration": -1, "holders": [], "trouble": "", "continued": "", "former": ""}
"""In a message, the fields that not all kinds have."""
_MESSAGE: Final[Mapping[str, type]] = {
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
    "former": str,
    "marks": bool,
}
"""The keys of a plan's message, and their types in JSON."""


def from_message(message: Any) -> RestartPlan:
    """Return the plan of a `message` of another rank. Raise `ValueError` if it is something else."""
    if not _is_plan(message):
        raise ValueError(f"not a plan: {str(message)[:_MAX_SHOWN]}")
    plan = _PLANS[message["kind"]]
    holders = {(group, shard): nodes for group, shard, *nodes in message["holders"]}
    starts = {name: bytes.fromhex(message[name]) for name in ("start", "continued", "former")}
    values = {**message, **starts, "holders": holders}
    return plan(**{field.name: values[field.name] for field in fields(plan)})


def _is_plan(message: Any) -> bool:
    """Return whether a message has all that a plan has, of the right types, and within their limits."""
    values = message if isinstance(message, dict) else {}
    if {name: type(value) for name, value in values.items()} != _MESSAGE:
        return False
    has_numbers = all(
        isinstance(row, list) and len(row) >= 2 and all(type(number) is int for number in row)
        for row in values["holders"]
    )
    has_starts = _START.fullmatch(values["start"]) and _CONTINUED.fullmatch(values["continued"])
    has_starts = has_starts and _HEX.fullmatch(values["former"])
    is_within_limits = 0 <= values["incarnation"] < 256 and values["iteration"] >= -1
    return bool(has_numbers and has_starts and is_within_limits and values["kind"] in _PLANS)


def new_run_fields(incarnation: int, generation_seen: int = 0, discarded: int = 0) -> dict[str, Any]:
    """Return the fields of a plan that begins a new run."""
    return {
        "incarnation": incarnation,
        "run": uuid.uuid4().hex,
        "generation": generation_seen + 1,
        "generation_seen": generation_seen,
        "discarded": discarded,
    }


def plan_without_state(
    incarnation: int, trouble: str, generation_seen: int = 0, discarded: int = 0
) -> WithoutState:
    """Return a plan of a new run, without the shadow nodes' state. `trouble` is the reason."""
    return WithoutState(**new_run_fields(incarnation, generation_seen, discarded), trouble=trouble)


def after_disk(plan: Planned, generation: int) -> Planned:
    """Return the plan with a generation greater than the greatest one on disk."""
    return replace(plan, generation=max(plan.generation, generation + 1))
