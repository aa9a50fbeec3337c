"""A lab's cgroup is removed with all of its processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.live import needs_root
from tests.support.waiting import wait_until
from topologies.describe.topology import LabError, load
from topologies.kernel import cgroups, namespaces
from topologies.lab import Lab

pytestmark = needs_root

FORKS = "import os\nwhile True:\n    if os.fork():\n        os._exit(0)"
"""Each process lives just long enough to start the next, so that it has ended when it is listed."""

PACKET_SOCKETS = """
import socket, time
opened = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3) for _ in range(50)]
for one in opened:
    one.bind(("lo", 3))
print("ready", flush=True)
time.sleep(60)
"""
"""The kernel closes these slowly, after the process has left its namespace."""


@pytest.fixture
def cgroup() -> Iterator[str]:
    path = cgroups.place(f"t{os.getpid()}_{random.randrange(10**6)}")
    if path is None:
        pytest.skip("no cgroup2 file system is mounted here")
    Path(path, "rank0").mkdir(parents=True)
    yield path
    cgroups.remove(path)


@contextlib.contextmanager
def living_in(cgroup: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in the cgroup of one of the lab's hosts."""
    enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{cgroup}/rank0/cgroup.procs"]
    process = subprocess.Popen([*enter, *argv], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_cgroup_goes_with_the_processes_in_it(cgroup: str) -> None:
    with living_in(cgroup, "sleep", "60") as process:
        wait_until(lambda: cgroups.members(cgroup) == [process.pid])
        cgroups.remove(cgroup)
        assert not Path(cgroup).exists()
        assert process.wait(5) == -signal.SIGKILL


def test_no_process_escapes_by_forking(cgroup: str) -> None:
    with living_in(cgroup, sys.executable, "-S", "-c", FORKS) as first:
        assert first.wait(20) == 0  # its descendants continue
        wait_until(lambda: bool(cgroups.members(cgroup)))
        cgroups.remove(cgroup)
        assert not Path(cgroup).exists()


def test_a_dying_process_is_waited_for(cgroup: str) -> None:
    with living_in(cgroup, sys.executable, "-c", PACKET_SOCKETS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        cgroups.remove(cgroup)
        assert not Path(cgroup).exists()


def test_what_can_not_be_removed_is_named_and_goes_later(cgroup: str, tmp_path: Path) -> None:
    busy = Path(cgroup, "rank0")
    mount = subprocess.run(["mount", "--bind", tmp_path, busy], capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"nothing can be mounted here: {mount.stderr.strip()}")
    try:
        with pytest.raises(LabError, match=f"{cgroup} can't be removed .*: no process is visible in it; "):
            cgroups.remove(cgroup, seconds=0.1)
    finally:
        subprocess.run(["umount", busy], check=True)
    cgroups.remove(cgroup)
    assert not Path(cgroup).exists()


def test_inhabitants_are_named(cgroup: str) -> None:
    with living_in(cgroup, "sleep", "60") as process:
        wait_until(lambda: cgroups.inhabitants(cgroup) == f"still in it {process.pid} (sleep, S)")


def test_a_lab_in_which_something_forks_all_the_time_is_removed(name: str) -> None:
    with Lab(load("single_tor"), name=name) as lab:
        cgroup = cgroups.place(name)
        assert lab.start("rank0", [sys.executable, "-S", "-c", FORKS]).wait(20) == 0
        assert lab.start("rank1", [sys.executable, "-S", "-c", FORKS]).wait(20) == 0
    assert not namespaces.of_lab(name)
    assert cgroup is None or not Path(cgroup).exists()
