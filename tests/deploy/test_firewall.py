"""The firewall of a training host: in a namespace, with callers from two addresses."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.end_hosts import inside
from tests.support.labs.live import needs_root
from tests.support.namespace_host import namespace_host

FIREWALL = Path(__file__).parents[2] / "deploy" / "firewall.nft"
RENDEZVOUS, SSH = 29400, 22
HERE, TRAINER, STRANGER = "10.77.0.1", "10.77.0.2", "10.77.0.3"


@pytest.fixture
def host() -> Iterator[str]:
    """Yield a namespace whose connections to itself come by `lo`, from any of its addresses."""
    with namespace_host() as name:
        subprocess.run(["ip", "-n", name, "address", "add", f"{STRANGER}/24", "dev", "eth1"], check=True)
        yield name


def connects(host: str, source: str, port: int) -> bool:
    """Return whether a process of the namespace reaches a port of it from an address of its own."""
    with inside(host):
        server = socket.create_server((HERE, port))
        caller = socket.socket()
    with server, caller:
        caller.settimeout(0.5)
        caller.bind((source, 0))
        try:
            caller.connect((HERE, port))
        except TimeoutError:
            return False
        return True


@needs_root
def test_only_training_hosts_reach_the_rendezvous(host: str, tmp_path: Path) -> None:
    nft = shutil.which("nft")
    if nft is None:
        pytest.skip("nft is not installed")
    rules = tmp_path / "firewall.nft"
    told = FIREWALL.read_text().replace("mgmt0", "lo").replace("192.168.0.1-192.168.0.8", f"{HERE}-{TRAINER}")
    rules.write_text(told)
    assert connects(host, STRANGER, RENDEZVOUS)
    for _ in range(2):  # it may be loaded again
        subprocess.run(["ip", "netns", "exec", host, nft, "-f", str(rules)], check=True)
    assert connects(host, TRAINER, RENDEZVOUS)
    assert not connects(host, STRANGER, RENDEZVOUS)
    assert not connects(host, STRANGER, 40000)
    assert connects(host, STRANGER, SSH)
