"""A checkpoint on disk, loaded by other meshes than its own: each rank gets its chunks, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from checkmate import state
from checkmate.consolidate import disk as on_disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import Snapshot
from checkmate.consolidate.stages import Trained
from checkmate.consolidate.stages import stages as find_stages
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.model.choosing import model_of
from checkmate.training.record.capture import Watched
from checkmate.training.start import from_disk, places, stage_data
from checkmate.training.start.install import InstallError, own_buffers
from checkmate.training.start.stage_data import Counterparts, StageRanks
from testbed.jobs import job_data
from tests.support.training.alone import alone
from tests.support.training.lab import equal
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.resharded import (
    ITERATION,
    MeshCase,
    by_number,
    full,
    group_state,
    resume,
    save_and_load,
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
    model, states = save_and_load(tmp_path / "one", kind)
    resumptions = ranks.run(case.ranks, resume, case, str(tmp_path / "one"))
    for resumed, optimizer, _, _ in resumptions:
        assert equal(resumed, model)
        assert equal(by_number(optimizer), by_number(states))
    first, second, *new = (warned for _, _, _, warned in resumptions)
    assert first.startswith(f"it is of 2 ranks, and there are {case.ranks} now: ranks 2, 3") and not second
    assert all(warned.startswith(f"rank {rank} keeps") for rank, warned in enumerate(new, 2))
    groups = tuple(unpacked(*resumptions[number][2]) for number in range(case.shards))
    snapshot = Snapshot(case.job(), "run", ITERATION, groups)
    on_disk.save(checkpoint(snapshot, by_name=kind == "dcp"), tmp_path / "two", kind)
    before, two = (on_disk.load(tmp_path / name) for name in ("one", "two"))
    assert equal(two["model"], before["model"]) and equal(two["buffers"], before["buffers"])
    assert equal(by_number(two["optimizer"]["state"]), by_number(before["optimizer"]["state"]))
    back = ranks.run(2, resume, MeshCase(2, 1), str(tmp_path / "two"))
    for resumed, optimizer, _, _ in back:
        assert equal(resumed, model)
        assert equal(by_number(optimizer), by_number(states))
    assert [warned for _, _, _, warned in back] == [f"it is of {case.ranks} ranks, and there are 2 now", ""]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_another_model_is_refused_before_anything_is_changed(kind: on_disk.Format, tmp_path: Path) -> None:
    save_and_load(tmp_path / "c", kind)
    with alone():
        model, optimizer = script(2)
        model.blocks[0][2] = nn.Linear(13, 5)  # type: ignore[assignment, index]
        shard(model, replicated(1, 1)["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = full(model.state_dict())
        place = places.place_of(MeshCase(2, 1).job(), 0, 2, None)
        with pytest.raises(
            InstallError,
            match=r"c doesn't fit the script: it has model.blocks.0.2.bias \[6\] in place of .*\[5\]",
        ):
            from_disk.install_checkpoint(tmp_path / "c", place, Watched(model_of(model), optimizer), [[0]])
        assert equal(full(model.state_dict()), before)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_sharded_stages_without_a_mesh_are_read_back(kind: on_disk.Format, tmp_path: Path) -> None:
    """The DP groups of a stage are found by their parameters, in writing and in reading."""
    demo_job = of_data(Job, job_data(groups=2, ranks=2))
    with alone():
        stages = [stage_of(seed) for seed in (1, 2)]
        groups = [group_state(watched, pb.IterationRecord(iteration=ITERATION)) for watched in stages]
        snapshot = Snapshot(demo_job, "run", ITERATION, tuple(groups))
        on_disk.save(checkpoint(snapshot, by_name=kind == "dcp"), tmp_path / "c", kind)
        expected = [full(watched.model.inner.state_dict()) for watched in stages]
        group_places = [
            places.place_of(demo_job, group.ranks[0].rank, 4, None) for group in demo_job.dp_groups
        ]
        trained = [stage_data.trained_by(*stage) for stage in zip(group_places, stages, strict=True)]
        assert trained == [Trained.from_layout(group.layout) for group in groups]
        numbers = find_stages(demo_job, [Trained.of_message(stage.message()) for stage in trained])
        assert numbers == [[0], [1]]
        for place, watched, stage in zip(group_places, stages, expected, strict=True):
            with torch.no_grad():
                for parameter in watched.model.trained().values():
                    state.local_of(parameter).zero_()
            from_disk.install_checkpoint(tmp_path / "c", place, watched, numbers)
            assert equal(full(watched.model.inner.state_dict()), stage)


def stage_of(seed: int) -> Watched:
    """Return a stage's model in a single shard, with names of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict({f"layer{seed}": nn.Linear(4, 3)}))
    fully_shard(model, mesh=replicated(1, 1)["dp_shard"])
    return Watched(model_of(model), torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("case", "values", "expected"),
    [
        (MeshCase(4, 2), {1: 1.0, 2: 2.0, 3: 3.0}, {0: 0.0, 1: 1.0, 3: 3.0, 5: 0.0, 7: 0.0}),
        (MeshCase(4, 2), {1: 1.0}, {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}),
    ],
    ids=["new ranks", "a rank that had those of its stage's first"],
)
def test_ranks_in_other_groups_get_their_own_buffers(
    case: MeshCase, values: dict[int, float], expected: dict[int, float]
) -> None:
    """A checkpoint has what differs from the stage's first rank; a group may begin with another."""
    document = {
        "iteration": 8,
        "ranks": [*range(8)],
        "rng": {},
        "extra": {},
        "scheduler": None,
        "scaler": None,
        "buffers": {"mean": torch.zeros(1)},
        "rank_buffers": {rank: {"mean": torch.full((1,), value)} for rank, value in values.items()},
    }
    for rank, value in expected.items():
        place = places.place_of(case.job(), rank, case.ranks, None)
        ranks = Counterparts.from_checkpoint(document, StageRanks.of_stage(case.job(), case.job().groups))
        record = stage_data._record_of(document, place, ranks.of_rank)
        shared = {name: state.loads(data) for name, data in record.buffers.items()}
        assert (shared | own_buffers(record, place.position))["mean"].item() == value
