"""Connect time of a shadow node while SYNs flood the stub, in a lab of two embedded targets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import Figure, Result, Skipped
from checkmate.job.files import read_job
from checkmate.job.schema import Job, Stub
from checkmate.keys.access import access
from checkmate.keys.roles import Role, Secret
from checkmate.shadow.receive.connect import StreamError, connect_stream, node_time
from checkmate.wire.tag import Hello
from controlplane.network import Network
from topologies.crew import Crew, LabController, serving
from topologies.describe.topology import load
from topologies.kernel import namespaces
from topologies.kernel.processes import processor_seconds
from topologies.lab import Lab

TITLE = "SYN floods: seconds in which a shadow node connects a stream"
RATES = (400, 1_000, 10_000, 50_000)
FLOOR, FLOOR_RATE = 1.0, 10_000
CONNECTS = 5
TIMEOUT = 10.0
"""Seconds after which an attempt to connect has failed, and counts as these."""
_LEAD = 1.0


@dataclass(frozen=True)
class Origin:
    """The origin of a flood: namespace, interface, source MAC address, and source address unless random."""

    name: str
    namespace: str
    device: str
    mac: str
    ip: str | None = None


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("SYN floods", "needs root, for network namespaces")]
    with Lab(load("two_tor"), "softswitch", name="benchsyn") as lab, Crew(lab) as crew, _job(lab) as file:
        return _measure(lab, crew, file)


def _measure(lab: Lab, crew: Crew, file: Path) -> list[Result]:
    with serving(crew, "--no-view", file) as controller:
        stage = FloodStage(lab, controller, read_job(file))
        results = stage.under(None, 0)
        for origin in stage.origins():
            for rate in RATES:
                results += stage.under(origin, rate)
        return results


@contextmanager
def _job(lab: Lab) -> Iterator[Path]:
    """Yield the file of the lab's job without its last rank, whose port is then of no job."""
    data: dict[str, Any] = yaml.safe_load(lab.job_file.read_text())
    if isinstance(data["fabric"], str):
        data["fabric"] = str(lab.job_file.parent / data["fabric"])
    data["dp_groups"][-1]["ranks"].pop()
    data["keys"] = str(read_job(lab.job_file).keys)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(yaml.safe_dump(data))
        yield file


class FloodStage:
    """A lab with a job: the node that connects, and what floods its stub."""

    def __init__(self, lab: Lab, controller: LabController, job: Job) -> None:
        self.lab, self.job = lab, job
        self.controller = controller.member.process.pid
        network = Network([job])
        self.tor = lab.topology.ranks[-1].interface.switch
        self.stream = next(s for s in network.streams if s.nic.switch == s.boundary.switch == self.tor)
        self.stub: Stub = network.switches[self.stream.boundary.switch].stub
        self.device = next(
            face.name
            for host in lab.topology.hosts
            for face in host.interfaces
            if face.mac == self.stream.nic.mac
        )
        self.key = access(job, Role.SHADOW).secret(Secret.HELLO)

    def origins(self) -> list[Origin]:
        """Return the kinds of ports that a flood may come from."""
        hosts = self.lab.topology.hosts
        nics = {nic.mac: nic for node in self.job.shadow_nodes for nic in node.nics}
        job_macs = {rank.mac for group in self.job.dp_groups for rank in group.ranks} | set(nics)

        def at(name: str, matches: Any, *, has_own_address: bool = False) -> Origin:
            host, face = next(
                (h, f) for h in hosts for f in h.interfaces if f.switch == self.tor and matches(f)
            )
            ip = str(nics[face.mac].ip) if has_own_address else None
            return Origin(name, self.lab.namespace(host.name), face.name, face.mac, ip)

        _, peer, peer_port = self.lab.topology.links_at(self.tor)[0]
        link = Origin("a link", self.lab.namespace(peer), f"port{peer_port}", "02:00:00:00:77:77")
        return [
            at("a rank's port", lambda face: face.mac in job_macs - set(nics)),
            at(
                "another NIC, with its own address",
                lambda face: face.mac in nics and face.mac != self.stream.nic.mac,
                has_own_address=True,
            ),
            link,
            at("a port of no job", lambda face: face.mac not in job_macs),
        ]

    def under(self, origin: Origin | None, rate: int) -> list[Result]:
        """Return the connect time, and what a flood costs, at a rate of SYNs."""
        seconds = _LEAD + CONNECTS * TIMEOUT
        process = self._flood(origin, rate, seconds) if origin is not None else None
        try:
            time.sleep(_LEAD)
            start, controller_start = time.monotonic(), processor_seconds(self.controller)
            before = processor_seconds(process.pid) if process else 0.0
            times = tuple(self._connect(number) for number in range(CONNECTS))
            time.sleep(_LEAD)
            elapsed = time.monotonic() - start
            share = (processor_seconds(self.controller) - controller_start) / elapsed
            generator = (processor_seconds(process.pid) - before) / elapsed if process else 0.0
        finally:
            if process is not None:
                process.kill()
                process.wait()
        where = f"{rate:,} SYNs a second from {origin.name}" if origin else "no flood"
        floor = FLOOR if rate <= FLOOR_RATE else None
        note = f"share of a processor: controller {share:.1%}, generator {generator:.1%}"
        return [Figure(where, times, "s", FLOOR, floor, smaller=True, note=note)]

    def _flood(self, origin: Origin, rate: int, seconds: float) -> subprocess.Popen[bytes]:
        stub = [str(self.stub.ip), self.stub.mac, str(self.stub.port)]
        argv = [sys.executable, "-m", "benchmarks.switch.flood_main", "--device", origin.device]
        argv += ["--stub", *stub, "--mac", origin.mac, "--rate", str(rate), "--seconds", f"{seconds:g}"]
        with namespaces.entered(origin.namespace):
            return subprocess.Popen(
                [*argv, *(["--ip", origin.ip] if origin.ip else [])], stdout=subprocess.PIPE
            )

    def _connect(self, number: int) -> float:
        """Connect the stream again; return the seconds, or `TIMEOUT` if that failed."""
        hello = Hello(
            0, self.stream.boundary.number, self.stream.shadow_id, self.stream.channel, number, node_time()
        )
        start = time.monotonic()
        with namespaces.entered(self.lab.namespace(f"shadow{self.stream.node.id}")):
            try:
                connect_stream(
                    str(self.stream.nic.ip),
                    (str(self.stub.ip), self.stub.port),
                    hello,
                    self.key,
                    device=self.device,
                    receive_buffer=1 << 20,
                    timeout=TIMEOUT,
                ).close()
            except StreamError as error:
                print(error, file=sys.stderr)
                return TIMEOUT
        return time.monotonic() - start
