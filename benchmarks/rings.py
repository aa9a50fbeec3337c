"""Rings in a lab, for benchmarks: the same processes as `checkmate lab run`, without hashing and checking."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from checkmate.jobs import read_job
from checkmate.schema import Job
from topologies import namespaces, traffic
from topologies.crew import Crew, Member
from topologies.describe import CONTROLLER
from topologies.lab import Lab
from topologies.traffic import Load

CHECKMATE = (sys.executable, "-m", "checkmate.cli.entry")
_SECONDS = 300.0
_incarnations = iter(range(10**9))


@dataclass(frozen=True)
class Run:
    """What came of a run: seconds of each iteration (the slowest rank's), and each switch's status."""

    seconds: tuple[float, ...]
    sent_bytes: int
    retransmitted: int
    received_bytes: int
    status: list[dict[str, Any]]

    def goodput(self) -> float:
        """Gbit/s that each rank sends, over all iterations but the first, in which windows open."""
        each = self.sent_bytes / len(self.seconds)
        return 8e-9 * each * len(self.seconds[1:]) / sum(self.seconds[1:])


@contextlib.contextmanager
def controlled(lab: Lab) -> Iterator[Crew]:
    """The controller serving in a lab that is up."""
    crew = Crew(lab)
    controller = crew.start("controller", CONTROLLER, [*CHECKMATE, "run", "--no-view", lab.job_file])
    crew.wait(lambda: "serving" in controller.output.read_text(), "controller to serve", 60)
    try:
        yield crew
    finally:
        crew.stop(controller)


def gather(lab: Lab, crew: Crew, nbytes: int, iterations: int, *, tagged: bool, **ring: Any) -> Run:
    """Rings gather `nbytes` of tensors in `iterations`; shadow nodes read the copies where tagged."""
    job = read_job(lab.job_file)
    load = Load(nbytes, iterations, next(_incarnations) % 256, _SECONDS)
    sinks = _start_sinks(lab, crew, job, load) if tagged else []
    ranks: list[Member] = []
    for index, group in enumerate(job.dp_groups):
        config = traffic.ring(job, index, load) | {"tag": tagged, "digest": False, "verify": "none", **ring}
        for place, rank in enumerate(group.ranks):
            ranks.append(_start(lab, crew, f"rank{rank.rank}", "ring", config, "--rank", str(place)))
    crew.finish(ranks, _SECONDS)
    results = [json.loads(_result(lab, member).read_text()) for member in ranks]
    status: list[dict[str, Any]] = []
    received = 0
    if tagged:
        _until_quiet(sinks)
        text = crew.run("status", CONTROLLER, [*CHECKMATE, "status", "--json", lab.job_file], 60)
        status = list(json.loads(text).values())
        for member in sinks:
            crew.stop(member)
            received += json.loads(_result(lab, member).read_text())["bytes"]
        tagged_bytes = sum(stream["bytes"] for result in results for stream in result["streams"])
        if received != tagged_bytes * job.replicas:
            raise RuntimeError(f"{received} of {tagged_bytes * job.replicas} bytes reached the shadow nodes")
    return Run(
        tuple(max(times) for times in zip(*(r["seconds"] for r in results), strict=True)),
        results[0]["sent_bytes"],
        sum(r["retransmitted_segments"] for r in results),
        received,
        status,
    )


def _start_sinks(lab: Lab, crew: Crew, job: Job, load: Load) -> list[Member]:
    sinks = []
    for host, config in traffic.sinks(job, lab.topology, load).items():
        quick = {**config, "digest": False, "receive_buffer": 16 << 20}
        sinks.append(_start(lab, crew, host, "shadow", quick))
    crew.wait(lambda: all("ready" in m.output.read_text() for m in sinks), "streams to connect", 60)
    return sinks


def _start(lab: Lab, crew: Crew, host: str, module: str, config: dict[str, Any], *more: str) -> Member:
    file = lab.directory / f"{host}.config.json"
    file.write_text(json.dumps(config))
    argv = [sys.executable, "-m", f"checkmate.{module}", "--config", str(file)]
    return crew.start(host, host, [*argv, "--result", str(lab.directory / f"{host}.result.json"), *more])


def _result(lab: Lab, member: Member) -> Path:
    return lab.directory / f"{member.name}.result.json"


def _until_quiet(sinks: Sequence[Member], quiet: float = 1.0) -> None:
    """Wait until no sink says that it has received more."""
    said, since = [""], time.monotonic()
    while time.monotonic() - since < quiet:
        now = [member.output.read_text() for member in sinks]
        if now != said:
            said, since = now, time.monotonic()
        time.sleep(0.1)


def bridge_instead(lab: Lab) -> None:
    """Put the kernel's own bridge in the place of a lab's only switch."""
    (switch,) = lab.switches
    namespace = lab.namespace(switch.name)
    namespaces.end_processes([namespace])
    with namespaces.entered(namespace), IPRoute() as ip:
        ip.link("add", ifname="plain", kind="bridge")
        bridge = ip.link_lookup(ifname="plain")[0]
        ip.link("set", index=bridge, state="up")
        for port in range(1, switch.ports + 1):
            ip.link("set", index=ip.link_lookup(ifname=f"port{port}")[0], master=bridge)


def quiet_warmup() -> None:
    """Compile the tagger before anything is timed."""
    subprocess.run([sys.executable, "-m", "checkmate.tagger", "--build"], check=True, capture_output=True)
