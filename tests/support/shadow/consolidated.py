"""Shadow nodes, and a training of each DP group whose checkpoints can be checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkmate import state
from checkmate.consolidate import checkpoint_folder, disk
from checkmate.consolidate.snapshot import Snapshot, SnapshotReader
from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.small_training import RUN, SmallTraining
from tests.support.shadow.world import World


class Trained(SmallTraining):
    """A training with a schedule, and records like those of real ranks.

    With `shards` its parameters are chunks of a sharded model's, of which group g has the g-th rows.
    """

    def __init__(self, *args: Any, shards: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if shards:
            parameters = [self._chunk(parameter, shards) for parameter in self.layout.parameters]
            self.layout = make_layout(parameters, self.layout.shards, self.layout.bucket_bytes)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.options: list[str] = []

    def _chunk(self, parameter: Parameter, shards: int) -> Parameter:
        rows, *inner = parameter.shape
        offset = (self.group * rows, *(0 for _ in inner))
        return replace(parameter, whole=(shards * rows, *inner), offset=offset)

    def record(self, nodes: Any = None) -> None:
        self.options = [options_of(group) for group in self.optimizer.param_groups]
        self.scheduler.step()
        super().record(nodes)

    def part(self, position: int) -> pb.RecordPart:
        part = super().part(position)
        part.rng = state.dump_generators(
            {"torch": torch.tensor([self.iteration % 256, position], dtype=torch.uint8)}
        )
        part.extra = state.dumps({"at": 10 * self.iteration + position})
        if position == 0:
            part.buffers = state.dumps({"seen": torch.tensor(self.iteration)})
            part.step.options[:] = self.options
            part.step.next_options.extend(options_of(group) for group in self.optimizer.param_groups)
            part.step.scheduler = state.dumps(self.scheduler.state_dict())
        return part

    def check_group(self, document: dict[str, Any], iteration: int) -> None:
        """Check that a group of a checkpoint is the state of this training after an iteration."""
        assert (document["job"], document["iteration"], document["group"]) == (
            self.job.job,
            iteration,
            self.group,
        )
        assert (document["run"], document["generation"]) == (self.run, 1)
        expected = self.states[iteration]
        for number, state_held in expected.items():
            tensor, values = state.from_held(self.layout.parameters[number], *state_held)
            assert torch.equal(document["model"][f"p{number}"], tensor), f"p{number} after {iteration}"
            stored = document["optimizer"]["state"][number]
            for name, value in values.items():
                assert torch.equal(stored[name], torch.as_tensor(value)), f"{name} of p{number}"
        ranks = [rank.rank for rank in self.job.dp_groups[self.group].ranks]
        assert {r: v["torch"].tolist() for r, v in document["rng"].items()} == {
            rank: [iteration % 256, position] for position, rank in enumerate(ranks)
        }
        assert [v["at"] for v in document["extra"].values()] == [
            10 * iteration + i for i in range(len(ranks))
        ]
        assert document["buffers"]["seen"].item() == iteration
        assert document["scheduler"]["last_epoch"] == iteration + 1
        assert document["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01 * 0.9 ** (iteration + 1))


class ConsolidatePlace:
    """Shadow nodes, and a training of each DP group."""

    def __init__(self, stack: ExitStack, *, sharded: bool = False, **kwargs: Any) -> None:
        """With `sharded` all DP groups have chunks of one model."""
        self.world = World(stack, **kwargs)
        self._sharded = sharded
        self.job: Job = self.world.job
        self.trainings: list[Trained] = []
        stack.callback(self.close)
        self.begin_again(RUN)

    def begin_again(self, run: str) -> None:
        """Begin training with iteration 0 and generation 1, as if there had been no training before."""
        incarnation = max((training.incarnation + 1 for training in self.trainings), default=0)
        self.close()
        groups = range(len(self.job.dp_groups))
        shards = len(groups) if self._sharded else 0
        self.trainings = [
            Trained(self.job, self.world.copies, group=group, shards=shards, seed=1 + group)
            for group in groups
        ]
        for training in self.trainings:
            training.incarnation = incarnation
            training.begin(list(self.world.nodes), run=run, generation=1)
        for training in self.trainings:
            training.seed_all()
        self.world.ready()

    def close(self) -> None:
        for training in self.trainings:
            training.close()

    def iterate(self, count: int = 1) -> None:
        for _ in range(count):
            for training in self.trainings:
                training.iterate()
        self.world.stepped(self.trainings[0].iteration)

    def check(self, document: dict[str, Any], iteration: int) -> None:
        if self._sharded:
            self._check_whole(document, iteration)
            return
        for index, training in enumerate(self.trainings):
            training.check_group(disk.stage_in(document, index), iteration)

    def _check_whole(self, document: dict[str, Any], iteration: int) -> None:
        """Check that a checkpoint has the rows of all groups, one after another."""
        assert (document["job"], document["iteration"], document["group"]) == (self.job.job, iteration, 0)
        states_held = [training.states[iteration] for training in self.trainings]
        for number, parameter in enumerate(self.trainings[0].layout.parameters):
            chunks = [state.from_held(parameter, *states[number]) for states in states_held]
            assert torch.equal(document["model"][parameter.name], torch.cat([tensor for tensor, _ in chunks]))
            stored = document["optimizer"]["state"][number]
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(stored[name], torch.cat([values[name] for _, values in chunks]))  # type: ignore[misc]
            assert torch.equal(stored["step"], torch.as_tensor(chunks[0][1]["step"]))
        ranks = {rank.rank: position for g in self.job.dp_groups for position, rank in enumerate(g.ranks)}
        assert {
            rank: training["at"] - 10 * iteration for rank, training in document["extra"].items()
        } == ranks
        assert document["buffers"]["seen"].item() == iteration and "rank_buffers" not in document

    def read(self, timeout: float = 20, at_least: int = 0) -> Snapshot:
        with SnapshotReader(self.job) as nodes:
            return nodes.read(timeout, at_least)

    @contextmanager
    def going_on(self, most: int = 2000) -> Iterator[None]:
        """Train in the background, as fast as the nodes follow."""
        is_over = threading.Event()

        def train() -> None:
            for _ in range(most):
                if is_over.is_set():
                    return
                self.iterate()

        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train)
            try:
                yield
            finally:
                is_over.set()
                training.result()

    def file(self, folder: Path) -> Path:
        data = data_of(self.job, exclude_none=True)
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(data))
        return path


def kept_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest first."""
    return [checkpoint.path for checkpoint in checkpoint_folder.list_complete(folder)]
