"""Checkpoints on disk, writers that stop half-way, and small disks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkmate import state
from checkmate.consolidate import disk
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.optim.supported import options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.waiting import wait_until

FORMATS: tuple[disk.Format, ...] = ("dcp", "torch")


class DiskModel(nn.Module):
    """Tied weights, BatchNorm, a frozen parameter, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        output: torch.Tensor = self.head(self.norm(self.embedding(x)).relu()) * self.scale
        return output


class DiskRun:
    """A model with optimizer and schedule, trained for a few steps."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = DiskModel()
        groups: list[dict[str, Any]] = [
            {"params": [self.model.embedding.weight, self.model.scale]},
            {"params": list(self.model.norm.parameters()), "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.iteration = -1
        self.train(3)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.iteration += 1
            torch.manual_seed(self.iteration)
            self.model(torch.randn(4, 8)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def snapshot(self, groups: int = 1) -> Snapshot:
        """Return a snapshot like the shadow nodes'."""
        names = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        parameters = [Parameter(n, tuple(p.shape), "float32") for n, p in names.items()]
        beside = {"scale": self.model.scale, **dict(self.model.named_buffers())}
        record = pb.IterationRecord(
            iteration=self.iteration,
            buffers={name: state.dumps(tensor.detach()) for name, tensor in beside.items()},
        )
        for position in range(3):
            rng = {"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}
            record.parts.add(
                position=position,
                rng=state.dump_generators(rng),
                extra=state.dumps({"at": position, 5: [], "none": {}}),
            )
        step = record.parts[0].step
        step.scheduler = state.dumps(self.scheduler.state_dict())
        step.next_options.extend(options_of(group) for group in self.optimizer.param_groups)
        ids = {id(t): n for n, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        group = GroupState(
            make_layout(parameters, 2),
            spec_of(self.optimizer, {p: i for i, p in enumerate(names.values())}),
            record,
            {key: ids[id(tensor)] for key, tensor in self.model.state_dict(keep_vars=True).items()},
            {i: (p.detach(), dict(self.optimizer.state[p])) for i, p in enumerate(names.values())},
        )
        return Snapshot(job(groups=groups, nodes=2), "run", self.iteration, (group,) * groups)


@contextmanager
def mounted(place: Path, *mount_options: str) -> Iterator[None]:
    """Mount a disk of 1 MB, or something else, at a place that cannot be removed or renamed meanwhile."""
    options = mount_options or ("-t", "tmpfs", "-o", "size=1m", "checkmate-test")
    subprocess.run(["mount", *options, str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def small_checkpoint(kilobytes: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((kilobytes, 256), 1.0)},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "group": 0,
        "iteration": 0,
    }


BLOCKED = """
import sys, time
from pathlib import Path
import torch
from checkmate.consolidate import disk

class Late:
    # Pickled only once it may be: until then the checkpoint is half written.
    def __reduce__(self):
        Path(sys.argv[3], "writing").touch()
        while not Path(sys.argv[3], "go").exists():
            time.sleep(0.01)
        return int, ()

found = {"model": {"w": torch.ones(1000)}, "late": Late(), "optimizer": {"state": {}, "param_groups": []}}
disk.save(found, Path(sys.argv[2]), sys.argv[1])
"""


@contextmanager
def half_way(path: Path, kind: disk.Format, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that has begun to write a checkpoint, and continues when `folder` has a file `go`."""
    with subprocess.Popen([sys.executable, "-c", BLOCKED, kind, str(path), str(folder)]) as process:
        try:
            wait_until((folder / "writing").exists, "half a checkpoint", 30)
            yield process
        finally:
            process.kill()
    (folder / "writing").unlink(missing_ok=True)


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".unfinished-*"))
