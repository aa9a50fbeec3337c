"""The guide's recipes, run verbatim: killed in the middle of an iteration's work, and resumed."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
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

QUICK = ["A loader that knows its place"]
SLOW = [title for title in recipes() if title not in QUICK]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """Run some recipes in one lab, once; return their results."""

    @functools.cache
    def ran(*titles: str) -> Path:
        folder = tmp_path_factory.mktemp("recipes")
        with training_lab(on_one_switch(RANKS, (1, 1))) as lab:
            lab.start_script("tests.scripts.recipes", folder, *titles)
            lab.crew.finish(lab.ranks, SECONDS)
        return folder

    return lambda titles: ran(*titles)


def found(folder: Path, title: str, phase: str, rank: int) -> dict[str, Any]:
    return dict(torch.load(folder / f"{title}.{phase}.rank{rank}.pt", weights_only=False))


def test_there_are_the_recipes() -> None:
    assert len(recipes()) == 5
    assert all("checkmate.protect(" in code for code in recipes().values())


@pytest.mark.parametrize("title", [*QUICK, *(pytest.param(title, marks=pytest.mark.slow) for title in SLOW)])
def test_a_resumed_run_is_the_undisturbed_one(run: Callable[[list[str]], Path], title: str) -> None:
    left = run(QUICK if title in QUICK else SLOW)
    for rank in range(RANKS):
        reference, resumed = (found(left, title, phase, rank) for phase in ("undisturbed", "resumed"))
        (start,) = resumed["started"]
        assert start >= KILLED_AFTER - 2  # at most one completed iteration is repeated
        again = resumed["forwards"]
        assert 0 < len(again) < len(reference["forwards"])
        assert again == reference["forwards"][-len(again) :]
        for name in ("state", "values", "random"):
            assert equal(resumed[name], reference[name]), name
