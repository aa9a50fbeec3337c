"""A lab's switch, `checkmate` commands for it, and kernel sockets on its shadow NICs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from checkmate.job.files import read_job
from checkmate.job.schema import Nic
from checkmate.keys.access import INSECURE, access
from checkmate.keys.roles import Role, Secret
from checkmate.shadow.receive.connect import node_time
from checkmate.wire.tag import Hello
from tests.support.controlplane.hellos import ends_of, signed
from topologies import switches
from topologies.crew import CHECKMATE, Crew, LabController, serving
from topologies.describe.job_files import Target
from topologies.describe.topology import CONTROLLER, STUB_TCP_PORT, load
from topologies.kernel import namespaces
from topologies.lab import Lab

SO_BINDTODEVICE = 25
SIOCOUTQ = 0x5411

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="labs need root, for network namespaces")
needs_clang = pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang")
needs_bmv2 = pytest.mark.skipif(shutil.which(switches.BMV2) is None, reason=f"{switches.BMV2} is not on PATH")
targets = pytest.mark.parametrize(
    "target", ["softswitch", pytest.param("bmv2", marks=[pytest.mark.slow, needs_bmv2])]
)


class LiveSwitch:
    """A lab with one switch."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.job = lab.job_file
        self._controller: LabController | None = None

    def command(self, *arguments: str | Path, status: int | None = 0) -> str:
        """Run a `checkmate` command and return its output; check its exit status."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        text = output.decode()
        if status is not None:
            assert process.returncode == status, text
        assert "Traceback" not in text, text
        return text

    def start(self, *arguments: str | Path, stderr: int = subprocess.STDOUT) -> subprocess.Popen[bytes]:
        return self.lab.start(
            CONTROLLER,
            [*CHECKMATE, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            environment={INSECURE: "1"},
        )

    @contextlib.contextmanager
    def serving(self, *arguments: str | Path) -> Iterator[LabController]:
        """Run `checkmate run` until the block ends."""
        with Crew(self.lab) as crew:
            self._controller = None  # earlier output must not count until it serves
            files = arguments or ("--no-view", self.job)
            with serving(crew, "--insecure", *files) as self._controller:
                yield self._controller
        assert "Traceback" not in self.log(), self.log()

    def log(self) -> str:
        """Return the output of the last `run` since its last start."""
        if self._controller is None:
            return ""
        member = self._controller.member
        return member.output_text() + member.error_text()

    def status(self, *files: Path) -> dict[str, Any]:
        """Return the only switch's `checkmate status --json`."""
        process = self.start("status", *(files or (self.job,)), "--json", stderr=subprocess.PIPE)
        output, words = process.communicate(timeout=30)
        assert process.returncode == 0, words.decode()
        (switch,) = json.loads(output)["switches"].values()
        return dict(switch)

    def connected(self, *files: Path) -> set[tuple[Any, ...]]:
        """Return the connected streams: job, group, side, channel, shadow id, incarnation."""
        fields = ("job", "dp_group", "side", "channel", "shadow_id", "incarnation")
        return {
            tuple(stream[f] for f in fields)
            for stream in self.status(*files)["streams"]
            if stream["connected"]
        }

    def until(self, condition: Any, seconds: float = 60.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still not so after {seconds} s; run said:\n{self.log()}"
            time.sleep(0.05)

    def connect(
        self,
        node: str,
        nic: Nic,
        payload: bytes | Hello,
        *,
        key: bytes | None = None,
        ahead: float = 0.0,
        timeout: float = 5.0,
    ) -> socket.socket:
        """Return a kernel socket from a shadow NIC to the stub, with `payload` sent but not acknowledged.

        A hello gets the present time, plus `ahead` seconds, and a MAC by `key`, or by the job's own.
        """
        device = next(
            interface.name
            for host in self.lab.topology.hosts
            if host.name == node
            for interface in host.interfaces
            if interface.mac == nic.mac
        )
        with namespaces.entered(self.lab.namespace(node)):
            connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, device.encode())
        connection.bind((str(nic.ip), 0))
        connection.settimeout(timeout)
        stub = self.stub_ip()
        connection.connect((stub, STUB_TCP_PORT))
        if isinstance(payload, Hello):
            now = replace(payload, time=node_time() + int(ahead * 1e6))
            interface = access(read_job(self.job), Role.SHADOW).secret(Secret.HELLO)
            payload = signed(now, ends_of(connection), key or interface)
        connection.sendall(payload)
        return connection

    def stub_ip(self) -> str:
        return str(self.lab.switches[0].stub_ip)

    def hello(self, node: str, nic: Nic, hello: Hello) -> socket.socket:
        """Return a connected stream, whose hello is acknowledged."""
        connection = self.connect(node, nic, hello)
        assert acknowledged(connection)
        return connection

    def restart_switch(self) -> None:
        """Kill the switch and start it without entries."""
        self.lab.restart_switch(self.lab.switches[0].name)


def acknowledged(sock: socket.socket, seconds: float = 3.0) -> bool:
    """Return whether all written bytes are acknowledged in time (SIOCOUTQ)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        (waiting,) = struct.unpack("i", ioctl(sock, SIOCOUTQ, b"\0" * 4))
        if waiting == 0:
            return True
        time.sleep(0.005)
    return False


def was_reset(sock: socket.socket, seconds: float = 3.0) -> bool:
    """Return whether the stub answers with a RST."""
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b"" and False
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def alive(pids: Iterable[int]) -> list[int]:
    """Return the processes that still run, without zombies."""
    living = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(pid)
    return living


@contextlib.contextmanager
def live_switch(target: Target, name: str) -> Iterator[LiveSwitch]:
    with Lab(load("single_tor"), target, name=name) as lab:
        yield LiveSwitch(lab)
