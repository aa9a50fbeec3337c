"""Models, demands and step times with round numbers, for tests of the planner."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from torch import nn

from checkmate.job.schema import Job
from checkmate.planner.demand import Demand
from checkmate.planner.models.named import Model, load_model
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.scaling import StepTimes
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.wire.parameter import Parameter

ADAMW = NamedOptimizer("adamw")
LINE = 100e9
SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
TINY = "tests.support.planner:tiny"


def tiny() -> nn.Module:
    """Return a model for --model with 24 equal layers, so that shards can be equal."""
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(24))})


def oddly_named() -> nn.Module:
    """Return a model for --model whose names look like markup."""
    return nn.ModuleDict({"[red]:smile:": nn.Linear(4, 4), "[/]": nn.Linear(4, 4)})


@cache
def model_by_name(name: str) -> Model:
    return load_model(name)


def model(*sizes: int, dtype: str = "float32") -> Model:
    return Model("sizes", tuple(Parameter(f"p{i}", (n,), dtype) for i, n in enumerate(sizes)))


def demand(job: Job, *models: Model) -> Demand:
    return Demand(job, models * (len(job.dp_groups) // len(models)), ADAMW, LINE, RECEIVE_BUFFER)


def times(seconds: dict[int, float], elements: int = 1000) -> StepTimes:
    return StepTimes("m", "AdamW", "float32", elements, seconds, by_layer=False)
