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
    make_twin = (lambda: cast(Workload, Trained("twin", notes))) if twin else None
    turns = Turns(
        cast(Workload, Trained("ours", notes)),
        lambda iteration: notes.append(("checkpoint", iteration)),
        lambda: notes.append(("finish", -1)),
        make_twin,
    )
    with RankLog(folder, 1) as log:
        train(turns, log, warm_up=5, plain_first=plain_first)
    return notes, log_of((folder / "steps1.jsonl").read_text())


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_system_is_its_own_baseline(tmp_path: Path, plain_first: bool) -> None:
    notes, _ = run(tmp_path, twin=False, plain_first=plain_first)
    first = first_of(5)
    trained = [iteration for name, iteration in notes if name == "ours"]
    whole = 2 * BLOCK + (first_of(5, before=5) + 5 if plain_first else first)
    assert trained == [*range(whole)], "no iteration is left out, whoever makes checkpoints"
    checkpoints = [iteration for name, iteration in notes if name == "checkpoint"]
    if plain_first:
        warm = first_of(5, before=5)
        assert checkpoints == [*range(warm), *range(warm + BLOCK, warm + 2 * BLOCK + 5)]
    else:
        assert checkpoints == [*range(first + BLOCK)]
    assert (checkpoints[-1] + 1) % BLOCK == first % BLOCK, (
        "blocks with a system begin and end at the same place"
    )


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("plain_first", [False, True])
def test_nothing_is_written_while_there_is_no_system_and_no_block_waits(
    tmp_path: Path, twin: bool, plain_first: bool
) -> None:
    notes, _ = run(tmp_path, twin=twin, plain_first=plain_first)
    assert notes.count(("finish", -1)) == 1
    at = notes.index(("finish", -1))
    plain = notes[at + 1 : at + 1 + BLOCK]
    assert notes[at - 1][0] == "checkpoint" and "checkpoint" not in {name for name, _ in plain}


@pytest.mark.parametrize("plain_first", [False, True])
def test_what_cannot_be_switched_off_takes_turns_with_a_twin(tmp_path: Path, plain_first: bool) -> None:
    notes, lines = run(tmp_path, twin=True, plain_first=plain_first)
    warm = first_of(5, before=5) + 5 if plain_first else first_of(5)
    assert [iteration for name, iteration in notes if name == "ours"] == [*range(warm + BLOCK)]
    assert [iteration for name, iteration in notes if name == "twin"] == [*range(first_of(0) + BLOCK)]
    order = [line["block"] for line in lines if "block" in line]
    assert order == (["plain", "system"] if plain_first else ["system", "plain"])
    peak_lines = [lines.index(line) for line in lines if "peak" in line]
    assert len(peak_lines) == 1
    assert peak_lines[0] < min(lines.index(line) for line in lines if line.get("block") == "plain")


def test_its_log_makes_a_record(tmp_path: Path) -> None:
    logs = [run(tmp_path, twin=False, plain_first=False)[1]]
    assert losses_of(logs, 3) == ((0.1, 1.1, 2.1),)
    assert len(blocks_of(logs)) == 1 and plain_of(logs) >= 0 and peaks_of(logs)[0] > 1 << 20
