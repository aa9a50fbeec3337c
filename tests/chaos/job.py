"""The processes of one job in a lab: shadow nodes, ranks, `consolidate --every`, and undisturbed ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos.forked import ForkedLab
from tests.chaos.scenario import Scenario
from topologies.crew import CHECKMATE, Crew, Member
from topologies.describe.topology import CONTROLLER, Topology
from topologies.kernel.links import MGMT_INTERFACE

PORT = 29500
_RESET_SECONDS: Final = 60
"""Time for `checkmate reset`, which waits for nodes that were killed."""
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class JobWorld:
    """A job of a lab."""

    def __init__(
        self, scenario: Scenario, lab: ForkedLab, crew: Crew, folder: Path, topology: Topology | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            scenario: What is trained.
            lab: The lab.
            crew: Its processes.
            folder: The folder for what ranks write.
            topology: The job, if it is one beside the lab's.
        """
        self.scenario, self.lab, self.crew, self.folder = scenario, lab, crew, folder
        self.topology = topology or lab.topology
        self.job_file = lab.job_file_of(self.topology)
        self.shadows: dict[int, Member] = {}
        self.ranks: list[subprocess.Popen[bytes]] = []
        """Each rank's process, or each host's launcher if ranks recover in place."""
        self.attempt = -1
        self.keeper: Member | None = None

    @property
    def prefix(self) -> str:
        """What the names of its hosts begin with."""
        return self.topology.shadow_nodes[0].name.removesuffix("shadow0")

    @property
    def checkpoints(self) -> Path:
        """The folder of `consolidate --every`."""
        return self.folder / "checkpoints"

    @property
    def on_disk(self) -> bool:
        """Return whether there is a complete checkpoint."""
        return any(self.checkpoints.glob("[!.]*"))

    @property
    def stop_file(self) -> Path:
        """The file with the number of iterations after which training ends before its time."""
        return self.folder / "stop"

    def node_options(self, number: int) -> Sequence[str | Path]:
        """Return further options of `checkmate shadow`."""
        return ()

    def start_shadow_node(self, number: int) -> None:
        """Start a shadow node, without waiting for it."""
        if (member := self.shadows.get(number)) is not None:
            self.crew.restart(member)
            return
        argv: list[str | Path] = [*CHECKMATE, "shadow", self.job_file, "--id", str(number), "--json"]
        argv += self.node_options(number)
        name = self.topology.shadow_nodes[number].name
        self.shadows[number] = self.crew.start(name, name, argv, environment={"OMP_NUM_THREADS": "1"})

    def keeper_options(self) -> Sequence[str | Path]:
        """Return options of `consolidate --every`."""
        return ()

    def start_keeper(self) -> None:
        """Start `consolidate --every` if the scenario has it."""
        if interval := self.scenario.network.every:
            argv: list[str | Path] = [*CHECKMATE, "consolidate", self.job_file, "--out", self.checkpoints]
            argv += ["--every", str(interval), "--keep", "3", *self.keeper_options()]
            self.keeper = self.crew.start(f"{self.prefix}keeper", CONTROLLER, argv)

    def await_shadow_nodes(self) -> None:
        """Wait until all shadow nodes serve."""
        members = self.shadows.values()
        self.crew.wait(lambda: all("ready" in m.output_text() for m in members), "shadow nodes to serve", 60)

    def start_ranks(self, *, fresh: bool) -> None:
        """Start all ranks."""
        self.attempt += 1
        if fresh:  # the nodes still hold what can't be resumed, or what nothing resumed from
            argv: list[str | Path] = [*CHECKMATE, "reset", self.job_file, "--yes"]
            self.crew.run(f"{self.prefix}reset{self.attempt}", CONTROLLER, argv, _RESET_SECONDS)
        first = self.topology.ranks[0]
        orders = self._orders(f"orders{self.attempt}", self.folder, fresh=fresh, reference=False)
        self._orders_file = orders
        environment = {"MASTER_ADDR": str(first.mgmt), "GLOO_SOCKET_IFNAME": MGMT_INTERFACE}
        if self.scenario.network.in_place:
            self.ranks = [self.start_launcher(host) for host in range(self.scenario.network.by_host[0])]
            return
        self.ranks = [
            self._rank(rank.number, rank.host.name, orders, environment) for rank in self.topology.ranks
        ]

    def start_launcher(self, host: int) -> subprocess.Popen[bytes]:
        """Start `checkmate launch` on a host."""
        hosts, ranks = self.scenario.network.by_host
        argv: list[str | Path] = [*CHECKMATE, "launch", "--nnodes", str(hosts), "--node-rank", str(host)]
        argv += ["--nproc-per-node", str(ranks)]
        argv += ["--spare"] if self.scenario.network.recovery == "spare" else []
        argv += ["--", "-m", "tests.chaos.script", self._orders_file]
        environment = {"GLOO_SOCKET_IFNAME": MGMT_INTERFACE, **_ENVIRONMENT}
        node = self.topology.ranks[host * ranks].host.name
        with self.lab.log(self._log(host)).open("ab") as file:
            return self.lab.start(node, argv, stdout=file, stderr=subprocess.STDOUT, environment=environment)

    def launched_pid(self, rank: int) -> int | None:
        """Return the last process of a rank, as its launcher tells."""
        log = self.lab.log(self._log(rank // self.scenario.network.by_host[1])).read_text(errors="replace")
        pids = re.findall(rf"^.*rank {rank} is process (\d+)$", log, re.MULTILINE)
        return int(pids[-1]) if pids else None

    def start_reference(self) -> list[subprocess.Popen[bytes]]:
        """Start the same training undisturbed, on the loopback interface of the controller's namespace."""
        folder = self.folder / "reference"
        folder.mkdir()
        orders = self._orders("orders", folder, fresh=True, reference=True)
        environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["CHECKMATE_JOB"] = str(self.job_file)
        ranks = range(self.scenario.network.world)
        log = f"{self.prefix}reference"
        return [self._rank(rank, CONTROLLER, orders, environment, f"{log}{rank}") for rank in ranks]

    def is_live(self, node: int) -> tuple[int, bool]:
        """Return the number of a node's statuses since its start, and whether all holds are live now."""
        text = self.shadows[node].output_text()
        statuses = [line for line in text[: text.rfind("\n") + 1].splitlines() if '"holds"' in line]
        holds = json.loads(statuses[-1])["holds"] if statuses else []
        return len(statuses), bool(holds) and all(hold["live"] for hold in holds)

    def end_ranks(self) -> None:
        """End remaining ranks like torchrun: by SIGTERM, then by SIGKILL. They die with their launcher."""
        for process in self.ranks:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while any(p.poll() is None for p in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in self.ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def last_words(self, rank: int) -> str:
        """Return the end of a rank's standard error in this start, or of its host's if it has a launcher."""
        text = self.lab.log(self._log(rank)).read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        error_lines = [line for line in lines if "Error" in line]
        return (error_lines or lines or ["it said nothing"])[-1]

    def _log(self, rank: int) -> str:
        return f"{self.prefix}rank{rank}.{self.attempt}"

    def _orders(self, name: str, folder: Path, **more: bool) -> Path:
        orders = {
            "scenario": self.scenario.to_json(),
            "folder": str(folder),
            "attempt": max(self.attempt, 0),
            "checkpoints": str(self.checkpoints) if self.scenario.network.every else None,
            "stop": str(self.stop_file),
            **more,
            **({"attempt": 0} if more["reference"] else {}),
        }
        file = folder / f"{name}.json"
        file.write_text(json.dumps(orders))
        return file

    def _rank(
        self, rank: int, node: str, orders: Path, environment: dict[str, str], log: str = ""
    ) -> subprocess.Popen[bytes]:
        variables = {
            **environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.scenario.network.world),
            "MASTER_PORT": str(PORT + max(self.attempt, 0)),
            **_ENVIRONMENT,
        }
        argv: list[str | Path] = [sys.executable, "-m", "tests.chaos.script", orders]
        with self.lab.log(log or self._log(rank)).open("ab") as file:
            return self.lab.start(node, argv, stdout=file, stderr=subprocess.STDOUT, environment=variables)
