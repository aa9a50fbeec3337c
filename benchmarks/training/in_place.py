"""Recovery in place, beside a restart of all ranks: time from kill -9 of a rank to the next iteration."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped
from testbed.process_memory import unshared
from topologies import torchrun
from topologies.crew import Crew, controlled
from topologies.describe.topology import load
from topologies.kernel.processes import processor_seconds
from topologies.lab import Lab
from topologies.torchrun import Starter
from topologies.training.job_processes import JobProcesses, rank_process

TITLE: Final = (
    "Recovery in place: kill -9 of a rank to the next trained iteration, "
    "a GPT of 5 million parameters on 4 ranks"
)
KILLS: Final = 20
_RESTART: Final = "restart of all ranks by torchrun"
_NO_SPARE: Final = "no spare"
SPARE: Final = "a warm spare"
_STARTERS: Final[dict[str, Starter]] = {
    _RESTART: "torchrun",
    _NO_SPARE: "launch",
    SPARE: "launch --spare",
}
RANKS: Final = 4
_APART: Final = 6
"""Iterations between two kills."""
_SECONDS: Final = 60.0
_START_SECONDS: Final = 240.0
_AIMS: Final = {_NO_SPARE: (2.5, 3.5), SPARE: (1.5, 2.5)}
"""Aim and limit of the median in seconds."""
_READY_SECONDS: Final = 30.0
_MARKS: Final = {
    "the others notice, and a process takes its place": "trainer.restore.started",
    "checkmate.restore": "trainer.restore.ended",
    "checkmate.protect": "trainer.protect.ended",
    "the first iteration": "",
}
"""Parts, in order, each with the event of the new process that ends it."""


def measure() -> list[Result]:
    """Return every figure of this module, with a sample for each kill."""
    if os.geteuid() != 0:
        return [Skipped("recovery in place", "needs root, for network namespaces")]
    results: list[Result] = []
    totals: dict[str, tuple[float, ...]] = {}
    with Progress(transient=True) as bar:
        for words in _STARTERS:
            task = bar.add_task(words, total=KILLS)
            recoveries = []
            with killed_training(words) as training:
                if words == SPARE:
                    results += training.readiness()
                for number in range(KILLS):
                    recoveries.append(training.kill(number % RANKS))
                    bar.update(task, advance=1)
                repeated = training.repeated()
            totals[words] = tuple(sum(parts.values()) for parts in recoveries)
            aim, limit = _AIMS.get(words, (None, None))
            results.append(Figure(f"together, {words}", totals[words], "s", aim, limit, smaller=True))
            results += [
                Figure(f"{part}, {words}", tuple(parts[part] for parts in recoveries), "s") for part in _MARKS
            ]
            results.append(Figure(f"completed iterations repeated, all kills, {words}", (repeated,), ""))
    for words in (_NO_SPARE, SPARE):
        pairs = zip(totals[words], totals[_RESTART], strict=True)
        results.append(Figure(f"in place with {words} / {_RESTART}", tuple(a / b for a, b in pairs), ""))
    return results


@contextmanager
def killed_training(words: str, kills: int = KILLS) -> Iterator[KilledTraining]:
    """Train in the demo's lab, pinned as there: ranks share one CPU, and all else the other."""
    usable = sorted(os.sched_getaffinity(0))
    rank_cpus, other_cpus = ({usable[0]}, {usable[1]}) if len(usable) > 1 else (None, None)
    lab = Lab(load("single_tor"), "softswitch", name="bench_in_place", switch_cpus=other_cpus)
    with (
        tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder,
        lab,
        Crew(lab) as crew,
        controlled(crew, cpus=other_cpus),
    ):
        job = JobProcesses(crew, shadow_cpus=other_cpus)
        job.start_shadow_nodes()
        options = ["--iterations", "100000", "--out", folder]
        options += [] if words == _RESTART else ["--in-place"]
        script = ["-m", "checkmate.examples.gpt.train", *options]
        environment = {"CHECKMATE_EVENTS": str(Path(folder, "events")), "PYTHONDONTWRITEBYTECODE": ""}
        for host in lab.topology.trainers:
            # Two of three restarts by torchrun may fail, because some ranks come back early.
            restarts = 3 * kills
            command = torchrun.command(
                lab.topology, host, script, restarts=restarts, starter=_STARTERS[words]
            )
            job.ranks[host.name] = crew.start(
                host.name, host.name, command, cpus=rank_cpus, environment=environment
            )
        training = KilledTraining(job, Path(folder))
        training.await_iteration(10 * _APART, _START_SECONDS)  # also until spares are ready
        yield training
        job.stop()


class KilledTraining:
    """A training that recovers from one kill after another."""

    def __init__(self, job: JobProcesses, folder: Path) -> None:
        self._job, self._folder = job, folder

    def process(self, rank: int) -> int:
        """Return a rank's process."""
        process = rank_process(self._job.ranks[f"rank{rank}"])
        if process is None:
            raise RuntimeError(f"rank {rank} has no process")
        return process

    def kill(self, rank: int, apart: int = _APART) -> Mapping[str, float]:
        """Kill a rank, and return the parts of the recovery, once training has gone on for a while."""
        self.await_iteration(self._newest(rank) + apart)
        process = self.process(rank)
        before = self._count(rank)
        killed_at, monotonic = time.time(), time.monotonic()
        os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS
        while self._count(rank) == before:
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} has not trained within {_SECONDS:g} s after it was killed")
            time.sleep(0.002)
        ends = {"": killed_at + time.monotonic() - monotonic}
        for line in Path(self._folder, "events", f"{self._name}.rank-{rank}.jsonl").read_text().splitlines():
            with suppress(ValueError):  # a line that the kill has torn
                event = json.loads(line)
                at = datetime.fromisoformat(event["time"]).timestamp()
                if at > killed_at:
                    ends.setdefault(event["event"], at)
        parts, last = {}, killed_at
        for part, mark in _MARKS.items():
            parts[part], last = ends[mark] - last, ends[mark]
        return parts

    def readiness(self) -> list[Figure]:
        """Return what it costs to be ready: processor time of launchers and spares, and a spare's memory."""
        ranks, helpers = [], []
        for launcher in self._job.ranks.values():
            rank = rank_process(launcher)
            assert rank is not None
            ranks.append(rank)
            helpers += [launcher.process.pid, *(child for child in launcher.children() if child != rank)]
        before = [sum(map(processor_seconds, processes)) for processes in (helpers, ranks)]
        time.sleep(_READY_SECONDS)
        after = [sum(map(processor_seconds, processes)) for processes in (helpers, ranks)]
        used, trained = (end - begin for begin, end in zip(before, after, strict=True))
        launchers = {member.process.pid for member in self._job.ranks.values()}
        spares = tuple(unshared(process) / 1e6 for process in helpers if process not in launchers)
        return [
            Figure(
                "processor time of launchers and spares / of the ranks",
                (used / trained,),
                "",
                0.005,
                0.005,
                smaller=True,
            ),
            Figure("memory of a spare that no other process shares", spares, "MB", smaller=True),
        ]

    @property
    def _name(self) -> str:
        return self._job.crew.lab.name

    def repeated(self) -> float:
        """Return how many completed iterations were repeated."""
        lines = [json.loads(line) for line in self._file(0).read_text().splitlines() if line]
        return float(len(lines) - len({line["iteration"] for line in lines}))

    def await_iteration(self, iteration: int, seconds: float = _SECONDS) -> None:
        """Wait until all ranks have completed an iteration."""
        self._job.crew.wait(
            lambda: all(self._newest(rank) >= iteration for rank in range(RANKS)), "iterations", seconds
        )

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.jsonl"

    def _count(self, rank: int) -> int:
        file = self._file(rank)
        return file.read_text().count("\n") if file.exists() else 0

    def _newest(self, rank: int) -> int:
        file = self._file(rank)
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["iteration"]) if lines else -1
