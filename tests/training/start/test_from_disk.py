"""Resuming from a checkpoint on disk: consolidated state in a new process's model, bit for bit."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from checkmate import state
from checkmate.consolidate import disk as on_disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.checkpoint_folder import checkpoint_path
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.job.files import read_job
from checkmate.nodes.other_ranks import OtherRanks
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.exclusion import StepExclusion
from checkmate.training.loop import generators_of
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.buffers import Buffers, frozen_state
from checkmate.training.record.capture import Watched
from checkmate.training.record.publisher import to_part
from checkmate.training.record.recorder import Recorder
from checkmate.training.record.windows import Slices
from checkmate.training.start import from_disk, places, plans
from checkmate.training.start.all_ranks import ANEW, RestoreError, run_on_all_ranks
from checkmate.training.start.from_disk import OnDisk, list_checkpoints
from checkmate.training.start.install import InstallError
from checkmate.training.start.places import Start
from checkmate.training.start.plans import plan_without_state
from checkmate.training.start.stage_data import Counterparts, StageRanks
from testbed.jobs import job
from tests.support.job_files import meshed, write
from tests.support.training.alone import alone
from tests.support.training.resharded import PLAIN
from topologies.training.verdict import digest

JOB = job(ranks=2)
PLACE = places.place_of(JOB, 0, 2, [0, 1])
ONE_STAGE = [[0]]
"""The DP groups of each stage, if there is one."""


class Counter(nn.Module):
    """A layer that counts its calls, in what modules keep beside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "history": [torch.full((2,), float(self.calls))]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class DiskScript:
    """A model with optimizer, scheduler and scaler, in some state."""

    def __init__(self, seed: int, width: int = 6, turned: bool = True) -> None:
        """`turned`: the first weight has column-major memory order."""
        torch.manual_seed(seed)
        first = nn.Linear(width, 5)
        if turned:
            first.weight.data = first.weight.data.t().contiguous().t()
        self.model = nn.Sequential(first, nn.BatchNorm1d(5), nn.Linear(5, 1), Counter())
        self.model.register_buffer("scratch", torch.randn(3), persistent=False)
        self.model[2].bias.requires_grad_(False)
        self.ddp = DistributedDataParallel(self.model)
        self.wrapped = DdpModel(self.ddp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model[2].bias.grad = torch.randn(1)  # computed before it was frozen
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.2, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * seed)

    @property
    def watched(self) -> Watched:
        return Watched(self.wrapped, self.optimizer, self.scheduler, self.scaler, lambda: {"seen": 7})

    def train(self, iterations: int) -> pb.IterationRecord:
        """Train; return the last iteration's record, as two ranks would have sent it."""
        emitted: list[Any] = []
        names = self.wrapped.trained()
        layout = places.lay_out(self.wrapped, 1)
        recorder = Recorder(
            self.watched,
            names,
            StepExclusion(0),
            emitted.append,
            lambda _: {},
            slices=Slices(layout, list(names.values()), self.optimizer),
            buffers=Buffers(
                lambda: (
                    self.wrapped.kept_beside()
                    | frozen_state(self.optimizer, set(names.values()), self.wrapped.parameters)
                ),
                everything=True,
            ),
        )
        buffers: dict[str, bytes] = {}
        for iteration in range(iterations):
            self.scaler.scale(self.ddp(torch.randn(4, 6)).sum()).backward()
            recorder.reduced(iteration)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            recorder.mark(in_loop=True)
        recorder.close(last=True)
        parts = [to_part(pb.RecordPart(job=JOB.job, incarnation=1), noted) for noted in emitted]
        for part in parts:
            if part.buffers:
                changes = state.loads(part.buffers)
                buffers |= {name: state.dumps(tensor) for name, tensor in changes.items()}
        second = pb.RecordPart(position=1, iteration=iterations - 1, rng=parts[-1].rng)
        return pb.IterationRecord(iteration=iterations - 1, parts=[parts[-1], second], buffers=buffers)

    def snapshot(self, record: pb.IterationRecord) -> Snapshot:
        """Return the snapshot that shadow nodes would provide."""
        parameters = list(self.wrapped.trained().values())
        numbers = {p: i for i, p in enumerate(parameters)}
        layout = places.lay_out(self.wrapped, 1)
        states = {
            i: state.to_held(layout.parameters[i], p.detach().clone(), self.optimizer.state[p])
            for p, i in numbers.items()
        }
        spec = spec_of(self.optimizer, numbers)
        group = GroupState(layout, spec, record, self.wrapped.state_names(), states)
        return Snapshot(JOB, "run", record.iteration, (group,))

    def everything(self) -> dict[str, Any]:
        beside = {name: tensor.clone() for name, tensor in self.wrapped.kept_beside().items()}
        optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "beside": beside,
            "optimizer": {**optimizer, "state": by_name(optimizer["state"])},
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "draws": [torch.rand(2).tolist(), random.random(), float(np.random.rand())],
        }


def by_name(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Sort optimizer state, because state of frozen parameters may be in another order."""
    return {number: dict(sorted(entries.items())) for number, entries in sorted(states.items())}


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with alone():
        yield


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_new_process_goes_on_from_the_newest(
    kind: on_disk.Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = DiskScript(1)
    record = script.train(5)
    saved_checkpoint = checkpoint(script.snapshot(record), by_name=kind == "dcp")
    on_disk.save(saved_checkpoint, checkpoint_path(tmp_path, 2, 4, kind), kind)
    expected = script.everything()
    monkeypatch.setenv("CHECKMATE_CHECKPOINTS", str(tmp_path))
    there = list_checkpoints(None)
    (path,) = there.paths
    assert (there.generation, there.unused_names) == (2, "")
    resumed_script = DiskScript(2)
    resumed = from_disk.install_checkpoint(path, PLACE, resumed_script.watched, ONE_STAGE)
    again = resumed.record
    assert (resumed.extra, resumed.other_ranks) == ({"seen": 7}, "")
    state_parts = resumed_script.everything()
    for name in expected:
        assert digest(state_parts[name]) == digest(expected[name]), name
    assert again.iteration == 4
    assert generators_of(PLACE, Start(plan_without_state(1, ""), record=again))["in_loop"]
    first = again.parts[0].step
    assert list(first.next_options) == list(record.parts[0].step.next_options)
    assert state.loads(first.scheduler) == state.loads(record.parts[0].step.scheduler)
    assert first.scheduler_class == record.parts[0].step.scheduler_class == "OneCycleLR"
    assert set(again.buffers) == {name for name in record.buffers if not state.is_frozen_state(name)}
    assert [part.position for part in again.parts] == [0, 1]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
@pytest.mark.parametrize("turned", [False, True])
def test_state_gets_the_memory_format_of_the_parameter_that_is_there(
    kind: on_disk.Format, turned: bool, tmp_path: Path
) -> None:
    """Torch's fused steps ignore strides, so in other formats they would mix up elements."""
    script = DiskScript(1)
    record = script.train(3)
    on_disk.save(checkpoint(script.snapshot(record), by_name=kind == "dcp"), tmp_path / "c.pt", kind)
    resumed = DiskScript(2, turned=turned)
    from_disk.install_checkpoint(tmp_path / "c.pt", PLACE, resumed.watched, ONE_STAGE)
    target, source = (next(iter(some_script.model.parameters())) for some_script in (resumed, script))
    assert target.stride() == ((1, 5) if turned else (6, 1))
    for name in ("exp_avg", "exp_avg_sq"):
        moment = resumed.optimizer.state[target][name]
        assert torch.equal(moment, script.optimizer.state[source][name])
        assert moment.stride() == target.stride()


def test_a_checkpoint_file_keeps_memory_formats(tmp_path: Path) -> None:
    """So plain PyTorch, which keeps the formats of loaded state, steps correctly."""
    script = DiskScript(1)
    on_disk.save(checkpoint(script.snapshot(script.train(2))), tmp_path / "c.pt", "torch")
    document = torch.load(tmp_path / "c.pt", weights_only=True)
    lies = [document["model"]["0.weight"], document["optimizer"]["state"][0]["exp_avg"]]
    assert [tensor.stride() for tensor in lies] == [(1, 5), (1, 5)]


def split_on_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Store a weight's halves under names of their own, as torchtitan's FusedQKVLinear does its thirds."""
    state_dict[f"{prefix}upper"], state_dict[f"{prefix}lower"] = state_dict.pop(f"{prefix}weight").split(
        [2, 3]
    )


def merge_on_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    if f"{prefix}upper" in state_dict:
        halves = [state_dict.pop(f"{prefix}{name}") for name in ("upper", "lower")]
        state_dict[f"{prefix}weight"] = torch.cat(halves)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_checkpoint_has_parameters_that_the_models_hooks_store_otherwise(
    kind: on_disk.Format, tmp_path: Path
) -> None:
    scripts = [DiskScript(seed) for seed in (1, 2)]
    for script in scripts:
        linear: Any = script.model[0]
        linear.register_state_dict_post_hook(split_on_save)
        linear.register_load_state_dict_pre_hook(merge_on_load)
    first, second = scripts
    weight, restored_weight = (dict(script.model.named_parameters())["0.weight"] for script in scripts)
    assert "0.weight" not in first.model.state_dict()
    document = checkpoint(first.snapshot(first.train(3)), by_name=kind == "dcp")
    assert torch.equal(document["model"]["0.weight"], weight)
    on_disk.save(document, tmp_path / "c.pt", kind)
    from_disk.install_checkpoint(tmp_path / "c.pt", PLACE, second.watched, ONE_STAGE)
    assert torch.equal(restored_weight, weight)
    assert digest(second.everything()["optimizer"]) == digest(first.everything()["optimizer"])


def test_no_folder_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHECKMATE_CHECKPOINTS", raising=False)
    assert list_checkpoints(None) == list_checkpoints(tmp_path / "none") == OnDisk()


def save_all(script: DiskScript, folder: Path, *numbers: tuple[int, int]) -> list[Path]:
    """Save checkpoints of a script, with the names of these generations and iterations."""
    saved_checkpoint = checkpoint(script.snapshot(script.train(2)))
    paths = [checkpoint_path(folder, generation, iteration, "torch") for generation, iteration in numbers]
    for path in paths:
        on_disk.save(saved_checkpoint, path, "torch")
    return paths


def test_which_checkpoint_is_taken_is_said_and_which_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = DiskScript(1)
    numbers = [(2, 1), (1, 900), (1, 800), (1, 700), (0, 5000)]
    newest, *older = save_all(script, tmp_path, *numbers)
    os.utime(newest, (0, 0))
    checkpoints = list_checkpoints(tmp_path)
    assert list(checkpoints.paths) == [newest, *older]
    assert plans.after_disk(plans.plan_without_state(7, ""), checkpoints.generation).generation == 3
    with caplog.at_level(logging.INFO, "checkmate"):
        start, extra = from_disk.resume(PLACE, script.watched, plans.plan_without_state(7, ""), checkpoints)
    assert (start.next_iteration, extra) == (2, {"seen": 7})
    names = ", ".join(path.name for path in older[:3])
    assert caplog.messages == [
        f"resumed from {newest}: iteration 2 comes next (with parameters, optimizer, random generators, "
        "5 buffers and frozen parameters, extra state of 1 module, scheduler, scaler, extra())",
        f"training had ended with iteration 1: {ANEW}",
        f"older checkpoints were not used: {names} and 1 more",
    ]


@pytest.mark.parametrize("damage", ["cut short", "half copied"])
def test_an_older_checkpoint_is_not_taken_in_silence(damage: str, tmp_path: Path) -> None:
    """The error names both; the older one can be selected, and later checkpoints are newer than all."""
    script = DiskScript(1)
    newest, older = save_all(script, tmp_path, (1, 900), (1, 800))
    if damage == "cut short":
        newest.write_bytes(newest.read_bytes()[:1000])
    else:  # the result of an interrupted `cp -r`
        newest.unlink()
        newest = checkpoint_path(tmp_path, 1, 900, "dcp")
        newest.mkdir()
        (newest / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(RestoreError) as excinfo:
        from_disk.resume(PLACE, script.watched, plans.plan_without_state(7, ""), list_checkpoints(tmp_path))
    assert f"can't read {newest} as a checkpoint: " in str(excinfo.value)
    assert f"; checkpoints='{older}' selects the one before it; `checkmate reset JOB`" in str(excinfo.value)
    chosen_disk = list_checkpoints(older)
    assert chosen_disk.paths == (older,)
    assert chosen_disk.generation == 1
    start, _ = from_disk.resume(PLACE, script.watched, plans.plan_without_state(7, ""), chosen_disk)
    assert start.next_iteration == 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    script = DiskScript(1)
    document = checkpoint(script.snapshot(script.train(2)))
    path = checkpoint_path(tmp_path, 0, 1, "torch")
    on_disk.save({**document, "job": "another"}, path, "torch")
    with pytest.raises(InstallError, match="belongs to the job another, not to demo"):
        from_disk.install_checkpoint(path, PLACE, script.watched, ONE_STAGE)
    on_disk.save(document, path, "torch", replace=True)
    with pytest.raises(InstallError, match="doesn't fit the script: .*size mismatch for 0.weight"):
        from_disk.install_checkpoint(path, PLACE, DiskScript(1, width=7).watched, ONE_STAGE)
    bare = Watched(script.wrapped, script.optimizer)
    with pytest.raises(
        InstallError, match="has a scheduler, a OneCycleLR: pass scheduler= to checkmate.restore"
    ):
        from_disk.install_checkpoint(path, PLACE, bare, ONE_STAGE)
    resumed = DiskScript(2)
    resumed.scheduler = ExponentialLR(resumed.optimizer, 0.9)  # type: ignore[assignment]
    expected = resumed.everything()
    with pytest.raises(InstallError, match="scheduler is a OneCycleLR, but the script's is an ExponentialLR"):
        from_disk.install_checkpoint(path, PLACE, resumed.watched, ONE_STAGE)
    older = {name: value for name, value in document.items() if name != "scheduler_class"}
    on_disk.save(older, path, "torch", replace=True)
    with pytest.raises(
        InstallError, match="the state's scheduler has .*total_steps.*ExponentialLR has gamma"
    ):
        from_disk.install_checkpoint(path, PLACE, resumed.watched, ONE_STAGE)
    for name in ("model", "optimizer", "scheduler"):
        assert digest(resumed.everything()[name]) == digest(expected[name]), name


def test_ranks_that_the_checkpoint_does_not_know_go_on_with_generators_of_their_own(tmp_path: Path) -> None:
    """They get the `extra` of the lowest rank; ranks that are there get their own."""
    script = DiskScript(1)
    document = checkpoint(script.snapshot(script.train(2)))
    document["extra"] = {0: "first", 1: "second"}
    on_disk.save(document, tmp_path / "c.pt", "torch")
    four = job(ranks=4)
    fresh = DiskScript(2)
    torch.manual_seed(77)
    expected = torch.rand(2)
    torch.manual_seed(77)
    resumed = from_disk.install_checkpoint(
        tmp_path / "c.pt", places.place_of(four, 3, 4, None), fresh.watched, ONE_STAGE
    )
    assert torch.equal(torch.rand(2), expected)
    assert resumed.extra == "first"
    assert resumed.other_ranks.startswith("rank 3 keeps the script's random generators, and gets extra() of")
    assert [state.loads(part.extra) for part in resumed.record.parts] == ["first", "second", "first", "first"]
    assert [bool(part.rng) for part in resumed.record.parts] == [True, True, False, False]
    torch.manual_seed(77)
    resumed = from_disk.install_checkpoint(
        tmp_path / "c.pt", places.place_of(four, 1, 4, None), fresh.watched, ONE_STAGE
    )
    assert not torch.equal(torch.rand(2), expected) and resumed.extra == "second" and not resumed.other_ranks
    resumed = from_disk.install_checkpoint(
        tmp_path / "c.pt", places.place_of(four, 0, 4, None), fresh.watched, ONE_STAGE
    )
    assert resumed.other_ranks == (
        "it is of 2 ranks, and there are 4 now: ranks 2, 3 keep the script's random generators, and get "
        "extra() of the former rank 0"
    )


def staged(path: Path) -> None:
    """Save a checkpoint of two stages of two replicas each; a rank's generator has its number as seed."""
    script = DiskScript(1)
    snapshot = script.snapshot(script.train(2))
    data = meshed(pp=2, replicate=2)
    mesh = read_job(write(path.parent, data))
    groups = []
    for first in (0, 2):
        (group,) = (
            replace(snapshot_group, record=pb.IterationRecord()) for snapshot_group in snapshot.groups
        )
        group.record.CopyFrom(snapshot.groups[0].record)
        for part in group.record.parts:
            rank = first + part.position
            torch.manual_seed(rank)
            part.rng = state.dump_generators({"torch": torch.get_rng_state(), **PLAIN})
            part.extra = state.dumps(f"of rank {rank}")
        groups.append(group)
    whole = replace(snapshot, job=mesh, groups=tuple(groups))
    on_disk.save(checkpoint(whole, by_name=path.suffix == ""), path, "torch" if path.suffix else "dcp")


@pytest.mark.parametrize("name", ["c.pt", "c"])
def test_ranks_are_matched_by_place_within_their_stage(name: str, tmp_path: Path) -> None:
    """With four replicas instead of two, stage 1 has the ranks 4 to 7, and had 2 and 3."""
    staged(tmp_path / name)
    job_now = read_job(write(tmp_path, meshed(pp=2, replicate=4)))
    resumptions: dict[int, tuple[Any, int, str]] = {}
    for rank in range(8):
        fresh = DiskScript(2)
        place = places.place_of(job_now, rank, 8, None)
        torch.manual_seed(100 + rank)
        resumed = from_disk.install_checkpoint(tmp_path / name, place, fresh.watched, [[0], [1]])
        resumptions[rank] = resumed.extra, torch.initial_seed(), resumed.other_ranks
    of = {0: 0, 1: 1, 4: 2, 5: 3}
    assert {rank: seed for rank, (_, seed, _) in resumptions.items()} == {
        rank: of.get(rank, 100 + rank) for rank in range(8)
    }
    assert {rank: extra for rank, (extra, _, _) in resumptions.items()} == {
        rank: f"of rank {of.get(rank, 0 if rank < 4 else 2)}" for rank in range(8)
    }
    assert {rank for rank, (_, _, warned) in resumptions.items() if warned} == {0, 2, 3, 4, 6, 7}
    assert resumptions[4][2] == (
        "stage 1 of it is of 2 ranks, and there are 4 now: ranks 6, 7 keep the script's random generators, "
        "and get extra() of the former rank 2"
    )
    assert resumptions[7][2] == (
        "rank 7 keeps the script's random generators, and gets extra() of the former rank 2, because "
        "there was no rank in its place"
    )


@pytest.mark.parametrize(
    ("saved_ranks", "current_ranks", "expected"),
    [
        (StageRanks((4, 5, 6, 7)), StageRanks((0, 1, 2, 3)), {0: 4, 1: 5, 2: 6, 3: 7}),
        (StageRanks((0, 1, 2, 3), tp=2), StageRanks((0, 1)), {0: 0, 1: 2}),
        (StageRanks((0, 1)), StageRanks((2, 3, 4, 5), tp=2), {2: 0, 4: 1}),
    ],
    ids=["another stage's ranks", "without tensor parallelism", "with tensor parallelism"],
)
def test_ranks_that_share_a_sample_stay_together(
    saved_ranks: StageRanks, current_ranks: StageRanks, expected: dict[int, int]
) -> None:
    counterparts = Counterparts(saved_ranks, current_ranks)
    assert counterparts.of_rank == expected
    assert bool(counterparts.warning(current_ranks.ranks[0], "it")) == (
        len(saved_ranks.ranks) != len(current_ranks.ranks)
    )


def test_whatever_a_script_raises_while_it_is_resumed_is_told_to_all_ranks() -> None:
    """Otherwise the others would wait for ever."""

    def load() -> None:
        raise TypeError("a scheduler of the script's own wants other keys")

    _, trouble, _ = run_on_all_ranks(PLACE, load)
    assert trouble == "rank 0 (192.168.0.0): TypeError: a scheduler of the script's own wants other keys"


def test_state_of_other_ranks_is_not_replaced_by_an_older_checkpoint() -> None:
    def load() -> None:
        raise OtherRanks("the shadow nodes hold other parts of the model")

    with pytest.raises(RestoreError, match="^rank 0 .*: the shadow nodes hold other parts"):
        run_on_all_ranks(PLACE, load)
