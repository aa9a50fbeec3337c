"""The guide's recipes, run verbatim: killed in the middle of an iteration's work, and resumed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts.recipes import KILLED_AFTER, recipes
from tests.support.labs.made import on_one_switch
from tests.support.training.lab import equal, training_lab

SECONDS = 400.0
RANKS = 2

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(500),
]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all recipes in one lab; return the folder of their results."""
    folder = tmp_path_factory.mktemp("recipes")
    with training_lab(on_one_switch(RANKS, (1, 1))) as lab:
        lab.start_script("tests.scripts.recipes", folder, *recipes())
        lab.crew.finish(lab.ranks, SECONDS)
    return folder


def load_result(folder: Path, title: str, phase: str, rank: int) -> dict[str, Any]:
    return dict(torch.load(folder / f"{title}.{phase}.rank{rank}.pt", weights_only=False))


def test_there_are_the_recipes() -> None:
    assert len(recipes()) == 7
    assert all("checkmate.protect(" in code for code in recipes().values())


@pytest.mark.slow
@pytest.mark.parametrize("title", recipes())
def test_a_resumed_run_is_the_undisturbed_one(results_folder: Path, title: str) -> None:
    for rank in range(RANKS):
        reference, resumed = (
            load_result(results_folder, title, phase, rank) for phase in ("undisturbed", "resumed")
        )
        (start,) = resumed["started"]
        assert start >= KILLED_AFTER - 2  # at most one completed iteration is repeated
        again = resumed["forwards"]
        assert 0 < len(again) < len(reference["forwards"])
        assert again == reference["forwards"][-len(again) :]
        for name in ("state", "optimizers", "values", "random"):
            assert equal(resumed[name], reference[name]), name
