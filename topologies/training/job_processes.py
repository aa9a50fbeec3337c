"""The processes of a training job in a lab: shadow nodes, and a torchrun for each rank.

They do not depend on the training script; `topologies.training.job` adds orders and records to them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from checkmate.ring.place import RingError, RingTimeout
from topologies import torchrun
from topologies.crew import CHECKMATE, Crew, Member
from topologies.describe.topology import LabError, LabHost
from topologies.torchrun import Starter

_SCRIPT_ERROR: Final = re.compile(
    r"^(?:\[rank\d+\]: )?(?!torch\.distributed\.elastic)"
    r"((?:\w[\w.]*(?:Error|Exception|Interrupt)\b|checkmate\.[\w.]+:).*)$",
    re.MULTILINE,
)
_OF_CHECKMATE: Final = re.compile(r"^checkmate\.[\w.]+:")
_OF_RING: Final = re.compile(rf"^checkmate\.(?:\w+\.)*(?:{RingError.__name__}|{RingTimeout.__name__}):")
_READY_SECONDS: Final = 60.0


class JobProcesses:
    """Shadow nodes and ranks of one job, by name. `shadow_cpus` are the CPUs of the shadow nodes."""

    shadow_options: tuple[str, ...] = ("--no-view",)
    """Options of `checkmate shadow`."""

    def __init__(self, crew: Crew, *, shadow_cpus: Collection[int] | None = None) -> None:
        self.crew = crew
        self.shadows: dict[str, Member] = {}
        self.ranks: dict[str, Member] = {}
        self._shadow_cpus = shadow_cpus

    def start_shadow_nodes(
        self, programs: Mapping[int, Sequence[str]] | None = None, *, without: Collection[LabHost] = ()
    ) -> None:
        """Start the shadow nodes of the job, and wait until they serve.

        `programs` are started instead of `checkmate` for some of them, by id; `without` are not started.
        """
        for host in self.crew.lab.topology.shadow_nodes:
            if host not in without:
                self._start_shadow_node(host, (programs or {}).get(host.number, CHECKMATE))
        self.await_shadow_nodes()

    def restart_shadow_node(self, node: int) -> None:
        """Kill a shadow node with SIGKILL if it runs, start it again, and wait until it serves."""
        host = self.crew.lab.topology.host(f"shadow{node}")
        self.crew.kill(self.shadows[host.name])
        self._start_shadow_node(host, CHECKMATE)
        self.await_shadow_nodes()

    def await_shadow_nodes(self) -> None:
        """Wait until each shadow node serves."""
        self.crew.wait(
            lambda: all("ready" in member.output_text() for member in self.shadows.values()),
            "shadow nodes to serve",
            _READY_SECONDS,
        )

    def start_ranks(
        self,
        script: Sequence[str | Path],
        *,
        restarts: int = torchrun.RESTARTS,
        environment: Mapping[str, str] | None = None,
        starter: Starter = "torchrun",
    ) -> None:
        """Start each host's ranks of a script with its arguments.

        With "torchrun alone", the number of the host's first rank is the script's last argument.
        """
        topology = self.crew.lab.topology
        for number, host in enumerate(topology.trainers):
            first = number * len(topology.ranks) // len(topology.trainers)
            words = [*script, str(first)] if starter == "torchrun alone" else script
            command = torchrun.command(topology, host, words, restarts=restarts, starter=starter)
            self.ranks[host.name] = self.crew.start(host.name, host.name, command, environment=environment)

    def finish(self, seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until the ranks have ended with status 0."""
        with self.explained():
            self.crew.finish(list(self.ranks.values()), seconds, tick)

    def kill_ranks(self) -> None:
        """Kill all ranks and their launchers with SIGKILL, as if all their hosts failed."""
        for member in self.ranks.values():
            self.crew.kill(member)

    def stop(self) -> None:
        """Kill ranks that are still training with SIGKILL, then stop the shadow nodes as Ctrl-C does."""
        self.kill_ranks()
        for member in self.shadows.values():
            self.crew.stop(member)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the error of each rank's script to a `LabError`, because torchrun does not report it.

        If training failed on all ranks, or on one with an error of Checkmate's, these errors replace what
        torchrun reports. Those of the ring are told only if there is nothing else, because they follow from
        others.
        """
        try:
            yield
        except LabError as error:
            ranks: dict[str, list[str]] = {}
            for name, member in self.ranks.items():
                for error_line in likely_cause(script_errors(member.error_text())):
                    ranks.setdefault(error_line, []).append(name)
            failed_hosts = {name for name, member in self.ranks.items() if member.process.poll()}
            from_checkmate = {
                error_line: names
                for error_line, names in ranks.items()
                if _OF_CHECKMATE.match(error_line)
                and not _OF_RING.match(error_line)
                and failed_hosts.intersection(names)
            }
            causes = {
                error_line: names for error_line, names in ranks.items() if not _OF_RING.match(error_line)
            }
            ranks = from_checkmate or causes or ranks
            words = [f"{', '.join(names)} failed with: {error_line}" for error_line, names in ranks.items()]
            shadow_ended = any(not member.running for member in self.shadows.values())
            failed = words and (len(failed_hosts) == len(self.ranks) or (from_checkmate and not shadow_ended))
            raise LabError("; ".join(words if failed else [str(error), *words])) from None

    def options_of(self, node: int) -> tuple[str, ...]:
        """Return the options of one node's `checkmate shadow`."""
        return self.shadow_options

    def _start_shadow_node(self, host: LabHost, program: Sequence[str]) -> None:
        job = str(self.crew.lab.job_file)
        argv = [*program, "shadow", job, "--id", str(host.number), *self.options_of(host.number)]
        self.shadows[host.name] = self.crew.start(host.name, host.name, argv, cpus=self._shadow_cpus)


def rank_process(member: Member) -> int | None:
    """Return the newest process of a host's rank: `checkmate launch` logs it, and torchrun has one child.

    `None` if it has none.
    """
    launched = torchrun.LAUNCHED.findall(member.error_text())
    return next(map(int, launched[-1:] or member.children()[:1]), None)


def script_errors(errors: str) -> list[str]:
    """Return the errors in a script's standard error, in which tracebacks end."""
    return _SCRIPT_ERROR.findall(errors)


def likely_cause(errors: Sequence[str]) -> Sequence[str]:
    """Return the last error of a script that is not of the ring, or else its last one, if it has any."""
    return [error for error in errors if not _OF_RING.match(error)][-1:] or errors[-1:]
