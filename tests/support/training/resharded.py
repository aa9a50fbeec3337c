"""A checkpoint of a model without shards, and ranks of any mesh that load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from checkmate import state
from checkmate.consolidate import disk as on_disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.model.choosing import model_of
from checkmate.training.record.buffers import frozen_state
from checkmate.training.record.capture import Watched
from checkmate.training.start import from_disk, places
from checkmate.wire.layout import from_json
from testbed.jobs import job_data
from tests.support.training.alone import alone
from tests.support.training.sharded import ShardedNet, replicated, shard

ITERATION = 8
PLAIN = {
    "python": (3, tuple(range(625)), None),
    "numpy": ("MT19937", tuple(range(624)), 5, 0, 0.0),
}


@dataclass(frozen=True)
class MeshCase:
    """Replicas and shards of a model; a single shard is DDP for Checkmate."""

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards

    def job(self) -> Job:
        """Return the job: DP group s has the ranks s, s + shards and so on."""
        data = job_data(groups=self.shards, ranks=self.replicas)
        for shard_number, group in enumerate(data["dp_groups"]):
            for replica, rank in enumerate(group["ranks"]):
                rank["rank"] = shard_number + self.shards * replica
        return of_data(Job, data)


def script(seed: int, case: MeshCase | None = None) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model, sharded or not, and its optimizer, which has state of a frozen parameter too."""
    torch.manual_seed(seed)
    model = ShardedNet()
    if case is not None and case.shards > 1:
        shard(model, replicated(case.replicas, case.shards)["dp_shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * seed)


def trained() -> tuple[ShardedNet, torch.optim.AdamW]:
    """Return a model that was trained without shards."""
    model, optimizer = script(1)
    assert isinstance(model, ShardedNet)
    model.blocks[0][0].bias.grad = torch.randn(13)  # type: ignore[index]
    for iteration in range(3):
        model(torch.arange(iteration, iteration + 5), more=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[0][0].bias.grad = None  # type: ignore[index]
    return model, optimizer


def group_state(watched: Watched, record: pb.IterationRecord) -> GroupState:
    """Return what shadow nodes would have of a rank's DP group."""
    model = watched.model
    layout = places.lay_out(model, 1)
    numbers = {parameter: number for number, parameter in enumerate(model.trained().values())}
    states = {
        number: state.to_held(
            layout.parameters[number], state.local_of(p).detach().clone(), local(watched.optimizer.state[p])
        )
        for p, number in numbers.items()
    }
    beside = model.kept_beside() | frozen_state(watched.optimizer, set(numbers), model.parameters)
    part_record = pb.IterationRecord(iteration=ITERATION, parts=record.parts)
    for name, tensor in beside.items():
        part_record.buffers[name] = state.dumps(state.local_of(tensor).detach())
    return GroupState(layout, spec_of(watched.optimizer, numbers), part_record, model.state_names(), states)


def local(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state.local_of(value).clone() for name, value in values.items()}


def packed(group: GroupState) -> tuple[Any, ...]:
    """Return what another process can unpack."""
    spec, record = group.optimizer.SerializeToString(), group.record.SerializeToString()
    return group.layout.to_json(), spec, record, dict(group.names), group.states


def unpacked(layout: str, spec: bytes, record: bytes, names: dict[str, str], states: Any) -> GroupState:
    return GroupState(
        from_json(layout),
        pb.OptimizerSpec.FromString(spec),
        pb.IterationRecord.FromString(record),
        names,
        states,
    )


def full(value: Any) -> Any:
    """Return state with whole tensors."""
    if isinstance(value, Mapping):
        return {key: full(element) for key, element in value.items()}
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value


def resume(rank: int, count: int, case: MeshCase, path: str) -> tuple[Any, Any, Any, str]:
    """Resume; return all of model and optimizer, what shadow nodes get of it, and what was warned of."""
    model, optimizer = script(2, case)
    sharded: nn.Module = model if case.shards > 1 else DistributedDataParallel(model)
    watched = Watched(model_of(sharded), optimizer)
    place = places.place_of(case.job(), rank, count, watched.model.replicas)
    resumed = from_disk.install_checkpoint(Path(path), place, watched, [[*range(case.shards)]])
    group = packed(group_state(watched, resumed.record))
    states = full(model.state_dict()), full(optimizer.state_dict()["state"])
    return *states, group, resumed.other_ranks


def save_and_load(path: Path, kind: on_disk.Format) -> tuple[Any, Any]:
    """Save a checkpoint of a model without shards, of two ranks; return its model's and optimizer's state."""
    model, optimizer = trained()
    record = pb.IterationRecord(iteration=ITERATION)
    for position in range(2):
        rng = state.dump_generators({"torch": torch.get_rng_state(), **PLAIN})
        record.parts.add(position=position, rng=rng, extra=state.dumps(f"rank {position}"))
    with alone():
        watched = Watched(model_of(DistributedDataParallel(model)), optimizer)
        group = group_state(watched, record)
    snapshot = Snapshot(MeshCase(2, 1).job(), "run", ITERATION, (group,))
    on_disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind)
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def by_number(states: Mapping[int, Any]) -> dict[int, Any]:
    """Sort optimizer state, because state of frozen parameters may be in another order."""
    return {number: dict(sorted(entries.items())) for number, entries in sorted(states.items())}
