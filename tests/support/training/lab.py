"""Training runs in a lab, for tests: switch, controller, shadow nodes, and ranks that can be killed.

with training_lab("single_tor") as lab:          # or a topology as the data of its YAML
    first = lab.train(Orders(str(tmp_path / "a"), iterations=20), kill_at=7)
    again = lab.train(Orders(str(tmp_path / "a"), iterations=20))
    assert equal(again.states(), uninterrupted.states())
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.training.orders import ScriptOrders
from topologies import lab as labs
from topologies.crew import CHECKMATE, Crew, LabController, Member, checkmate, serving
from topologies.describe import topology as describe
from topologies.describe.topology import LabError, Topology
from topologies.kernel.links import MGMT_INTERFACE
from topologies.lab import Lab

_PORT = 29500
_SECONDS = 240.0


@dataclass(frozen=True)
class LabRun:
    """The results of one start of a training job."""

    folder: Path
    ranks: int

    def lines(self, rank: int, event: str) -> list[dict[str, Any]]:
        """Return a rank's records of an event, in all of its starts."""
        file = self.folder / f"rank{rank}.jsonl"
        entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in entries if line["event"] == event]

    def losses(self, rank: int) -> dict[int, float]:
        """Return the last loss of each iteration."""
        return {line["iteration"]: line["loss"] for line in self.lines(rank, "iteration")}

    def resumed(self, rank: int = 0) -> int:
        """Return the first iteration of its last start."""
        return int(self.lines(rank, "resumed")[-1]["iteration"])

    def state(self, rank: int, suffix: str = "") -> dict[str, Any]:
        """Return a rank's final state; with `keep_each`, also `after{iteration}.` or `restored.`"""
        return dict(torch.load(self.folder / f"rank{rank}.{suffix}pt", weights_only=False))

    def states(self, suffix: str = "") -> list[dict[str, Any]]:
        """Return this state of all ranks."""
        return [self.state(rank, suffix) for rank in range(self.ranks)]


class TrainingLab:
    """A lab with a running controller and shadow nodes."""

    def __init__(self, lab: Lab, crew: Crew, controller: LabController) -> None:
        self.lab, self.crew, self.controller = lab, crew, controller
        self.shadows: dict[int, Member] = {}
        self.ranks: list[Member] = []

    @property
    def topology(self) -> Topology:
        """The lab's topology."""
        return self.lab.topology

    def use_nccl(self) -> None:
        """Have ranks that start from now on use NCCL; only they read this key of the job file."""
        file = self.lab.job_file
        file.write_text(f"{file.read_text()}collective: nccl\n")

    def start_shadow_nodes(self, numbers: Sequence[int] | None = None, *options: str) -> None:
        """Start these shadow nodes (default: all), and wait until they serve."""
        members = []
        for host in self.topology.shadow_nodes:
            if numbers is None or host.number in numbers:
                argv: list[str | Path] = [
                    *CHECKMATE,
                    "shadow",
                    self.lab.job_file,
                    "--id",
                    str(host.number),
                    "--no-view",
                    *options,
                ]
                environment = {"OMP_NUM_THREADS": "1"}
                member = self.crew.start(host.name, host.name, argv, environment=environment)
                self.shadows[host.number] = member
                members.append(member)
        self.await_ready(members)

    def await_ready(self, members: Sequence[Member]) -> None:
        """Wait until these shadow nodes serve."""
        self.crew.wait(
            lambda: all("ready" in m.output_text() for m in members), "shadow nodes to serve", _SECONDS
        )

    def await_live(self, number: int) -> None:
        """Wait until all of a shadow node's holds are live since its last start."""
        member = self.shadows[number]
        shards = member.error_text().count("begins at iteration") or 1
        self.crew.wait(
            lambda: member.error_text().count(": live ") >= shards,
            f"shadow node {number} to be live",
            _SECONDS,
        )

    def reset(self) -> None:
        """Have the nodes discard what was trained, so that a script without `restore` may begin."""
        checkmate(self.crew, "reset", self.lab.job_file, "--yes")

    def start(self, orders: ScriptOrders) -> LabRun:
        """Start all ranks of a training script."""
        folder = Path(orders.folder)
        folder.mkdir(parents=True, exist_ok=True)
        groups = tuple(tuple(rank.number for rank in group.ranks) for group in self.topology.groups)
        file = replace(orders, groups=groups).write(folder / "orders.json")
        self.start_script("tests.scripts.training", file)
        return LabRun(folder, len(self.ranks))

    def start_script(self, module: str, *arguments: str | Path) -> None:
        """Start all ranks of any script."""
        ranks = self.topology.ranks
        self.ranks = [
            self.crew.start(
                rank.name,
                rank.host.name,
                [sys.executable, "-m", module, *arguments],
                environment={
                    "RANK": str(rank.number),
                    "WORLD_SIZE": str(len(ranks)),
                    "MASTER_ADDR": str(ranks[0].mgmt),
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": MGMT_INTERFACE,
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in ranks
        ]

    def train(self, orders: ScriptOrders, *, kill_at: int | None = None) -> LabRun:
        """Train to the end, or until rank 0 has completed iteration `kill_at`, and kill all ranks."""
        run = self.start(orders)
        if kill_at is None:
            self.crew.finish(self.ranks, _SECONDS)
        else:
            self.await_iteration(run, kill_at)
            self.kill_ranks()
        return run

    def await_iteration(self, run: LabRun, iteration: int) -> None:
        """Wait until rank 0 has completed an iteration."""
        self.crew.wait(lambda: iteration in run.losses(0), f"iteration {iteration} to end", _SECONDS)

    def end(self, run: LabRun) -> int:
        """End a run with an open end; return its number of iterations."""
        end = max(run.losses(0), default=0) + 20  # no rank has reached it
        file = run.folder / "end.next"
        file.write_text(str(end))
        file.replace(run.folder / "end")
        self.crew.finish(self.ranks, _SECONDS)
        return end

    def consolidate(self, *options: str | Path) -> str:
        """Run `checkmate consolidate` beside the controller; return its output."""
        return checkmate(self.crew, "consolidate", self.lab.job_file, *options)

    def kill_ranks(self) -> None:
        """Send SIGKILL to all ranks."""
        for member in self.ranks:
            self.crew.kill(member)

    def await_deaths(self) -> None:
        """Wait until a rank has died according to its orders; then kill the others, like torchrun."""
        with contextlib.suppress(LabError):
            self.crew.wait(lambda: False, "a rank to die", _SECONDS)
        self.kill_ranks()

    def status(self) -> dict[int, dict[str, Any]]:
        """Return the last status of each running shadow node that was started with --json."""
        return {number: json.loads(m.output_text().splitlines()[-1]) for number, m in self.shadows.items()}

    def stop_shadow_nodes(self) -> None:
        """Stop the shadow nodes as Ctrl-C does."""
        for member in self.shadows.values():
            if member in self.crew:
                self.crew.stop(member)


@contextlib.contextmanager
def training_lab(
    topology: str | Mapping[str, Any], *, shadow_nodes: bool = True, **options: Any
) -> Iterator[TrainingLab]:
    """Yield a lab of this topology (a name, or the data of its YAML); `options` are those of `Lab`."""
    name = f"t{os.getpid()}_{random.randrange(10**6)}"
    described = describe.load(topology) if isinstance(topology, str) else describe.build(name, dict(topology))
    try:
        with Lab(described, name=name, **options) as lab, Crew(lab) as crew, serving(crew) as controller:
            started_lab = TrainingLab(lab, crew, controller)
            if shadow_nodes:
                started_lab.start_shadow_nodes()
            yield started_lab
    finally:
        labs.down(name)  # left by a failed test


def equal(first: Any, second: Any) -> bool:
    """Return whether states have the same bits."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and bytes(first.contiguous().view(-1).view(torch.uint8).numpy())
            == bytes(second.contiguous().view(-1).view(torch.uint8).numpy())
        )
    if isinstance(first, Mapping):
        return (
            isinstance(second, Mapping)
            and first.keys() == second.keys()
            and all(equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and bool(first == second)
