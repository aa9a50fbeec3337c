"""A switch with in-memory ports and its P4Runtime server in this process; hosts in namespaces."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from softswitch.p4runtime.server import P4RuntimeServer
from softswitch.p4runtime.service import P4RuntimeService
from softswitch.switch import SoftSwitch
from tests.softswitch.support.client import DEVICE, Client, Running, Wires, sh
from tests.softswitch.support.memory_port import MemoryPort
from tests.softswitch.support.scenarios import CPU_PORT

_numbers = itertools.count()


@pytest.fixture
def running() -> Iterator[Running]:
    """Yield a switch without a program, with four in-memory ports."""
    ports = {number: MemoryPort(number) for number in (1, 2, 3, 4)}
    switch = SoftSwitch(ports.values(), CPU_PORT)
    service = P4RuntimeService(switch, DEVICE)
    server = P4RuntimeServer(service, "127.0.0.1:0", None)
    carrier = ThreadPoolExecutor(1)
    carrying = carrier.submit(switch.run)
    clients: list[Client] = []
    yield Running(switch, service, f"127.0.0.1:{server.port}", ports, clients)
    for client in clients:
        client.close()
    switch.stop()
    carrying.result()
    carrier.shutdown()
    server.stop()
    for number in ports.values():
        number.close()


@pytest.fixture
def primary(running: Running) -> Client:
    """Return the primary controller of `running`, with the pipeline of `kinds.p4` set."""
    client = running.client()
    assert client.arbitration() == (0, 1)
    client.set_pipeline()
    return client


def within(namespace: str) -> str:
    """Return a command prefix; `ip netns exec` needs a root directory that is a mount point."""
    return f"nsenter --net=/run/netns/{namespace}"


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Yield three hosts around a switch's namespace, without IPv6 traffic."""
    stem = f"sw{os.getpid()}x{next(_numbers)}"
    wires = Wires(f"{stem}s", {number: f"{stem}h{number}" for number in (1, 2, 3)})
    names = [wires.switch, *wires.hosts.values()]
    try:
        for name in names:
            sh(f"ip netns add {name}")
            sh(f"{within(name)} ip link set lo up")
            sh(f"{within(name)} sysctl -qw net.ipv6.conf.default.disable_ipv6=1")
        for number, host in wires.hosts.items():
            sh(f"{within(wires.switch)} ip link add s{number} type veth peer name e0 netns {host}")
            sh(f"{within(wires.switch)} ip link set s{number} mtu 9000 up")
            sh(f"{within(host)} ip link set e0 mtu 9000 up")
            sh(f"{within(host)} ip addr add 10.77.0.{number}/24 dev e0")
        yield wires
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
