"""Checkpoints of sharded models: what plain PyTorch would have saved of the whole one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import state
from checkmate.consolidate import disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.consolidate.stage_state import assemble_stage
from checkmate.consolidate.stages import Trained, stages
from checkmate.job.schema import Mesh
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import StateError
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.checkpoints import DiskRun
from tests.support.training.lab import equal

FROZEN_STATE = {"exp_avg": torch.arange(1.0), "step": torch.tensor(3.0)}


def chunk(parameter: Parameter, shard: int, shards: int, part: int = 0, parts: int = 1) -> Parameter:
    """Return a shard's chunk, as FSDP cuts rows; tensor parallelism cuts the columns of matrices."""
    offset, shape = [0] * len(parameter.shape), list(parameter.shape)
    for dimension, (number, count) in enumerate([(shard, shards), (part, parts)][: len(shape)]):
        size = -(-shape[dimension] // count)
        offset[dimension] = min(size * number, shape[dimension])
        shape[dimension] = min(size, shape[dimension] - offset[dimension])
    return replace(parameter, shape=tuple(shape), whole=parameter.shape, offset=tuple(offset))


def part_of(parameter: Parameter, tensor: Any) -> Any:
    """Return a chunk of what has the whole parameter's shape, and anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.whole:
        return tensor
    places = zip(parameter.offset, parameter.shape, strict=True)
    return tensor[tuple(slice(at, at + size) for at, size in places)].clone()


def shard_group(whole: GroupState, *place: int) -> GroupState:
    """Return what a DP group of a sharded job would have of a model."""
    chunks = [chunk(parameter, *place) for parameter in whole.layout.parameters]
    frozen = chunk(Parameter("scale", (1,), "float32"), *place)
    states = {
        number: (
            part_of(chunks[number], tensor),
            {name: part_of(chunks[number], value) for name, value in values.items()},
        )
        for number, (tensor, values) in whole.states.items()
    }
    record = pb.IterationRecord()
    record.CopyFrom(whole.record)
    buffers = {name: state.loads(data) for name, data in record.buffers.items()}
    buffers["scale"] = part_of(frozen, buffers["scale"])
    buffers["count"] += place[0]
    index = 1  # of `scale` in the optimizer
    entries = {name: part_of(frozen, value) for name, value in FROZEN_STATE.items()}
    buffers |= dict(state.name_frozen(index, entries, "scale"))
    for name, tensor in buffers.items():
        record.buffers[name] = state.dumps(tensor)
    return replace(whole, layout=make_layout(chunks, 1, frozen=[frozen]), states=states, record=record)


def sharded(run: DiskRun, shards: int, parts: int = 1, *, mesh: bool = True) -> Snapshot:
    """Return the snapshot of a run whose model is sharded, in DP groups of three replicas."""
    whole = run.snapshot()
    groups = tuple(
        shard_group(whole.groups[0], s, shards, t, parts) for s, t in product(range(shards), range(parts))
    )
    demo_job = job(groups=len(groups), nodes=2, ranks=3)
    if mesh:
        demo_job = replace(demo_job, mesh=Mesh(dp_replicate=3, dp_shard=shards, tp=parts))
    return replace(whole, job=demo_job, groups=groups)


def expected(run: DiskRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state_dict of model and optimizer, with the frozen parameter's state."""
    optimizer = run.optimizer.state_dict()
    optimizer["state"] = dict(sorted({**optimizer["state"], 1: dict(FROZEN_STATE)}.items()))
    return dict(run.model.state_dict()), optimizer


@settings(max_examples=15)
@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 4), st.booleans())
def test_the_chunks_of_all_groups_are_the_whole_model(shards: int, parts: int, mesh: bool) -> None:
    """Uneven and empty chunks, replicas, and chunks of columns."""
    run = DiskRun()
    document = checkpoint(sharded(run, shards, parts, mesh=mesh))
    model, optimizer = expected(run)
    assert equal(document["model"], model)
    assert equal(document["optimizer"], optimizer)
    ranks = [*range(3 * shards * parts)]
    assert sorted(document["rng"]) == ranks and sorted(document["extra"]) == ranks
    assert sorted(document["buffers"]) == sorted(["scale", *dict(run.model.named_buffers())])
    firsts = [group.ranks[0].rank for group in job(groups=shards * parts, ranks=3).dp_groups]
    offsets = {
        rank: float(buffers["count"] - run.model.count)
        for rank, buffers in document.get("rank_buffers", {}).items()
    }
    assert offsets == {rank: number // parts for number, rank in enumerate(firsts) if number // parts}


def test_other_bits_of_a_replica_are_an_error() -> None:
    snapshot = sharded(DiskRun(), 2, 2)
    snapshot.groups[3].states[1][1]["exp_avg"][0] += 1  # type: ignore[index]
    with pytest.raises(
        StateError, match=r"^exp_avg of norm.weight: DP groups 2 and 3 have the same chunk, \[4\]"
    ):
        checkpoint(snapshot)


def test_state_of_frozen_parameters_with_equal_chunks_gets_the_shape_of_its_own() -> None:
    """Tensor parallelism splits one of them, and replicates the other."""
    whole = DiskRun().snapshot().groups[0]
    split, same = (Parameter(name, (2, 4), "float32") for name in ("split", "same"))
    split = replace(split, shape=(2, 8))
    values = torch.arange(16.0).view(2, 8)
    members = {}
    for group in range(2):
        frozen = (chunk(split, 0, 1, group, 2), replace(same, whole=(2, 4), offset=(0, 0)))
        record = pb.IterationRecord()
        record.CopyFrom(whole.record)
        for number, parameter in enumerate(frozen):
            tensor = part_of(parameter, values if parameter.name == "split" else values[:, :4])
            for name, entry in state.name_frozen(10 + number, {"exp_avg": tensor}, parameter.name):
                record.buffers[name] = state.dumps(entry)
        members[group] = replace(
            whole, layout=replace(whole.layout, frozen=frozen), record=record, states=dict(whole.states)
        )
    frozen_states = state.frozen_states(assemble_stage(members).beside)
    assert equal(frozen_states, {10: {"exp_avg": values}, 11: {"exp_avg": values[:, :4]}})


def test_another_number_of_steps_is_an_error() -> None:
    snapshot = sharded(DiskRun(), 2)
    snapshot.groups[1].states[0][1]["step"] = torch.tensor(99.0)
    with pytest.raises(
        StateError, match=r"^step of embedding.weight is another one in DP group 0 than in DP"
    ):
        checkpoint(snapshot)


def test_a_group_with_another_model_or_optimizer_is_an_error() -> None:
    snapshot = sharded(DiskRun(), 2)
    first, second = snapshot.groups
    layout = make_layout(second.layout.parameters[:-1], 1)
    with pytest.raises(StateError, match="^DP groups 0 and 1 are of one stage, but have other parameters"):
        checkpoint(replace(snapshot, groups=(first, replace(second, layout=layout))))
    with pytest.raises(StateError, match="^DP groups 0 and 1 have other optimizers or parameter groups"):
        checkpoint(replace(snapshot, groups=(first, replace(second, optimizer=pb.OptimizerSpec(name="x")))))
    layout = replace(second.layout, frozen=())
    with pytest.raises(StateError, match="^scale is not frozen in all DP groups"):
        checkpoint(replace(snapshot, groups=(first, replace(second, layout=layout))))


def test_chunks_are_freed_as_they_are_used() -> None:
    snapshot = sharded(DiskRun(), 2)
    checkpoint(snapshot)
    assert [group.states for group in snapshot.groups] == [{}, {}]


def layouts(*names: str) -> list[Layout]:
    """Return layouts with one parameter each: a chunk of it, or all of `w` for an empty name."""
    whole, part = Parameter("w", (4,), "float32"), Parameter("w", (4,), "float32", whole=(8,), offset=(0,))
    return [make_layout([replace(part, name=name) if name else whole], 1) for name in names]


@pytest.mark.parametrize(
    ("mesh", "names", "groups"),
    [
        (None, ["", ""], [[0], [1]]),  # a pipeline of replicated stages, whose names need not differ
        (None, ["a", "a", "a"], [[0, 1, 2]]),
        (None, ["a", "b", "a", "b"], [[0, 2], [1, 3]]),
        (Mesh(pp=2, dp_replicate=2), ["", ""], [[0], [1]]),
        (Mesh(pp=2, dp_replicate=2, dp_shard=2), ["a", "a", "a", "a"], [[0, 1], [2, 3]]),
        (Mesh(pp=2, dp_replicate=2, tp=2), ["a", "a", "b", "b"], [[0, 1], [2, 3]]),
    ],
)
def test_groups_of_one_stage(mesh: Mesh | None, names: list[str], groups: list[list[int]]) -> None:
    demo_job = replace(job(groups=len(names), ranks=2), mesh=mesh)
    assert stages(demo_job, [Trained.from_layout(layout) for layout in layouts(*names)]) == groups


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_stages_with_shards_are_written_and_read_back(kind: disk.Format, tmp_path: Path) -> None:
    """One entry for each stage, under the names that a pipeline of replicated stages has."""
    run, half = DiskRun(), sharded(DiskRun(), 2)
    demo_job = replace(job(groups=4, nodes=2), mesh=Mesh(pp=2, dp_replicate=3, dp_shard=2))
    snapshot = replace(half, job=demo_job, groups=(*half.groups, *sharded(DiskRun(), 2).groups))
    disk.save(checkpoint(snapshot, by_name=kind == "dcp"), tmp_path / "c", kind)
    document = disk.load(tmp_path / "c")
    assert list(document) == ["group0", "group1"]
    for number, (name, stage) in enumerate(document.items()):
        assert (stage["group"], disk.stage_in(document, number)["group"]) == (number, number), name
        assert equal(stage["model"], dict(run.model.state_dict()))
        assert sorted(stage["rng"]) == [*range(6 * number, 6 * number + 6)]
