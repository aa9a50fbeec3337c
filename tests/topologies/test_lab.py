"""Labs in the kernel: created, used, removed."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkmate.cli.main import app
from tests.support.labs.live import alive, needs_bmv2, needs_root
from tests.support.labs.remains import any_target, lab_command, remains
from tests.support.waiting import wait_until
from topologies import lab as labs
from topologies.describe.job_files import Target
from topologies.describe.topology import LabError, load
from topologies.kernel import links, loss
from topologies.kernel.namespaces import entered
from topologies.lab import Lab

pytestmark = needs_root

SHARE = 0.012345
"""A loss rate that only these tests use, so that their programs have unique tags."""


TARGETS = ["softswitch", pytest.param("bmv2", marks=needs_bmv2)]


def loss_programs() -> int:
    """Return the number of this module's loss programs in the kernel (bpf(2): BPF_PROG_GET_NEXT_ID)."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    number = loss.SYSCALLS[os.uname().machine]
    tag, count, attributes = _tag(), 0, ctypes.create_string_buffer(128)
    struct.pack_into("=I", attributes, 0, 0)
    while syscall(number, 11, ctypes.byref(attributes), 128) == 0:
        (program,) = struct.unpack_from("=I", attributes, 4)
        struct.pack_into("=III", attributes, 0, program, 0, 0)
        descriptor = syscall(number, 13, ctypes.byref(attributes), 128)
        if descriptor >= 0:
            count += tag in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
            os.close(descriptor)
        struct.pack_into("=II", attributes, 0, program, 0)
    return count


def _tag() -> str:
    descriptor = loss.load_program(SHARE)
    try:
        fields = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
        return fields[fields.index("prog_tag:") + 1]
    finally:
        os.close(descriptor)


def ping(lab: Lab, source: str, destination: str) -> bool:
    """Return whether a TCP handshake between management addresses is answered, even by a refusal."""
    with entered(lab.namespace(source)), socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((destination, 9)) == 111


@pytest.mark.parametrize("target", TARGETS)
def test_up_and_down_leave_nothing(name: str, target: Target) -> None:
    before = set(os.listdir("/sys/class/net"))
    with Lab(load("two_tor"), target, name=name) as lab:
        lab_remains = remains(name, before)
        assert len(lab_remains.namespaces) == len(lab.topology.nodes)
        assert len(lab_remains.processes) >= 2
        assert not lab_remains.stray_links
        assert ping(lab, "rank0", str(lab.topology.host("shadow1").mgmt))
        assert json.loads(lab.directory.joinpath("lab.json").read_text())["target"] == target
    assert not remains(name, before)
    assert not alive(lab_remains.processes)


def test_a_switch_that_does_not_start_is_quoted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "simple_switch_grpc"
    broken.write_text("#!/bin/sh\necho no room for switches >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = set(os.listdir("/sys/class/net"))
    with pytest.raises(LabError, match="switch tor ended with status 3: no room for switches"):
        Lab(load("single_tor"), "bmv2", name=name).up()
    assert not remains(name, before)


def test_hosts_are_set_up_for_their_target(name: str) -> None:
    target = any_target()
    with Lab(load("single_tor"), target, name=name, mtu=9000) as lab:
        host = lab.namespace("shadow0")
        assert set(links.offloads(host, "data1").values()) == ({False} if target == "bmv2" else {True, False})
        assert links.offloads(host, "data1")["tso"] == (target == "softswitch")
        with entered(host):
            assert Path("/proc/sys/net/ipv4/conf/data1/arp_ignore").read_text() == "1\n"
            assert Path("/proc/sys/net/ipv4/conf/data1/arp_announce").read_text() == "2\n"
            assert Path("/proc/sys/net/ipv4/conf/data1/rp_filter").read_text() == "0\n"
            assert Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2] == "67108864"
        sysfs = lab.start(
            "shadow0", ["sh", "-c", "cat /proc/net/dev /proc/net/if_inet6"], stdout=subprocess.PIPE
        )
        sysfs_text = sysfs.communicate()[0].decode()
        assert "data1:" in sysfs_text
        assert "fe80" not in sysfs_text
        assert lab.stats()["shadow0"]["data0"]["tx_bytes"] >= 0


def test_training_links_lose_their_share_and_others_none(name: str) -> None:
    with Lab(load("single_tor"), any_target(), name=name, loss=0.2) as lab:
        assert lab.loss_by in ("netem", "bpf")
        frames = 5000
        assert 0.75 * frames < _arrived(lab, "rank0", "data0", "port1", frames) < 0.85 * frames
        assert _arrived(lab, "shadow0", "data0", "port5", frames) == frames


def _arrived(lab: Lab, host: str, interface: str, port: str, frames: int) -> int:
    """Send raw frames from an interface; return the increase of the switch port's counter."""
    before = lab.stats()["tor"][port]["rx_packets"]
    with entered(lab.namespace(host)), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((interface, 0))
        for _ in range(frames):
            sock.send(b"\x02" + b"\0" * 11 + b"\x88\xb5" + b"\0" * 50)
    return lab.stats()["tor"][port]["rx_packets"] - before


def test_two_labs_of_one_topology_stand_side_by_side(name: str) -> None:
    before = set(os.listdir("/sys/class/net"))
    second = f"{name}_b"
    with Lab(load("single_tor"), any_target(), name=name) as lab:
        with Lab(load("single_tor"), any_target(), name=second):
            assert remains(second, before)
        assert not remains(second, before)
        assert ping(lab, "rank0", "172.31.3.1")


def test_a_lab_is_refused_twice_and_its_holder_named(name: str) -> None:
    with Lab(load("single_tor"), any_target(), name=name) as lab:
        with pytest.raises(LabError, match=rf"in use by process {os.getpid()}"):
            Lab(load("single_tor"), any_target(), name=name).up()
        with pytest.raises(LabError, match="in use"):
            labs.down(name)
        lab.release()
        with pytest.raises(LabError, match="already exists"):
            Lab(load("single_tor"), any_target(), name=name).up()
        assert ping(lab, "rank0", "172.31.3.1")


def test_command_line_up_and_down(name: str) -> None:
    before = set(os.listdir("/sys/class/net"))
    programs = loss_programs()
    links = ("--loss", str(SHARE), "--jitter", "2ms")
    up = lab_command("up", "single_tor", "--name", name, "--target", any_target(), *links)
    assert up.returncode == 0, up.stderr
    for part in ("10.0.2.4", f"cm-{name}-shadow1", f"/run/checkmate/labs/{name}/job.yaml"):
        assert part in up.stdout
    for part in (
        "training links lose 0.012345 of their frames",
        "delay frames at random, by up to 2 ms each way",
    ):
        assert part in up.stdout
    assert f"cm-{name}-cables" in remains(name, before).namespaces
    if "(bpf)" in up.stdout:
        assert loss_programs() - programs == 8
    lab_remains = remains(name, before)
    assert lab_remains.processes
    labs = {lab["name"]: lab for lab in json.loads(lab_command("list", "--json").stdout)["labs"]}
    assert labs[name] == {
        "name": name,
        "topology": "single_tor",
        "target": any_target(),
        "up": True,
        "job_file": f"/run/checkmate/labs/{name}/job.yaml",
    }
    text = lab_command("list", columns=60).stdout.splitlines()
    assert f"job of {name}: /run/checkmate/labs/{name}/job.yaml" in text
    unnamed = lab_command("down")
    assert unnamed.returncode == 2
    assert name in unnamed.stderr.partition("--all; labs that are up: ")[2].strip().split(", ")
    assert remains(name, before) == lab_remains
    typo = lab_command("down", name, f"{name}_typo")
    assert typo.returncode == 2
    assert f"no lab '{name}_typo' is up (labs that are up: " in typo.stderr
    assert f"); did you mean {name}?" in typo.stderr
    assert name in typo.stderr.partition("labs that are up: ")[2].partition(")")[0].split(", ")
    assert remains(name, before) == lab_remains
    down = lab_command("down", name)
    assert (down.returncode, down.stdout) == (0, f"lab {name} removed\n")
    assert not remains(name, before)
    assert not alive(lab_remains.processes)
    wait_until(lambda: loss_programs() == programs)  # the kernel removes namespaces later
    again = lab_command("down", name, "--if-up")
    assert (again.returncode, again.stdout) == (0, f"lab {name} does not exist; nothing to remove\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "nowhere"], "no lab 'nowhere'"),
        (["up", "single_tor", "--target", "tofin"], "no target 'tofin'"),
        (["up", "x", "--target", "tofin"], "no lab 'x'; there are "),
        (["up", "x", "--target", "tofin", "--loss", "9"], "; no target 'tofin'; "),
        (["up", "x", "--target", "tofin", "--loss", "9"], "'9' is not a loss rate"),
        (["up", "single_tor", "--loss", "2"], "'2' is not a loss"),
        (["up", "single_tor", "--jitter", "5m"], "'5m' is not a jitter"),
        (["up", "single_tor", "--mtu", "100"], "invalid MTU 100"),
        (["up", "single_tor", "--name", "A-b"], "'A-b' is not a valid lab name"),
        (["down", "A-b"], "'A-b' is not a valid lab name"),
        (["down", "nosuchlab"], "no lab 'nosuchlab' is up (labs that are up: "),
        (["down"], "specify lab names or --all; labs that are up: "),
        (["down", "--if-up"], "specify lab names or --all; labs that are up: "),
        (["down", "nosuchlab", "--all"], "specify either lab names or --all, not both; labs that are up: "),
    ],
)
def test_a_bad_command_line_is_one_message(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_down_spares_processes_of_other_labs_and_of_none(name: str) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        with Lab(load("single_tor"), any_target(), name=f"{name}_b") as second_lab:
            with Lab(load("single_tor"), any_target(), name=name):
                pass
            assert stranger.poll() is None
            assert ping(second_lab, "rank0", "172.31.3.1")
            assert links.counters(second_lab.namespace("tor"))["port1"]
    finally:
        stranger.kill()
        stranger.wait()
