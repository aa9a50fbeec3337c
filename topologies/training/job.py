"""A training job in a lab: shadow nodes, and a torchrun for each rank, which restarts it after a crash.

with Lab(load("single_tor")) as lab, Crew(lab) as crew, serving(crew):
    training = TrainingJob(crew, JobPlan(arguments=("--iterations", "20")), folder)
    training.start_shadow_nodes()
    training.start()
    training.finish(seconds=100)
    print(training.record().losses)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from topologies.crew import TEMPORARY, Crew, checkmate, controlled
from topologies.describe.job_files import Target
from topologies.describe.topology import LabError, LabRank, Topology
from topologies.lab import Lab
from topologies.torchrun import Starter, keeps_processes
from topologies.training.job_processes import JobProcesses
from topologies.training.orders import Kill, Orders, Reduce
from topologies.training.record import JobRecord, read_events, read_losses

SCRIPT: Final = "checkmate.examples.gpt.train"


@dataclass(frozen=True)
class JobPlan:
    """The training to run, and the ranks to kill. `arguments` are those of the script, without --out.

    The script of ranks that `checkmate launch` starts gets the argument --in-place.
    """

    arguments: tuple[str, ...] = ()
    module: str = SCRIPT
    reduce: Reduce = "checkmate"
    kills: tuple[Kill, ...] = ()
    restarts: int = 3
    gated: bool = False
    shadow_options: tuple[str, ...] = ()
    extension: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    starter: Starter = "torchrun"


class TrainingJob(JobProcesses):
    """One training job in a lab, as planned; its output is in `folder`.

    `cpus` are the CPUs of ranks once they are ready to begin, `shadow_cpus` those of shadow nodes.
    """

    def __init__(
        self,
        crew: Crew,
        plan: JobPlan,
        folder: Path,
        *,
        cpus: Collection[int] | None = None,
        shadow_cpus: Collection[int] | None = None,
    ) -> None:
        super().__init__(crew, shadow_cpus=shadow_cpus)
        self.plan = plan
        self.folder = folder
        self.shadow_options = ("--json", *plan.shadow_options)
        self._cpus = cpus
        self._gate = folder / "gate"
        folder.mkdir(parents=True, exist_ok=True)
        for remnant in (*folder.glob("rank*.*"), folder / "final.pt"):
            remnant.unlink(missing_ok=True)

    def start(self, starter: Starter | None = None) -> None:
        """Start the ranks. If the plan is gated, iterations begin only after `let`.

        `starter` is used instead of the plan's.
        """
        plan = self.plan
        starter = starter or plan.starter
        self.let(0)
        self._started_at = time.monotonic()
        in_place = ("--in-place",) if keeps_processes(starter) else ()
        orders = Orders(
            module=plan.module,
            arguments=(*plan.arguments, *in_place, "--out", str(self.folder)),
            events=str(self.folder),
            reduce=plan.reduce,
            gate=str(self._gate) if plan.gated else None,
            kills=plan.kills,
            cpus=None if self._cpus is None else tuple(self._cpus),
            extension=plan.extension,
        )
        file = self.folder / "orders.json"
        file.write_text(orders.to_json())
        script: list[str | Path] = ["-m", "topologies.training.in_rank", file]
        self.start_ranks(script, restarts=plan.restarts, environment=plan.environment, starter=starter)

    def let(self, iterations: int, mode: str = "") -> None:
        """Let the ranks begin all iterations below this one; `mode` is for the extension."""
        fresh = self._gate.with_name("gate.next")
        fresh.write_text(f"{iterations} {mode}")
        fresh.replace(self._gate)

    def next_iteration(self) -> int:
        """Return the first iteration that not all ranks have completed."""
        return 1 + min(self._last_iteration(rank) for rank in self.crew.lab.topology.ranks)

    def await_iterations(self, iterations: int, seconds: float) -> None:
        """Wait until each rank has completed this many iterations."""
        last = f"iteration {iterations - 1} to end"
        with self.explained():
            self.crew.wait(lambda: self.next_iteration() >= iterations, last, seconds)

    def await_ready(self, seconds: float) -> None:
        """Wait until each rank is protected in this start, and about to begin."""
        self.crew.wait(
            lambda: all(
                any(e.name == "protected" and e.at > self._started_at for e in events)
                for events in self.record().events.values()
            ),
            "ranks to be ready",
            seconds,
        )

    def statuses(self, node: int) -> list[dict[str, Any]]:
        """Return a shadow node's statuses so far (`checkmate shadow --json`, once a second)."""
        output = self.shadows[f"shadow{node}"].output_text().rpartition("\n")[0]
        return [json.loads(line) for line in output.splitlines()]

    def status(self, node: int) -> dict[str, Any]:
        """Return a shadow node's last status."""
        return self.statuses(node)[-1]

    def keep_logs(self) -> None:
        """Copy the lab's logs, which are removed with it, to `folder`."""
        ignored = shutil.ignore_patterns(TEMPORARY)
        shutil.copytree(self.crew.lab.directory, self.folder / "lab", dirs_exist_ok=True, ignore=ignored)

    def record(self) -> JobRecord:
        """Return the ranks' records so far."""
        events, losses = {}, {}
        for rank in self.crew.lab.topology.ranks:
            events[rank.number] = read_events(_lines(self.folder / f"rank{rank.number}.events.jsonl"))
            losses[rank.number] = read_losses(_lines(self.folder / f"rank{rank.number}.jsonl"))
        return JobRecord(events, losses)

    def state(self) -> dict[str, object]:
        """Return the final parameters and optimizer state that rank 0 saved."""
        file = self.folder / "final.pt"
        if not file.exists():
            raise LabError(f"training ended without {file}")
        return dict(torch.load(file, weights_only=True))

    def consolidated(self, iteration: int) -> dict[str, Any]:
        """Return parameters and optimizer state that the shadow nodes hold, by `checkmate consolidate`.

        Raises:
            LabError: The newest iteration is not `iteration`, or the state is not available in time.
        """
        file = self.folder / "checkpoint.pt"
        checkmate(self.crew, "consolidate", self.crew.lab.job_file, "--out", file, "--format", "torch")
        checkpoint = torch.load(file, weights_only=True)
        if checkpoint["iteration"] != iteration:
            raise LabError(
                f"the shadow nodes' newest iteration is {checkpoint['iteration']}, not {iteration}"
            )
        return {key: checkpoint[key] for key in ("model", "optimizer")}

    def _last_iteration(self, rank: LabRank) -> int:
        lines = _lines(self.folder / f"rank{rank.number}.jsonl")
        return int(json.loads(lines[-1])["iteration"]) if lines else -1


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file: the last may be incomplete."""
    return file.read_text().splitlines(keepends=True) if file.exists() else []


_START_SECONDS: Final = 180.0
_TURN_SECONDS: Final = 180.0


@contextlib.contextmanager
def training_lab(
    topology: Topology,
    target: Target,
    name: str,
    plan: JobPlan,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
    *,
    pinned: bool = True,
    copy_loss: float = 0.0,
) -> Iterator[TrainingJob]:
    """Yield a job in a new lab, with controller and shadow nodes if needed; training is not started.

    If `pinned`, trainers share one CPU, and all else shares another, if this machine has two for us.
    `copy_loss`: as for `Lab`.
    """
    usable = sorted(os.sched_getaffinity(0))
    trainers, other_cpus = ({usable[0]}, {usable[1]}) if pinned and len(usable) > 1 else (None, None)
    lab = Lab(topology, target, name=name, copy_loss=copy_loss, switch_cpus=other_cpus, progress=progress)
    with lab, Crew(lab) as crew, controlled(crew, cpus=other_cpus):
        training = TrainingJob(crew, plan, folder, cpus=trainers, shadow_cpus=other_cpus)
        try:
            if plan.reduce == "checkmate":
                progress("shadow nodes")
                training.start_shadow_nodes()
            yield training
        except LabError:
            training.keep_logs()
            raise
        training.stop()


def start_all(trainings: Collection[TrainingJob]) -> None:
    """Start both, and wait until each rank is ready to begin."""
    for training in trainings:
        training.start()
    for training in trainings:
        training.await_ready(_START_SECONDS)


def take_turns(
    trainings: tuple[TrainingJob, TrainingJob], iterations: range, tick: Callable[[int], None]
) -> None:
    """Train the iterations, in turn as many as their step, alternating which job begins.

    `tick` is called with the number of iterations that both have completed.
    """
    for number, begin in enumerate(iterations):
        until = min(begin + iterations.step, iterations.stop)
        for training in trainings if number % 2 == 0 else trainings[::-1]:
            training.let(until)
            training.await_iterations(until, _TURN_SECONDS)
        tick(until)
