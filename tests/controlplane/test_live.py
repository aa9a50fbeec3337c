"""The controller against a real switch process and real kernel sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.wire.schedule import nic_of
from checkmate.wire.tag import Hello
from controlplane.serve import POLL_SECONDS
from testbed.process_memory import resident
from tests.support.labs.live import LiveSwitch, acknowledged, live_switch, needs_root, targets, was_reset
from topologies.describe.job_files import Target
from topologies.kernel import namespaces
from topologies.kernel.namespaces import entered

pytestmark = [needs_root, targets, pytest.mark.timeout(180)]
INCARNATION = 7


@pytest.fixture(scope="module")
def lab_of(request: pytest.FixtureRequest) -> Iterator[dict[str, LiveSwitch]]:
    """Yield a function that returns one lab per target, created on first use."""
    labs: dict[str, Any] = {}
    yield labs
    for context, _ in labs.values():
        context.__exit__(None, None, None)


@pytest.fixture
def live(target: Target, lab_of: dict[str, Any]) -> Iterator[LiveSwitch]:
    if target not in lab_of:
        context = live_switch(target, f"ctltest{target[:4]}")
        lab_of[target] = (context, context.__enter__())
    live_lab = lab_of[target][1]
    yield live_lab
    live_lab.command("remove", live_lab.job, status=None)


def hellos(job: Job, group: int = 0, incarnation: int = INCARNATION) -> Iterator[tuple[int, Any, Hello]]:
    """Yield (shadow node, NIC, hello) of every stream of a DP group."""
    for shadow_id in range(job.shards(group)):
        for holder in range(1, job.replicas + 1):
            node = job.holder(group, shadow_id, holder)
            for side in (0, 1):
                for channel in range(job.channels):
                    nic = node.nics[nic_of(channel, side, len(node.nics))]
                    yield node.id, nic, Hello(0, 2 * group + side, shadow_id, channel, incarnation, 0)


def connect_all(live: LiveSwitch, incarnation: int = INCARNATION) -> list[Any]:
    job = read_job(live.job)
    return [live.hello(f"shadow{n}", nic, hello) for n, nic, hello in hellos(job, incarnation=incarnation)]


def update_count(output: str) -> int:
    """Return the number of updates that `run --once` reports."""
    (count,) = [
        int(line.split(" updates")[0].split()[-1]) for line in output.splitlines() if "updates" in line
    ]
    return count


def test_a_second_run_writes_nothing(live: LiveSwitch) -> None:
    assert update_count(live.command("run", "--once", live.job)) > 20
    assert update_count(live.command("run", "--once", live.job)) == 0


def test_remove_leaves_nothing(live: LiveSwitch) -> None:
    live.command("run", "--once", live.job)
    assert "0 entities stay" in live.command("remove", live.job)
    assert update_count(live.command("run", "--once", live.job)) > 20


def test_streams_connect_and_status_waits_for_them(live: LiveSwitch) -> None:
    with live.serving():
        late = live.start("status", live.job, "--wait", "--timeout", "0.1")
        late.communicate()
        assert late.returncode == 7
        waiting = live.start("status", live.job, "--wait")
        sockets = connect_all(live)
        waiting.communicate(timeout=20)
        assert waiting.returncode == 0
        assert len(live.connected()) == len(sockets) == 8
        sockets[0].close()
        live.until(lambda: len(live.connected()) == 7)
        live.until(lambda: " closed its stream of channel " in live.log())
        for sock in sockets[1:]:
            sock.close()
        live.until(lambda: " closed 7 streams: " in live.log())
        assert live.log().count(" closed ") == 2


def test_a_restarted_controller_takes_up_the_connected_streams(live: LiveSwitch) -> None:
    with live.serving() as controller:
        sockets = connect_all(live)
        controller.kill()
        assert len(live.connected()) == 8
        controller.restart()
        assert ": 0 updates written in" in live.log()
        assert len(live.connected()) == 8
        node, nic, hello = next(hellos(read_job(live.job)))
        replacement = live.hello(f"shadow{node}", nic, hello)
        assert len(live.connected()) == 8
        assert not was_reset(sockets[1], 0.2)
        replacement.close()


def test_a_restarted_switch_gets_everything_back_streams_included(live: LiveSwitch) -> None:
    with live.serving():
        sockets = connect_all(live)
        before = live.connected()
        live.restart_switch()
        live.until(lambda: "is back: " in live.log())
        assert live.connected() == before
        assert len(sockets) == 8
        assert "went away" in live.log() or "closed the session" in live.log()


def test_packets_that_the_guard_refuses_are_shown(live: LiveSwitch) -> None:
    live.command("run", "--once", live.job)
    job = read_job(live.job)
    rank = job.dp_groups[0].ranks[0]
    assert "refused" not in live.command("status", live.job)
    frame = bytes(Ether(src=rank.mac, dst="ff:ff:ff:ff:ff:ff") / IP(src="10.99.0.1", dst=str(rank.ip)))
    with entered(live.lab.namespace("rank0")), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("data0", 0))
        for _ in range(50):
            raw.send(frame)
    words = f"50 packets refused at port {rank.port}, where rank 0 of {job.job} has only {rank.ip}:"
    live.until(lambda: words in " ".join(live.command("status", live.job).split()))
    (refusal,) = (entry for entry in live.status()["refused"] if entry["packets"])
    assert (refusal["port"], refusal["packets"]) == (rank.port, 50)
    report = json.loads(live.command("doctor", live.job, "--role", "controller", "--json", status=None))
    details = [finding["detail"] for role in report["roles"] for finding in role["findings"]]
    assert f"{words.removesuffix(':')} (none of them in the last 1 s)" in details


def test_a_new_incarnation_replaces_the_old_streams(live: LiveSwitch) -> None:
    with live.serving():
        first = connect_all(live)
        second = connect_all(live, incarnation=INCARNATION + 1)
        assert {stream[-1] for stream in live.connected()} == {INCARNATION + 1}
        for sock in first:  # a FIN of an old connection ends nothing
            sock.close()
        time.sleep(0.3)
        assert len(live.connected()) == len(second)


def test_what_is_no_hello_of_this_node_and_nic_is_reset(live: LiveSwitch) -> None:
    job = read_job(live.job)
    node, nic, hello = next(hellos(job))
    second_nic = job.shadow_nodes[node].nics[1]
    with live.serving():
        assert was_reset(live.connect(f"shadow{node}", second_nic, hello))
        assert was_reset(live.connect(f"shadow{node}", nic, Hello(0, 99, 0, 0, 1, 0)))
        assert was_reset(live.connect(f"shadow{node}", nic, b"GET / HTTP/1.1\r\n"))
        assert was_reset(live.connect(f"shadow{node}", nic, hello.pack(bytes(16))[:8]))  # a half
        assert live.connected() == set()
        assert acknowledged(live.connect(f"shadow{node}", nic, hello))


def test_a_hello_needs_the_key_the_time_and_the_version(live: LiveSwitch) -> None:
    node, nic, hello = next(hellos(read_job(live.job)))
    name = f"shadow{node}"
    with live.serving():
        assert was_reset(live.connect(name, nic, hello, key=bytes(32)))
        assert was_reset(live.connect(name, nic, hello, ahead=75.0))
        assert was_reset(live.connect(name, nic, hello, ahead=-75.0))
        assert was_reset(live.connect(name, nic, bytes.fromhex("c4ec0001") + bytes(12)))
        assert live.connected() == set()
        connected = live.connect(name, nic, hello, ahead=50.0)
        assert acknowledged(connected)
        assert was_reset(live.connect(name, nic, hello))
        assert len(live.connected()) == 1
        connected.close()
    for reason in ("MAC is wrong", "s ahead of this", "s behind this", "the node is old", "it is old: "):
        assert reason in live.log()


def test_jobs_are_added_edited_and_removed_while_it_runs(live: LiveSwitch, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    data = yaml.safe_load(live.job.read_text())
    data["fabric"] = (
        str(live.job.parent / data["fabric"]) if isinstance(data["fabric"], str) else data["fabric"]
    )
    first = folder / "first.yaml"
    first.write_text(yaml.safe_dump(data))
    second = {**data, "job": "second", "dp_groups": _elsewhere(data), "shadow_nodes": _nodes_elsewhere(data)}
    with live.serving(folder):
        sockets = connect_all(live)
        before = live.connected(first)
        (folder / "second.yaml").write_text(yaml.safe_dump(second))
        live.until(lambda: "job added: second" in live.log())
        assert live.connected(first) == before
        (folder / "second.yaml").write_text("job: [")
        live.until(lambda: "the jobs are unchanged" in live.log())
        (folder / "second.yaml").write_text(yaml.safe_dump({**second, "channels": 1}))
        live.until(lambda: live.log().count("updates written") >= 3)
        assert live.connected(first) == before
        (folder / "second.yaml").rename(tmp_path / "away.yaml")  # as `git checkout` and rsync may do
        time.sleep(2 * POLL_SECONDS)
        (tmp_path / "away.yaml").rename(folder / "second.yaml")
        live.until(lambda: live.log().count("updates written") >= 4)
        assert "job removed" not in live.log()
        (folder / "second.yaml").unlink()
        live.until(lambda: "job removed: second" in live.log())
        assert live.connected(first) == before
        assert not was_reset(sockets[0], 0.2)


@pytest.mark.slow
def test_the_last_job_goes_and_comes_back_with_the_view_on(live: LiveSwitch, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    data = yaml.safe_load(live.job.read_text())
    data["fabric"] = str(live.job.parent / data["fabric"])
    (folder / "only.yaml").write_text(yaml.safe_dump(data))
    with live.serving("--view", folder):
        (folder / "only.yaml").rename(tmp_path / "away.yaml")
        live.until(lambda: "job removed: " in live.log())
        time.sleep(1.5)
        (tmp_path / "away.yaml").rename(folder / "only.yaml")
        live.until(lambda: "job added: " in live.log())
        sockets = connect_all(live)
        assert len(sockets) == len(live.connected()) == 8
        live.restart_switch()
        live.until(lambda: "is back: " in live.log())
        assert len(live.connected()) == 8


@pytest.mark.slow
def test_status_waits_for_run_too(live: LiveSwitch) -> None:
    live.restart_switch()
    waiting = live.start("status", live.job, "--wait")
    with live.serving():
        sockets = connect_all(live)
        output, _ = waiting.communicate(timeout=30)
        assert waiting.returncode == 0, output
        assert len(sockets) == 8


def _elsewhere(data: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = [
        {
            **rank,
            "rank": index,
            "ip": f"10.0.200.{index + 1}",
            "mac": f"02:aa:00:00:00:{index:02x}",
            "mgmt": f"172.31.200.{index + 1}",
            "port": 50 + index,
        }
        for index, rank in enumerate(data["dp_groups"][0]["ranks"][:2])
    ]
    return [{"ranks": ranks}]


def _nodes_elsewhere(data: dict[str, Any]) -> list[dict[str, Any]]:
    nic = {**data["shadow_nodes"][0]["nics"][0], "ip": "10.0.200.9", "mac": "02:aa:00:00:00:99", "port": 59}
    return [{"id": 5, "mgmt": "172.31.200.9:7000", "nics": [nic]}]


@pytest.mark.slow
def test_another_primary_is_told_apart(live: LiveSwitch) -> None:
    with live.serving():
        assert "another primary controller" in live.command("run", live.job, status=5)
        message = " ".join(live.command("remove", live.job, status=5).split())
        assert "another primary controller" in message
        assert "Stop that `checkmate run`" in message
        assert "remove the job's file from the folder that it serves" in message


def test_a_flood_of_syns_and_resets_keeps_nobody_from_connecting(live: LiveSwitch) -> None:
    job = read_job(live.job)
    _, nic, _ = next(hellos(job))
    stub = job.fabric.switches[0].stub
    frames = [
        bytes(
            Ether(src=nic.mac, dst=stub.mac)
            / IP(src=f"10.0.{100 + i % 100}.{i % 250 + 1}", dst=str(stub.ip))
            / TCP(sport=1024 + i, dport=stub.port, flags="S" if i % 2 else "R", seq=i)
        )
        for i in range(500)
    ]
    host = live.lab.topology.hosts[-1]
    with live.serving() as controller, namespaces.entered(live.lab.namespace(host.name)):
        import socket  # noqa: PLC0415

        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        raw.bind((host.interfaces[-1].name, 0))
        memory = resident(controller.member.process.pid)
        for frame in frames * 10:
            raw.send(frame)
        start = time.monotonic()
        sockets = connect_all(live)
        took = time.monotonic() - start
        assert len(sockets) == 8
        assert took < 5
        assert resident(controller.member.process.pid) - memory < 50_000 << 10
        raw.close()
