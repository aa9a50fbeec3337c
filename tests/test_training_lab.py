"""Training in labs, through real switches and followed by real shadow nodes; killed, resumed, compared."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training_lab import Run, TrainingLab, equal, training_lab
from tests.training_orders import Orders

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
]

TWO_RANKS: dict[str, Any] = {
    "title": "two ranks and two shadow nodes",
    "switches": ["tor"],
    "dp_groups": [{"ranks": ["tor", "tor"]}],
    "shadow_nodes": [["tor"], ["tor"]],
}
PIPELINE: dict[str, Any] = {
    "title": "two stages of two ranks on two switches, each with a shadow node of its own",
    "switches": ["tor0", "tor1"],
    "links": [["tor0", "tor1"]],
    "channels": 2,
    "dp_groups": [
        {"ranks": ["tor0", "tor0"], "shadow_nodes": [0]},
        {"ranks": ["tor1", "tor1"], "shadow_nodes": [1]},
    ],
    "shadow_nodes": [["tor0"], ["tor1", "tor1"]],
}


def same_training(one: Run, other: Run) -> bool:
    """Whether two runs had the same losses and ended with the same state, on all ranks."""
    losses = [one.losses(rank) == other.losses(rank) for rank in range(one.ranks)]
    return all(losses) and equal(one.states(), other.states())


def without_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """Ranks but the first get BatchNorm's statistics from that, with the next forward."""
    model = {name: tensor for name, tensor in state["model"].items() if "running" not in name}
    return {**state, "model": model}


def check_restored(resumed: Run, reference: Run) -> None:
    """What was restored is what the uninterrupted run had after that iteration."""
    iteration = resumed.resumed() - 1
    restored, expected = resumed.states("restored."), reference.states(f"after{iteration}.")
    assert equal(restored[0], expected[0])
    for ours, theirs in zip(restored, expected, strict=True):
        assert equal(without_buffers(ours), without_buffers(theirs))


def kill_and_resume(lab: TrainingLab, folder: Path, kill_at: int, **more: Any) -> None:
    """A run killed on all ranks and started again is, in the end, what an uninterrupted run is."""
    reference = lab.train(Orders(str(folder / "reference"), fresh=True, keep_each=True, **more))
    killed = lab.train(Orders(str(folder / "killed"), fresh=True, pause=0.1, **more), kill_at=kill_at)
    completed = max(killed.losses(0))
    resumed = lab.train(Orders(str(folder / "killed"), keep_each=True, **{**more, "seed": 99}))
    assert resumed.resumed() >= completed  # at most one completed iteration is repeated
    check_restored(resumed, reference)
    assert same_training(resumed, reference)


def test_all_ranks_are_killed(tmp_path: Path) -> None:
    with training_lab("single_tor") as lab:
        kill_and_resume(lab, tmp_path, 4, iterations=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"amp": True, "autocast": True, "infinite": (3, 9), "accumulate": 2},
        {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9, "foreach": False}, "batch_norm": False},
        {"optimizer": "Adam", "options": {"lr": 0.01, "fused": True}, "amp": True, "infinite": (4,)},
    ],
    ids=["mixed precision", "sgd", "fused adam with a scaler"],
)
def test_all_ranks_are_killed_with(options: dict[str, Any], tmp_path: Path) -> None:
    with training_lab(TWO_RANKS) as lab:
        kill_and_resume(lab, tmp_path, 5, iterations=12, **options)


@pytest.mark.slow
def test_stages_of_a_pipeline_resume_at_one_iteration(tmp_path: Path) -> None:
    with training_lab(PIPELINE) as lab:
        kill_and_resume(lab, tmp_path, 5, iterations=10)


@pytest.mark.slow
def test_a_shadow_node_that_comes_back_is_current_again(tmp_path: Path) -> None:
    with training_lab(TWO_RANKS) as lab:
        run = lab.start(Orders(str(tmp_path / "run"), open_end=True, pause=0.1))
        lab.await_iteration(run, 5)
        lab.crew.kill(lab.shadows[1])
        lab.await_iteration(run, 15)
        lab.crew.restart(lab.shadows[1])
        lab.await_live(1)
        end = lab.end(run)
        again = lab.train(Orders(str(tmp_path / "again"), only_restore=True, seed=99))
        assert again.resumed() == end
        assert equal(again.state(0), run.state(0))


@pytest.mark.slow
def test_training_goes_on_without_any_shadow_node(tmp_path: Path) -> None:
    with training_lab(TWO_RANKS, shadow_nodes=False) as lab:
        run = lab.start(Orders(str(tmp_path / "run"), fresh=True, open_end=True, pause=0.1, wait=1))
        lab.await_iteration(run, 5)
        assert "training begins without all shadow nodes" in lab.ranks[0].complaints()
        lab.start_shadow_nodes()
        lab.await_live(0)
        lab.await_live(1)
        for node in lab.shadows.values():
            lab.crew.kill(node)
        lab.await_iteration(run, max(run.losses(0)) + 5)
        lab.end(run)
        assert lab.ranks[0].complaints().count("training goes on") == 4  # each node, twice


@pytest.mark.slow
def test_when_every_shadow_node_was_lost_training_resumes_from_disk(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with training_lab(TWO_RANKS) as lab:
        reference = lab.train(Orders(str(tmp_path / "reference"), iterations=12))
        lab.train(Orders(str(tmp_path / "run"), iterations=6, fresh=True))
        lab.consolidate("--out", checkpoints / "iteration-00000005")
        for member in list(lab.shadows.values()):
            lab.crew.restart(member)
        lab.await_ready(list(lab.shadows.values()))
        orders = Orders(str(tmp_path / "run"), iterations=12, seed=99, checkpoints=str(checkpoints))
        resumed = lab.train(orders)
        assert resumed.resumed() == 6
        assert same_training(resumed, reference)
        again = lab.train(Orders(str(tmp_path / "again"), only_restore=True, seed=98))
        assert again.resumed() == 12
        assert equal(again.state(0), reference.state(0))
