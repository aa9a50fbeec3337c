"""A job of 2,048 streams on the embedded target: planning, writing, reconciling, connecting, restarting.

128 DP groups of two ranks, each with its own shadow node, and 8 channels. The shadow nodes are kernel sockets
on 128 interfaces of one namespace, which are connected to the switch's ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

from rich.progress import track

from benchmarks.figures import Figure, Result, Skipped
from checkmate.job.schema import Job, ShadowNode
from checkmate.job.validation import of_data
from checkmate.keys.access import access
from checkmate.keys.roles import Role, Secret
from checkmate.shadow.receive.connect import connect_stream, node_time
from checkmate.wire.schedule import nic_of
from checkmate.wire.tag import Hello
from controlplane import plan as planning
from controlplane.hello_keys import HelloKeys
from controlplane.serve import Fleet
from topologies.kernel import links, namespaces

TITLE = "Control plane: one job with 128 DP groups, 128 shadow nodes, 8 channels (2,048 streams), softswitch"
SWITCH, NODES = "cm-bench-switch", "cm-bench-nodes"
GROUPS, CHANNELS, RUNS = 128, 8, 5
ADDRESS = "127.0.0.1:9559"
LOOP = asyncio.new_event_loop()
"""One for all measurements, because grpc.aio does not support several loops in one process well."""
SUBNET = IPv4Network("10.0.0.0/16")


def the_job() -> Job:
    """Return the job: shadow node g belongs to DP group g, at port g + 1. Ranks' ports have no interface."""

    def host(kind: int, index: int, port: int) -> dict[str, object]:
        return {
            "ip": f"10.0.{kind + index // 250}.{index % 250 + 1}",
            "mac": f"02:00:00:{kind:02x}:{index >> 8:02x}:{index & 255:02x}",
            "switch": "tor",
            "port": port,
        }

    return of_data(
        Job,
        {
            "job": "bench",
            "fabric": {
                "switches": [
                    {
                        "name": "tor",
                        "target": "softswitch",
                        "address": ADDRESS,
                        "stub": {"ip": "10.0.255.1", "mac": "02:00:00:ff:00:01", "port": 7400},
                    }
                ]
            },
            "channels": CHANNELS,
            "dp_groups": [
                {
                    "ranks": [
                        {"rank": r, "mgmt": f"rank{r}", **host(10, r, 200 + r)} for r in (2 * g, 2 * g + 1)
                    ],
                    "shadow_nodes": [g],
                }
                for g in range(GROUPS)
            ],
            "shadow_nodes": [
                {"id": g, "mgmt": f"shadow{g}:7000", "nics": [host(1, g, g + 1)]} for g in range(GROUPS)
            ],
        },
    )


@contextlib.contextmanager
def network(job: Job) -> Iterator[None]:
    """Create the two namespaces and the cables between them for a while."""
    try:
        for name in (SWITCH, NODES):
            namespaces.create(name)
            links.prepare(name)
        for node in track(job.shadow_nodes, "connecting 128 shadow nodes", transient=True):
            nic = node.nics[0]
            links.add_cable(SWITCH, f"port{nic.port}", NODES, f"n{node.id}", mtu=1500, far_mac=nic.mac)
            links.set_address(NODES, f"n{node.id}", nic.ip, SUBNET)
        yield
    finally:
        namespaces.end_processes([SWITCH, NODES])
        for name in (SWITCH, NODES):
            namespaces.remove(name)


def start_switch(job: Job) -> subprocess.Popen[bytes]:
    ports = [
        part for node in job.shadow_nodes for part in ("-i", f"{node.nics[0].port}@port{node.nics[0].port}")
    ]
    command = [sys.executable, "-m", "softswitch", "--no-p4", "--device-id", "1", *ports]
    command += ["--grpc-server-addr", ADDRESS, "--cpu-port", "510"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


async def _start(job: Job) -> tuple[float, int]:
    """Return the seconds from the job to the last write, and the number of updates."""
    fleet = Fleet(HelloKeys(insecure=True))
    start = time.monotonic()
    (report,) = await fleet.start([job])
    seconds = time.monotonic() - start
    await fleet.stop()
    return seconds, report.updates


def plan_and_write(job: Job) -> list[Result]:
    """Measure cold starts, each on a fresh switch, with no-change reconciliations between them."""
    cold, warm, planned, updates = [], [], [], 0
    for _ in track(range(RUNS), "planning and writing", transient=True):
        process = start_switch(job)
        try:
            _wait_up(process)
            start = time.monotonic()
            planning.plan([job])
            planned.append(time.monotonic() - start)
            seconds, updates = LOOP.run_until_complete(_start(job))
            cold.append(seconds)
            seconds, again = LOOP.run_until_complete(_start(job))
            if again:
                raise RuntimeError(f"a second run wrote {again} updates")
            warm.append(seconds)
        finally:
            process.terminate()
            process.wait()
    return [
        Figure("planned and written", tuple(cold), "s", 2, 4, smaller=True, note=f"{updates} updates"),
        Figure("of it, planning", tuple(planned), "s"),
        Figure("reconcile without a change", tuple(warm), "s", 0.5, 1, smaller=True, note="0 updates"),
    ]


def connect_and_restart(job: Job) -> list[Result]:
    """Measure the connection of all 2,048 streams by kernel sockets, and a restart of the switch."""
    process = start_switch(job)
    command = [sys.executable, "-m", "benchmarks.switch.control_plane", "nodes"]
    try:
        _wait_up(process)
        return LOOP.run_until_complete(_connect_and_restart(job, process, command))
    finally:
        namespaces.end_processes([NODES])


async def _connect_and_restart(
    job: Job, process: subprocess.Popen[bytes], command: list[str]
) -> list[Result]:
    fleet = Fleet(HelloKeys(insecure=True))
    await fleet.start([job])
    serving = asyncio.create_task(fleet.serve())
    (controller,) = fleet.controllers.values()
    with namespaces.entered(NODES):
        nodes = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert nodes.stdout is not None
    line = await asyncio.to_thread(nodes.stdout.readline)
    if not line:
        raise RuntimeError("the shadow nodes ended early")
    connected = float(line)
    streams = len(controller.connected.by_stream)
    assert controller.session is not None
    if streams != 2 * GROUPS * CHANNELS:
        raise RuntimeError(f"{streams} streams are connected, not {2 * GROUPS * CHANNELS}")
    before, expected = controller.session, len(await controller.session.read())
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = start_switch(job)
    try:
        await asyncio.to_thread(_wait_up, again)
        start = time.monotonic()
        while True:
            session = controller.session
            if session is not None and session is not before and len(await session.read()) >= expected:
                break
            await asyncio.sleep(0.02)
        back = time.monotonic() - start
    finally:
        again.terminate()
        again.wait()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await fleet.stop()
    nodes.terminate()
    return [
        Figure("2,048 streams connect", (connected,), "s", note="by 64 threads, on 128 NICs"),
        Figure("all reinstalled after a switch restart", (back,), "s", note="from its server's first answer"),
    ]


def connect_nodes(job: Job) -> None:
    """Connect every stream in the nodes' namespace, print the duration in seconds, and keep them."""
    stub = job.fabric.switches[0].stub
    streams = [
        (node, side, channel)
        for channel in range(CHANNELS)
        for side in (0, 1)
        for node in job.shadow_nodes
        if nic_of(channel, side, len(node.nics)) == 0
    ]

    def connect(stream: tuple[ShadowNode, int, int]) -> socket.socket:
        node, side, channel = stream
        return connect_stream(
            str(node.nics[0].ip),
            (str(stub.ip), stub.port),
            Hello(0, 2 * node.id + side, 0, channel, 1, node_time()),
            access(job, Role.SHADOW, insecure=True).secret(Secret.HELLO),
            device=f"n{node.id}",
            receive_buffer=1 << 20,
            timeout=60,
        )

    start = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        sockets = list(pool.map(connect, streams))
    sys.stdout.write(f"{time.monotonic() - start}\n")
    sys.stdout.flush()
    signal.pause()
    del sockets


def _wait_up(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    host, _, port = ADDRESS.partition(":")
    while time.monotonic() < deadline:
        with namespaces.entered(SWITCH), socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        if process.poll() is not None:
            raise RuntimeError("the switch ended")
        time.sleep(0.02)
    raise RuntimeError("the switch doesn't listen")


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("control plane", "needs root, for network namespaces")]
    job = the_job()
    with network(job), namespaces.entered(SWITCH):
        return [*plan_and_write(job), *connect_and_restart(job)]


if __name__ == "__main__" and sys.argv[1:] == ["nodes"]:
    Path("/proc/self/comm").write_text("bench-nodes")
    connect_nodes(the_job())
