"""The inputs of `checkmate cost`, with their units and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from checkmate.planner import units
from checkmate.planner.cost.failures import ShadowNodes
from checkmate.planner.cost.model import Prices, TrainingRun
from checkmate.planner.units import HOUR_S, UnitError

GPUS_PER_NODE: Final = 128
"""Also per DP group: the paper has 128 of both for 16,384 GPUs."""
BYTES_PER_PARAMETER: Final = 2 + 4
"""As in the paper: bf16, and 4 bytes of optimizer state. (Adam has 8, and mixed precision 4 more.)"""

DEFAULTS: Final[Mapping[str, str]] = {
    "gpus": "16384",
    "failure_rate": "419 in 54d on 16384",
    "duration": "54d",
    "iteration": "4.58s",
    "stall": "1.2s",
    "slowdown": "0%",
    "every": "best",
    "price": "11.06",
    "node_price": "1.28",
    "shadow_nodes": "gpus / 128",
    "dp_groups": "gpus / 128",
    "replicas": "1",
    "node_failure_rate": "2e-5",
    "seeding": "5min",
    "disk_every": "1h",
    "restart": "0s",
    "runs": "10000",
    "seed": "0",
}
"""The training of LLaMA3-405B in the paper, which has no failure rate of shadow nodes.

The paper measured no slowdown.
"""

_NO_ASSUMPTIONS: Final = ("every", "runs", "seed")
"""Defaults that are not assumptions about the training, its nodes or their prices."""


def _read(parse: Callable[[object], Any], least: str, most: str) -> BeforeValidator:
    """Return a validator that parses a value and checks its bounds, which are text like values."""

    def read(value: object) -> Any:
        parsed = parse(value)
        if not parse(least) <= parsed <= parse(most):
            raise UnitError(f"must be between {least} and {most}, not {value!r}")
        return parsed

    return BeforeValidator(read)


def _every(value: object) -> tuple[float, str] | None:
    """Parse iterations or a time; `None` is the optimum."""
    if value == "best":
        return None
    for parse, unit in ((units.count, "iterations"), (units.seconds, "seconds")):
        try:
            number = parse(value)
        except UnitError:
            continue
        if number > 0:
            return float(number), unit
    raise UnitError(f"must be 'best', a number of iterations or a time such as 30min, not {value!r}")


def _share(value: object) -> int | None:
    """Parse a number of nodes or groups; `None` is the paper's proportion to GPUs."""
    if value == f"gpus / {GPUS_PER_NODE}":
        return None
    number = units.count(value)
    if not 1 <= number <= 65_536:
        raise UnitError(f"must be between 1 and 65,536, not {value!r}")
    return number


_Count = Annotated[int, _read(units.count, "1", "10,000,000")]
_Rate = Annotated[float, _read(units.failures_per_hour, "1e-12", "1")]
_NoRate = Annotated[float, _read(units.failures_per_hour, "0", "1")]
_Time = Annotated[float, _read(units.seconds, "1us", "100y")]
_NoTime = Annotated[float, _read(units.seconds, "0s", "30d")]
_Price = Annotated[float, _read(units.price_per_hour, "0.0001", "1e6")]


def _default(key: str) -> Any:
    return Field(DEFAULTS[key], validate_default=True)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelInputs(_Model):
    """A LLaMA-style transformer and its batch, from which the time of an iteration is estimated.

    Two formulas of the paper's Appendix A for grouped-query attention are wrong as printed:

    - The width of keys and values is printed as g·a (groups times heads). It is g·(h/a): g heads of the width
      of each query head. For LLaMA3-405B both are 1,024, because it has 128 heads of width 128.
    - The output projection is printed with the same input width. Its input is all heads, of width h.

    No single version gives both results of the paper. 4.58 s per iteration follows from the output projection
    as printed (the correct one gives 5.06 s), but 3.49e25 operations of pre-training from the correct one (as
    printed: 3.18e25). The paper's FFN has two matrices, but LLaMA3's has three (SwiGLU); with three and the
    correct projection, an iteration takes 6.75 s.
    """

    layers: _Count
    hidden: _Count
    ffn: _Count
    vocabulary: _Count
    heads: _Count
    kv_heads: _Count
    ffn_matrices: _Count = 3
    batch_tokens: Annotated[float, _read(units.amount, "1", "1e12")]
    sequence: _Count
    achieved: Annotated[float, _read(units.flops, "1GFLOPS", "1000PFLOPS")]
    """Operations per second that each GPU reaches in practice."""

    @property
    def kv_width(self) -> int:
        """Width of keys and of values: a head's width for each group."""
        return self.kv_heads * self.hidden // self.heads

    def flops(self, tokens: float, sequence: int, projected: int) -> float:
        """Return the operations of an iteration: three forward passes, without recomputation.

        Args:
            tokens: all tokens, the paper's b·s.
            sequence: tokens of a sequence.
            projected: input width of attention's output projection.
        """
        h = self.hidden
        layer = (
            2 * (h * h + 2 * h * self.kv_width)  # queries, keys, values
            + 4 * sequence * h  # attention
            + 2 * h * projected  # attention's output
            + 2 * self.ffn_matrices * h * self.ffn
            + 2 * h  # rotary positions
        )
        return 3 * tokens * (self.layers * layer + 4 * h * self.vocabulary)

    def iteration_s(self, gpus: int) -> float:
        """Return the time of an iteration, with the correct output projection of attention."""
        return self.flops(self.batch_tokens, self.sequence, self.hidden) / (self.achieved * gpus)


class CostInputs(_Model):
    """All inputs, in seconds, hours and dollars.

    `model_fields_set` has the specified ones; the others are `DEFAULTS`.
    """

    gpus: _Count = _default("gpus")
    failure_rate: _Rate = _default("failure_rate")
    duration: Annotated[float, _read(units.seconds, "1min", "100y")] = _default("duration")
    iteration: _Time = _default("iteration")
    model: ModelInputs | None = None
    stall: _NoTime = _default("stall")
    parameters: Annotated[float, _read(units.amount, "1", "1e18")] | None = None
    storage: Annotated[float, _read(units.bytes_per_second, "1KB/s", "1e6TB/s")] | None = None
    slowdown: Annotated[float, _read(units.share, "0%", "100%")] = _default("slowdown")
    every: Annotated[tuple[float, str] | None, BeforeValidator(_every)] = _default("every")
    price: _Price = _default("price")
    node_price: Annotated[float, _read(units.price_per_hour, "0", "1e6")] = _default("node_price")
    shadow_nodes: Annotated[int | None, BeforeValidator(_share)] = _default("shadow_nodes")
    dp_groups: Annotated[int | None, BeforeValidator(_share)] = _default("dp_groups")
    replicas: _Count = _default("replicas")
    node_failure_rate: _NoRate = _default("node_failure_rate")
    seeding: _NoTime = _default("seeding")
    disk_every: _Time = _default("disk_every")
    restart: _NoTime = _default("restart")
    restart_in_place: _NoTime | None = None
    runs: Annotated[int, _read(units.count, "0", "1,000,000")] = _default("runs")
    seed: Annotated[int, _read(units.count, "0", "4294967295")] = _default("seed")

    @property
    def iteration_s(self) -> float:
        """Time of an iteration, specified or estimated from the model."""
        return self.model.iteration_s(self.gpus) if self.model else self.iteration

    @property
    def stall_s(self) -> float:
        """Stall, specified or estimated as the time to write a checkpoint."""
        if self.parameters is None or self.storage is None:
            return self.stall
        return BYTES_PER_PARAMETER * self.parameters / self.storage

    @property
    def assumed(self) -> tuple[str, ...]:
        """Keys of values that were not specified or replaced, without `every`, `runs` and `seed`."""
        replaced = {"iteration": self.model, "stall": self.storage}
        return tuple(
            key
            for key in DEFAULTS
            if key not in self.model_fields_set and replaced.get(key) is None and key not in _NO_ASSUMPTIONS
        )

    @property
    def every_iterations(self) -> int | None:
        """The user's checkpoint interval in whole iterations, or `None` for the optimum."""
        if self.every is None:
            return None
        number, unit = self.every
        return max(1, round(number if unit == "iterations" else number / self.iteration_s))

    @property
    def node_count(self) -> int:
        """Number of shadow nodes."""
        return self.shadow_nodes or max(1, self.gpus // GPUS_PER_NODE)

    @property
    def group_count(self) -> int:
        """Number of DP groups."""
        return self.dp_groups or max(1, self.gpus // GPUS_PER_NODE)

    @property
    def training(self) -> TrainingRun:
        """The training run for `model`."""
        return TrainingRun(self.gpus, self.failure_rate, self.duration / HOUR_S, self.iteration_s)

    @property
    def prices(self) -> Prices:
        """The prices for `model`."""
        return Prices(self.price, self.node_price)

    @property
    def shadow(self) -> ShadowNodes:
        """The shadow nodes for `failures`."""
        seed_hours, disk_hours = self.seeding / HOUR_S, self.disk_every / HOUR_S
        return ShadowNodes(self.node_count, self.replicas, self.node_failure_rate, seed_hours, disk_hours)
