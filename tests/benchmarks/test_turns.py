"""Blocks with a system and without one: who trains what, and when checkpoints are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from benchmarks.evaluation.rank_log import RankLog
from benchmarks.evaluation.record import Log, blocks_of, log_of, losses_of, peaks_of, plain_of
from benchmarks.evaluation.turns import BLOCK, Turns, first_of, train
from benchmarks.evaluation.workloads import Workload


@dataclass
class Trained:
    """A workload that notes its iterations."""

    name: str
    notes: list[tuple[str, int]]

    def step(self, iteration: int, rank: int) -> float:
        self.notes.append((self.name, iteration))
        return iteration + rank / 10


def run(folder: Path, *, twin: bool, plain_first: bool) -> tuple[list[tuple[str, int]], Log]:
    """Train; return what was trained, checkpointed and finished, in order, and the log."""
    notes: list[tuple[str, int]] = []
    other = (lambda: cast(Workload, Trained("twin", notes))) if twin else None
    turns = Turns(
        cast(Workload, Trained("ours", notes)),
        lambda iteration: notes.append(("checkpoint", iteration)),
        lambda: notes.append(("finish", -1)),
        other,
    )
    with RankLog(folder, 1) as log:
        train(turns, log, warm_up=5, plain_first=plain_first)
    return notes, log_of((folder / "steps1.jsonl").read_text())


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_system_is_its_own_baseline(tmp_path: Path, plain_first: bool) -> None:
    notes, _ = run(tmp_path, twin=False, plain_first=plain_first)
    first = first_of(5)
    trained = [iteration for name, iteration in notes if name == "ours"]
    assert trained == [*range(first + 2 * BLOCK)], "no iteration is left out, whoever makes checkpoints"
    saved = [iteration for name, iteration in notes if name == "checkpoint"]
    begin = first + BLOCK * plain_first
    assert saved == [*range(first), *range(begin, begin + BLOCK)]
    last = notes.index(("checkpoint", begin + BLOCK - 1))
    assert notes[last + 1] == ("finish", -1), "a block ends when its checkpoints are complete"


@pytest.mark.parametrize("plain_first", [False, True])
def test_what_cannot_be_switched_off_takes_turns_with_a_twin(tmp_path: Path, plain_first: bool) -> None:
    notes, said = run(tmp_path, twin=True, plain_first=plain_first)
    assert [one for name, one in notes if name == "ours"] == [*range(first_of(5) + BLOCK)]
    assert [one for name, one in notes if name == "twin"] == [*range(first_of(0) + BLOCK)]
    order = [line["block"] for line in said if "block" in line]
    assert order == (["plain", "system"] if plain_first else ["system", "plain"])
    assert [line for line in said if "peak" in line], "memory is told before there is a twin"


def test_its_log_makes_a_record(tmp_path: Path) -> None:
    logs = [run(tmp_path, twin=False, plain_first=False)[1]]
    assert losses_of(logs, 3) == ((0.1, 1.1, 2.1),)
    assert len(blocks_of(logs)) == 1 and plain_of(logs) >= 0 and peaks_of(logs)[0] > 1 << 20
