"""The firewall of a training host: in a namespace, with callers on both of its networks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from tests.support.labs.end_hosts import inside
from tests.support.labs.live import needs_root
from topologies.kernel import namespaces
from topologies.kernel.links import add_cable, prepare, set_address

FIREWALL = Path(__file__).parents[2] / "deploy" / "firewall.nft"
RENDEZVOUS, SSH = 29400, 22
HERE, TRAINER, STRANGER = "10.77.0.1", "10.77.0.2", "10.77.0.3"
ELSEWHERE, THERE = "10.78.0.1", "10.78.0.2"
"""Of the host and of another one, on the training network."""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Yield the namespaces of a training host and of others, with a cable for each of its networks."""
    names = [f"cm-fw{os.getpid()}-{name}" for name in ("host", "others")]
    try:
        for name in names:
            namespaces.create(name)
            prepare(name)
        host, outside = names
        for nic, ips in (("mgmt0", (HERE, TRAINER, STRANGER)), ("train0", (ELSEWHERE, THERE))):
            add_cable(host, nic, outside, nic, mtu=1500)
            for ip in ips:
                at = host if ip in (HERE, ELSEWHERE) else outside
                set_address(at, nic, IPv4Address(ip), IPv4Network(f"{ip}/24", strict=False))
        yield host, outside
    finally:
        for name in names:
            namespaces.remove(name)


def connects(hosts: tuple[str, str], source: str, port: int) -> bool:
    """Return whether another host reaches a port of the host, at all of whose addresses somebody listens."""
    host, outside = hosts
    with inside(host):
        server = socket.create_server(("", port))
    with inside(outside):
        caller = socket.socket()
    with server, caller:
        caller.settimeout(0.5)
        caller.bind((source, 0))
        try:
            caller.connect((ELSEWHERE if source == THERE else HERE, port))
        except TimeoutError:
            return False
        return True


@needs_root
@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not on PATH")
def test_only_training_hosts_reach_the_rendezvous(hosts: tuple[str, str], tmp_path: Path) -> None:
    rules = tmp_path / "firewall.nft"
    rules.write_text(FIREWALL.read_text().replace("192.168.0.1-192.168.0.8", f"{HERE}-{TRAINER}"))
    assert connects(hosts, STRANGER, RENDEZVOUS)
    assert connects(hosts, THERE, RENDEZVOUS)
    for _ in range(2):  # it may be loaded again
        with inside(hosts[0]):
            subprocess.run(["nft", "-f", str(rules)], check=True)
    assert connects(hosts, TRAINER, RENDEZVOUS)
    assert not connects(hosts, STRANGER, RENDEZVOUS)
    assert not connects(hosts, THERE, RENDEZVOUS)  # by the training network
    assert not connects(hosts, STRANGER, 40000)
    assert connects(hosts, STRANGER, SSH)
    assert connects(hosts, THERE, 40000)  # the ring's, for example
