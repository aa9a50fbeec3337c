"""A checkpoint on disk, loaded by other meshes than its own: each rank gets its chunks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkmate import state
from checkmate.consolidate import disk as on_disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import Snapshot
from checkmate.training.model.choosing import model_of
from checkmate.training.record.capture import Watched
from checkmate.training.start import disk, membership
from checkmate.training.start.counterparts import Counterparts, StageRanks
from checkmate.training.start.install import InstallError, own_buffers
from tests.support.training.alone import alone
from tests.support.training.lab import equal
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.resharded import (
    ITERATION,
    MeshCase,
    by_number,
    full,
    resume,
    saved,
    script,
    unpacked,
)
from tests.support.training.sharded import replicated, shard


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (MeshCase(2, 2), "dcp"),
        (MeshCase(2, 2), "torch"),
        (MeshCase(2, 3), "dcp"),
        (MeshCase(3, 2), "torch"),
    ],
    ids=str,
)
def test_to_shards_and_back(
    ranks: RankProcesses, case: MeshCase, kind: on_disk.Format, tmp_path: Path
) -> None:
    """A DDP's checkpoint is loaded into shards; their checkpoint has the same tensors, and a DDP loads it."""
    model, states = saved(tmp_path / "one", kind)
    told = ranks.run(case.ranks, resume, case, str(tmp_path / "one"))
    for found, optimizer, _, _ in told:
        assert equal(found, model)
        assert equal(by_number(optimizer), by_number(states))
    first, second, *new = (warned for _, _, _, warned in told)
    assert first.startswith(f"it is of 2 ranks, and there are {case.ranks} now: ranks 2, 3") and not second
    assert all(warned.startswith(f"rank {rank} keeps") for rank, warned in enumerate(new, 2))
    groups = tuple(unpacked(*told[number][2]) for number in range(case.shards))
    snapshot = Snapshot(case.job(), "run", ITERATION, groups)
    on_disk.save(checkpoint(snapshot, by_name=kind == "dcp"), tmp_path / "two", kind)
    one, two = (on_disk.load(tmp_path / name) for name in ("one", "two"))
    assert equal(two["model"], one["model"]) and equal(two["buffers"], one["buffers"])
    assert equal(by_number(two["optimizer"]["state"]), by_number(one["optimizer"]["state"]))
    back = ranks.run(2, resume, MeshCase(2, 1), str(tmp_path / "two"))
    for found, optimizer, _, _ in back:
        assert equal(found, model)
        assert equal(by_number(optimizer), by_number(states))
    assert [warned for _, _, _, warned in back] == [f"it is of {case.ranks} ranks, and there are 2 now", ""]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_another_model_is_refused_before_anything_is_changed(kind: on_disk.Format, tmp_path: Path) -> None:
    saved(tmp_path / "c", kind)
    with alone():
        model, optimizer = script(2)
        model.blocks[0][2] = nn.Linear(13, 5)  # type: ignore[assignment, index]
        shard(model, replicated(1, 1)["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = full(model.state_dict())
        place = membership.place(MeshCase(2, 1).job(), 0, 2, None)
        with pytest.raises(
            InstallError,
            match=r"c doesn't fit the script: it has model.blocks.0.2.bias \[6\] in place of .*\[5\]",
        ):
            disk.resume(tmp_path / "c", place, Watched(model_of(model), optimizer))
        assert equal(full(model.state_dict()), before)


@pytest.mark.parametrize(
    ("case", "own", "expected"),
    [
        (MeshCase(4, 2), {1: 1.0, 2: 2.0, 3: 3.0}, {0: 0.0, 1: 1.0, 3: 3.0, 5: 0.0, 7: 0.0}),
        (MeshCase(4, 2), {1: 1.0}, {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}),
    ],
    ids=["new ranks", "a rank that had those of its stage's first"],
)
def test_ranks_in_other_groups_get_their_own_buffers(
    case: MeshCase, own: dict[int, float], expected: dict[int, float]
) -> None:
    """A checkpoint has what differs from the stage's first rank; a group may begin with another."""
    found = {
        "iteration": 8,
        "ranks": [*range(8)],
        "rng": {},
        "extra": {},
        "scheduler": None,
        "scaler": None,
        "buffers": {"mean": torch.zeros(1)},
        "rank_buffers": {rank: {"mean": torch.full((1,), value)} for rank, value in own.items()},
    }
    for rank, value in expected.items():
        place = membership.place(case.job(), rank, case.ranks, None)
        ranks = Counterparts.of(found, StageRanks.of(case.job(), case.job().groups))
        record = disk._record_of(found, place, ranks.of_rank)
        shared = {name: state.loads(data) for name, data in record.buffers.items()}
        assert (shared | own_buffers(record, place.position))["mean"].item() == value
