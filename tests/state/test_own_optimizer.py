"""An optimizer of a package with an entry point is followed; one that is not of the kind is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.optim import supported
from checkmate.optim.supported import UnsupportedOptimizer, build, spec_of
from checkmate.planner.models.optimizers import NamedOptimizer, OptimizerError
from checkmate.shadow.logic.bounds import _check_optimizer
from checkmate.shadow.logic.group import CallRefused
from tests.support.training.optimizer_steps import Trainer, follow

LION = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (first, second) = state["exp_avg"], group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)
"""


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a package with an optimizer; yield its class."""
    (tmp_path / "some_lion.py").write_text(LION)
    folder = tmp_path / "some_lion-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-lion\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[checkmate.optimizers]\nlion = some_lion:Lion\n")
    monkeypatch.syspath_prepend(tmp_path)
    supported._installed_optimizers.cache_clear()
    yield importlib.import_module("some_lion").Lion
    del sys.modules["some_lion"]
    supported._installed_optimizers.cache_clear()


def test_replicas_follow_it_bit_for_bit(lion: Any) -> None:
    trainer = Trainer(lion, shards=2)
    replicas = [trainer.replica(shard) for shard in range(2)]
    for iteration in range(8):
        follow(trainer, replicas, trainer.backward(without={3} if iteration == 4 else set()))


@pytest.mark.usefixtures("lion")
def test_what_it_costs_can_be_planned() -> None:
    assert NamedOptimizer("lion,lr=0.1").state_bytes("float32") == 4
    with pytest.raises(OptimizerError, match="no optimizer cat; .* the steps of sgd, .*, lion"):
        NamedOptimizer("cat")


def test_without_the_package_a_node_says_so(lion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    spec = spec_of(lion([parameter]), {parameter: 0})
    assert spec.name == "some_lion:Lion"
    assert type(build(spec, {0: parameter})) is lion
    _check_optimizer(spec, 1)  # as a node's `Begin` does
    with monkeypatch.context() as patch:
        patch.setattr(supported, "_installed_optimizers", dict)
        with pytest.raises(CallRefused, match="install the trainers' one on shadow nodes, too"):
            _check_optimizer(spec, 1)
        with pytest.raises(UnsupportedOptimizer, match="no package here has the optimizer some_lion:Lion"):
            build(spec, {0: parameter})


@pytest.mark.usefixtures("lion")
def test_one_without_an_entry_point_is_refused_with_the_way_to_add_it() -> None:
    parameter = nn.Parameter(torch.zeros(3))

    class Own(torch.optim.Optimizer):
        pass

    with pytest.raises(
        UnsupportedOptimizer, match=r"Own may not step each parameter .*An optimizer of your own"
    ):
        spec_of(Own([parameter], {}), {parameter: 0})
