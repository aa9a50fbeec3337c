"""Traffic in labs: tagged by eBPF, replicated by a switch, read from ordinary sockets, compared."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkmate.tagger.libbpf import object_file
from tests.support.documents import check_document
from tests.support.labs.live import alive, needs_bmv2, needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from tests.support.labs.remains import LAB_COMMAND, ROOT
from topologies import state
from topologies.crew import Crew, serving, status
from topologies.describe.job_files import Target
from topologies.describe.topology import LabError, build, load
from topologies.kernel import cgroups, loss, namespaces
from topologies.lab import Lab
from topologies.traffic.demo import run_lab, show
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic

SMALL = on_one_switch(2, (1,))

pytestmark = [needs_root, needs_clang, pytest.mark.timeout(300)]  # a lab's start is slow on a busy machine
_processes: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def process_cleanup(name: str) -> Iterator[None]:
    """End the processes of a failed test before its lab is removed."""
    yield
    while _processes:
        process = _processes.pop()
        process.kill()
        process.wait()


def gather(name: str, topology: str, target: Target, nbytes: int, share: float = 0.0) -> dict[str, Any]:
    lab = Lab(load(topology), target, name=name, loss=share)
    outcome = run_lab(lab, Load(nbytes=nbytes), Console(file=io.StringIO()))
    assert not namespaces.of_lab(name)
    assert not state.folder(name).exists()
    return outcome.data()


def check(data: dict[str, Any], nbytes: int, share: float) -> None:
    """Check that streams are equal, bytes tagged once, no copies lost at switches, and gathers verified."""
    assert data["good"] is True, data
    assert data["tagged_bytes"] == data["gathered_bytes"] >= nbytes
    assert {rank["verified"] for rank in data["ranks"]} == {4}
    for switch in data["switches"]:
        assert [count["packets"] for count in switch["losses"].values()] == [0, 0]
    assert data["port_drops"] == []
    nbytes_sent = sum(stream["bytes"] for switch in data["switches"] for stream in switch["streams"])
    assert nbytes_sent > data["tagged_bytes"]
    assert (sum(rank["retransmitted_segments"] for rank in data["ranks"]) > 0) or not share


@pytest.mark.slow
def test_loss_from_the_first_segment_on_costs_no_stream_a_byte(name: str) -> None:
    command = [*LAB_COMMAND, "run", "two_tor", "--name", name, "--megabytes", "10", "--loss", "2%", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    check_document("lab-run", data := json.loads(result.stdout))
    check(data, 10_000_000, 0.02)
    assert {len(stream["read"]["sha256"]) for stream in data["streams"]} == {64}
    assert [switch["switch"] for switch in data["switches"]] == ["tor0", "tor1"]
    assert "rings gather 10 MB" in result.stderr
    assert not namespaces.of_lab(name)
    assert not state.folder(name).exists()


def test_a_root_tags_once_what_goes_over_trees(name: str) -> None:
    """Small buckets have streams of their own, and all streams are equal at both ends."""
    three = build("three", on_one_switch(3, (1, 2), channels=2, collective="tree"))
    with Lab(three, name=name) as lab, Crew(lab) as crew, serving(crew):
        data = Traffic(crew, Load(nbytes=8_000_000)).run().data()
        streams = status(crew)[0]["streams"]
    check_document("lab-run", data)
    assert data["good"] and data["tagged_bytes"] == data["gathered_bytes"]
    assert {rank["verified"] for rank in data["ranks"]} == {4}
    rows = {(row["side"], row["channel"]) for row in data["streams"] if row["equal"]}
    assert rows == {(side, channel) for side in (0, 1) for channel in range(4)}
    assert {stream["channel"] for stream in streams if stream["in_trees"]} == {2, 3}


@pytest.mark.slow
@needs_bmv2
def test_single_tor_on_bmv2(name: str) -> None:
    check(gather(name, "single_tor", "bmv2", 4_000_000), 4_000_000, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["single_tor", "two_tor", "paper_testbed"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_each_lab_on_softswitch(name: str, topology: str, share: float) -> None:
    check(gather(name, topology, "softswitch", 200_000_000, share), 200_000_000, share)


@pytest.mark.slow
@needs_bmv2
@pytest.mark.parametrize("topology", ["single_tor", "two_tor", "paper_testbed"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_each_lab_on_bmv2(name: str, topology: str, share: float) -> None:
    check(gather(name, topology, "bmv2", 20_000_000, share), 20_000_000, share)


@pytest.mark.slow
def test_a_stream_with_a_gap_is_found_and_what_a_port_dropped_is_told(name: str) -> None:
    """Frames lost after the switch are not retransmitted: the shadow stream ends at the gap."""
    three = build("three", on_one_switch(2, (1, 1, 1)))
    with Lab(three, name=name) as lab, Crew(lab) as crew, serving(crew):
        traffic = Traffic(crew, Load(nbytes=20_000_000))
        traffic.connect()
        loss.add(lab.namespace("tor"), "port3", 0.2)
        with namespaces.netlink(lab.namespace("tor")) as ip:
            ip.link("set", index=ip.link_lookup(ifname="port4")[0], state="down")
        traffic.gather()
        outcome = traffic.finish(quiet=1)
    assert not outcome.good
    wrong = {row.node for row in outcome.verdict.rows if not row.equal}
    assert wrong == {0, 1}
    ((dropped),) = outcome.data()["port_drops"]
    assert (dropped["switch"], dropped["port"], dropped["neighbour"]) == ("tor", 4, "shadow1 data0")
    assert dropped["disconnected"] > 0
    output = io.StringIO()
    show(outcome, lab, Console(file=output, width=200))
    assert (
        f"switch tor dropped at port 4 (shadow1 data0): {dropped['disconnected']:,} frames"
        in output.getvalue()
    )


@pytest.mark.slow
def test_a_rank_that_fails_is_quoted_and_nothing_stays(name: str) -> None:
    with Lab(build("small", SMALL), name=name) as lab, Crew(lab) as crew:
        blocker = _occupy(lab, "rank1", 47000)
        with pytest.raises(LabError, match=r"rank1 ended with status 1: .*47000"), serving(crew):
            Traffic(crew, Load(nbytes=10**6)).run()
        blocker.kill()
        blocker.wait()
    assert not namespaces.of_lab(name)


def _occupy(lab: Lab, host: str, port: int) -> subprocess.Popen[bytes]:
    """Start another process that listens at the ring's port until it is killed."""
    listens = f"s = socket.create_server(('', {port}))"
    code = f"import signal, socket; {listens}; print('on', flush=True); signal.pause()"
    process = lab.start(host, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"on\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_traffic_leaves_nothing(name: str, small: Path, number: signal.Signals) -> None:
    object_file()
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    pids = namespaces.processes(namespaces.of_lab(name))
    cgroup = cgroups.place(name)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + number, words
    assert "Traceback" not in words
    _nothing_stays(name, pids, cgroup)


@pytest.mark.slow
def test_a_closed_terminal_leaves_nothing(name: str, small: Path) -> None:
    """It gets SIGHUP, and its output is not read."""
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    pids = namespaces.processes(namespaces.of_lab(name))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60)
    _nothing_stays(name, pids, cgroups.place(name))


@pytest.mark.slow
def test_down_clears_up_after_kill_9_during_traffic(name: str, small: Path) -> None:
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    pids = namespaces.processes(namespaces.of_lab(name))
    assert len(pids) >= 5  # switch, controller, two ranks, a sink
    cgroup = cgroups.place(name)
    process.kill()
    process.communicate(timeout=60)
    down = subprocess.run([*LAB_COMMAND, "down", name], capture_output=True, text=True, check=False, cwd=ROOT)
    assert down.returncode == 0, down.stderr
    _nothing_stays(name, pids, cgroup)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(SMALL))
    return file


def _start_run(name: str, topology: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*LAB_COMMAND, "run", topology, "--name", name, "--megabytes", "100000", "--iterations", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    _processes.append(process)
    return process


def _wait_for_traffic(name: str, process: subprocess.Popen[str]) -> None:
    """Wait until a shadow node has read bytes."""
    output = state.folder(name) / "shadow0.out.log"
    deadline = time.monotonic() + 180
    while not (output.exists() and "received" in output.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _nothing_stays(name: str, pids: list[int], cgroup: str | None) -> None:
    assert not namespaces.of_lab(name)
    assert not state.folder(name).exists()
    assert cgroup is None or not Path(cgroup).exists()
    assert not alive(pids)
