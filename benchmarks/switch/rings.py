"""Rings in a lab, for benchmarks: like `checkmate lab run`, without hashing and checks."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator

from pyroute2 import IPRoute

from topologies.crew import Crew, serving
from topologies.kernel import namespaces
from topologies.lab import Lab
from topologies.traffic.orders import Load, Operation
from topologies.traffic.run import Traffic, TrafficOutcome

_SECONDS = 300.0
_RECEIVE_BUFFER = 16 << 20
_incarnations = itertools.count()


@contextlib.contextmanager
def controlled_lab(lab: Lab) -> Iterator[Crew]:
    """Run the controller in a lab that is up."""
    with Crew(lab) as crew, serving(crew):
        yield crew


def gather(
    crew: Crew,
    nbytes: int,
    iterations: int,
    *,
    tagged: bool,
    operation: Operation = "allgather",
) -> TrafficOutcome:
    """Gather or reduce `nbytes` of tensors in `iterations`; with `tagged`, shadow nodes read copies."""
    load = Load(
        nbytes,
        iterations,
        next(_incarnations) % 256,
        _SECONDS,
        tagged=tagged,
        digest=False,
        verify="none",
        operation=operation,
        receive_buffer=_RECEIVE_BUFFER,
    )
    outcome = Traffic(crew, load).run()
    if tagged and not outcome.good:
        raise RuntimeError(f"not all tagged bytes reached the shadow nodes: {outcome.data()}")
    return outcome


def bridge_instead(lab: Lab) -> None:
    """Replace a lab's only switch by the kernel's bridge."""
    (switch,) = lab.switches
    lab.stop_switch(switch.name)
    with namespaces.entered(lab.namespace(switch.name)), IPRoute() as ip:
        ip.link("add", ifname="plain", kind="bridge")
        bridge = ip.link_lookup(ifname="plain")[0]
        ip.link("set", index=bridge, state="up")
        for port in range(1, switch.ports + 1):
            ip.link("set", index=ip.link_lookup(ifname=f"port{port}")[0], master=bridge)


def quiet_warmup() -> None:
    """Compile the tagger before measurements."""
    subprocess.run([sys.executable, "-m", "checkmate.tagger", "--build"], check=True, capture_output=True)
