"""A job of a game day: its processes, its restarts, and the check of each against the oracle's promise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.chaos.forked import ForkedLab
from tests.chaos.job import JobWorld
from tests.chaos.oracle import promise
from tests.chaos.sound import SoundnessWatch
from tests.chaos.training_log import TrainingLog
from tests.gameday.parties import PARTIES, Party
from topologies.crew import Crew
from topologies.describe.topology import Topology

METRICS_PORT: Final = 9461
_KEEPER_PORT: Final = 9463
"""In the controllers' namespace; the next job has the next one."""
_AHEAD: Final = 40
"""Iterations from the order to end until the last one, so that every rank reads it in time."""
_NAME: Final = re.compile(r"generation-(\d+)-iteration-(\d+)")


class GamedayWorld(JobWorld):
    """A job whose nodes serve metrics and keep events, and whose disks are in the lab's folder."""

    def __init__(self, party: Party, seed: int, lab: ForkedLab, crew: Crew, topology: Topology) -> None:
        folder = lab.directory / f"job-{party.name}"
        folder.mkdir()
        super().__init__(party.scenario(seed), lab, crew, folder, topology)
        self.party = party
        self.disk = lab.directory / f"disk-{party.name}"
        self.log_disk = lab.directory / f"log-disk-{party.name}"

    @property
    def checkpoints(self) -> Path:
        """The folder of `consolidate --every`, on a small disk."""
        return self.disk / "kept"

    @property
    def node_metrics(self) -> list[str]:
        """The addresses of its nodes' metrics."""
        return [f"{host.mgmt}:{METRICS_PORT}" for host in self.topology.shadow_nodes]

    @property
    def keeper_metrics(self) -> str:
        """The address of the metrics of `consolidate --every`."""
        return f"127.0.0.1:{_KEEPER_PORT + [*PARTIES].index(self.party.name)}"

    def keeper_options(self) -> Sequence[str | Path]:
        """Return the option for metrics."""
        return ["--metrics", self.keeper_metrics]

    def node_options(self, number: int) -> Sequence[str | Path]:
        """Return the options for metrics and events. The log of node 0 is on a small disk."""
        events = self.lab.directory / "events" if number else self.log_disk / "events"
        return ["--metrics", self.node_metrics[number], "--events", events]

    def newest(self) -> tuple[int, int]:
        """Return generation and iteration of the newest checkpoint on disk; (-1, -1) without one."""
        matches = [_NAME.fullmatch(path.name) for path in self.checkpoints.glob("generation-*")]
        return max(((int(match[1]), int(match[2])) for match in matches if match), default=(-1, -1))


class JobRun:
    """Training from its first start to its end, restarted whenever a rank dies. `tick` drives it."""

    def __init__(self, party: Party, world: GamedayWorld, say: Callable[[str, str], None]) -> None:
        self.party, self.world, self._say = party, world, say
        self.log = TrainingLog(world.folder, party.network.world)
        self.watch = SoundnessWatch(party.nodes, world.is_live)
        self.problems: list[str] = []
        self.resumes: list[str] = []
        self.is_over = False
        self.struck = False
        """Whether an act ends this start of the ranks."""
        self.expects_disk = False
        """Whether the next start has to resume from disk."""
        self.protected = False

    @property
    def on_its_way(self) -> bool:
        """Whether this start trains, and all nodes are live."""
        nodes = [self.world.is_live(node) for node in self.party.nodes]
        return self.protected and not self.watch.unsure and all(live for _, live in nodes)

    def start(self) -> None:
        """Start all ranks."""
        self.struck = self.protected = False
        self.world.start_ranks(fresh=self.world.attempt < 0)

    def finish(self) -> None:
        """Have training end soon."""
        new = self.world.stop_file.with_suffix(".new")
        new.write_text(str(self.log.newest + _AHEAD))
        new.rename(self.world.stop_file)

    def tick(self, down: Callable[[str], bool]) -> None:
        """Read what ranks have written, and start them again if one has ended; `down` knows who is down."""
        self._look()
        self.watch.look(lambda node: down(f"{self.party.name}.shadow{node}"))
        statuses = [process.poll() for process in self.world.ranks]
        if self.is_over or (None in statuses and not any(statuses)):
            return
        if not any(statuses):
            self.is_over = True
            return
        self._explain(statuses)
        self.world.end_ranks()
        self._look()
        if not self.problems:
            self.start()

    def compare(self) -> None:
        """Compare each iteration with the undisturbed run's, which has ended."""
        self.problems += self.log.differences(broadcast=not self.party.network.sharded)

    def start_reference(self) -> None:
        """Start the undisturbed run of as many iterations."""
        model = replace(self.party.model, iterations=self.log.newest + 1, pause=0.0)
        self.world.scenario = replace(self.world.scenario, model=model)
        self.world.stop_file.unlink()
        self.world.ranks = self.world.start_reference()

    def _look(self) -> None:
        for line in self.log.look():
            if line["event"] == "resumed":
                self._check(int(line["iteration"]))
            elif line["event"] == "protected":
                self.protected = True
                self.watch.protected(line["at"])

    def _check(self, resumed: int) -> None:
        """Check where a start resumes."""
        before = self.log.past_start(0, self.world.attempt)
        if before is None:
            return
        promised = promise(
            self.party.network, self.watch.facts, before, time.monotonic(), on_disk=self.world.on_disk
        )
        generation, on_disk = self.world.newest()
        text = (
            f"resumed with {resumed}, promised was {promised}; on disk {on_disk} of generation {generation}"
        )
        self.resumes.append(f"start {self.world.attempt}: {text}")
        self._say(self.party.name, text)
        if wrong := promised.broken_by(resumed, silent=resumed == 0):
            self._fail(wrong)
        if self.expects_disk and resumed != on_disk + 1:
            self._fail(f"resumed with {resumed} instead of from disk, which has {on_disk}")
        if promised.lost and resumed < min(promised.at_least, on_disk + 1):
            self._fail(f"resumed with {resumed}, and the disk has {on_disk}")
        self.expects_disk = False

    def _explain(self, statuses: list[int | None]) -> None:
        """Note a problem if no act is the reason why ranks have ended."""
        words = [self.world.last_words(rank) for rank in range(len(statuses))]
        last_words = "; ".join(f"rank{rank} ({statuses[rank]}): {word}" for rank, word in enumerate(words))
        if any("RestoreError" in word for word in words) or not self.struck:
            self._fail(f"ranks ended by themselves: {last_words}")

    def _fail(self, problem: str) -> None:
        self.problems.append(f"{self.party.name}, start {self.world.attempt}: {problem}")
