"""Shadow nodes, and a training of each DP group whose checkpoints can be checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkmate import state
from checkmate.consolidate import disk, kept
from checkmate.consolidate.snapshot import Snapshot, SnapshotReader
from checkmate.job.schema import Job
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from testbed.small_training import RUN, SmallTraining
from tests.support.shadow.world import World


class Trained(SmallTraining):
    """A training with a schedule, and records like those of real ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.options: list[str] = []

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

    def check_group(self, found: dict[str, Any], iteration: int) -> None:
        """Check that a group of a checkpoint is the state of this training after an iteration."""
        assert (found["job"], found["iteration"], found["group"]) == (self.job.job, iteration, self.group)
        assert (found["run"], found["generation"]) == (self.run, 1)
        expected = self.states[iteration]
        for number, held in expected.items():
            tensor, values = state.from_held(self.layout.parameters[number], *held)
            assert torch.equal(found["model"][f"p{number}"], tensor), f"p{number} after {iteration}"
            theirs = found["optimizer"]["state"][number]
            for name, value in values.items():
                assert torch.equal(theirs[name], torch.as_tensor(value)), f"{name} of p{number}"
        ranks = [rank.rank for rank in self.job.dp_groups[self.group].ranks]
        assert {r: v["torch"].tolist() for r, v in found["rng"].items()} == {
            rank: [iteration % 256, position] for position, rank in enumerate(ranks)
        }
        assert [v["at"] for v in found["extra"].values()] == [10 * iteration + i for i in range(len(ranks))]
        assert found["buffers"]["seen"].item() == iteration
        assert found["scheduler"]["last_epoch"] == iteration + 1
        assert found["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01 * 0.9 ** (iteration + 1))


class ConsolidatePlace:
    """Shadow nodes, and a training of each DP group."""

    def __init__(self, stack: ExitStack, **kwargs: Any) -> None:
        self.world = World(stack, **kwargs)
        self.job: Job = self.world.job
        self.trainings: list[Trained] = []
        stack.callback(self.close)
        self.begin_again(RUN)

    def begin_again(self, run: str) -> None:
        """Begin training with iteration 0 and generation 1, as if there had been no training before."""
        incarnation = max((training.incarnation + 1 for training in self.trainings), default=0)
        self.close()
        groups = range(len(self.job.dp_groups))
        self.trainings = [Trained(self.job, self.world.copies, group=group) for group in groups]
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

    def check(self, found: dict[str, Any], iteration: int) -> None:
        for index, training in enumerate(self.trainings):
            training.check_group(disk.group_of(found, index), iteration)

    def read(self, timeout: float = 20, at_least: int = 0) -> Snapshot:
        with SnapshotReader(self.job) as nodes:
            return nodes.read(timeout, at_least)

    @contextmanager
    def going_on(self, most: int = 2000) -> Iterator[None]:
        """Train in the background, as fast as the nodes follow."""
        done = threading.Event()

        def train() -> None:
            for _ in range(most):
                if done.is_set():
                    return
                self.iterate()

        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train)
            try:
                yield
            finally:
                done.set()
                training.result()

    def file(self, folder: Path) -> Path:
        data = self.job.model_dump(mode="json", exclude_none=True)
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(data))
        return path


def kept_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest first."""
    return [one.path for one in kept.whole(folder)]
