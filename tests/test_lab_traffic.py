"""Real traffic in labs: tagged by eBPF, replicated by a switch, read on ordinary sockets, compared."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from checkmate.tagger import build
from tests.live import alive, needs_bmv2, needs_clang, needs_root
from topologies import cgroups, loss, namespaces, state
from topologies.crew import Crew
from topologies.demo import run_lab
from topologies.describe import LabError, load
from topologies.job_files import Target
from topologies.lab import Lab
from topologies.runner import Outcome, Traffic
from topologies.serving import serving
from topologies.traffic import Load

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, "-m", "checkmate.cli.entry", "lab"]

pytestmark = [needs_root, needs_clang]
_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    """Ends what a failed test has started; killing the dead does nothing."""
    yield
    while _started:
        _started.pop().kill()


def gather(name: str, topology: str, target: Target, nbytes: int, share: float = 0.0) -> Outcome:
    lab = Lab(load(topology), target, name=name, loss=share)
    outcome = run_lab(lab, Load(nbytes=nbytes), Console(file=io.StringIO()))
    assert not namespaces.of_lab(name)
    assert not state.folder(name).exists()
    return outcome


def check(outcome: Outcome, nbytes: int) -> None:
    """Every stream equal, every byte tagged once, nothing lost at any switch, every gather verified."""
    assert outcome.good, outcome.data()
    assert outcome.verdict.tagged == outcome.verdict.gathered >= nbytes
    assert [rank["verified"] for rank in outcome.ranks] == [4] * len(outcome.ranks)
    for switch in outcome.switches:
        assert [count["packets"] for count in switch["losses"].values()] == [0, 0]
    sent = sum(stream["bytes"] for switch in outcome.switches for stream in switch["streams"])
    assert sent > outcome.verdict.tagged


def test_single_tor_on_softswitch(name: str) -> None:
    check(gather(name, "single_tor", "softswitch", 20_000_000), 20_000_000)


def test_loss_from_the_first_segment_on_costs_no_stream_a_byte(name: str) -> None:
    outcome = gather(name, "single_tor", "softswitch", 20_000_000, share=0.01)
    check(outcome, 20_000_000)
    assert outcome.retransmitted > 0


@needs_bmv2
def test_single_tor_on_bmv2(name: str) -> None:
    check(gather(name, "single_tor", "bmv2", 4_000_000), 4_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["single_tor", "two_tor", "paper_testbed"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_each_lab_on_softswitch(name: str, topology: str, share: float) -> None:
    check(gather(name, topology, "softswitch", 200_000_000, share), 200_000_000)


@pytest.mark.slow
@needs_bmv2
@pytest.mark.parametrize("topology", ["single_tor", "two_tor", "paper_testbed"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_each_lab_on_bmv2(name: str, topology: str, share: float) -> None:
    check(gather(name, topology, "bmv2", 20_000_000, share), 20_000_000)


def test_a_stream_with_a_gap_is_found(name: str) -> None:
    """Loss behind the switch, where nothing is sent again: the shadow stream ends at the gap."""
    with Lab(load("single_tor"), "softswitch", name=name) as lab, Crew(lab) as crew, serving(crew):
        traffic = Traffic(crew, Load(nbytes=20_000_000))
        traffic.connect()
        loss.add(lab.namespace("tor"), "port5", 0.2)
        traffic.gather()
        outcome = traffic.finish(quiet=1)
    assert not outcome.good
    wrong = {row.nic for row in outcome.verdict.rows if not row.equal}
    assert wrong == {"10.0.2.1"}


def test_a_rank_that_fails_is_quoted_and_nothing_stays(name: str) -> None:
    with Lab(load("single_tor"), "softswitch", name=name) as lab, Crew(lab) as crew:
        blocker = _occupy(lab, "rank2", 47000)
        with pytest.raises(LabError, match=r"rank2 ended with status 1: .*47000"), serving(crew):
            Traffic(crew, Load(nbytes=10**6)).run()
        blocker.kill()
        blocker.wait()
    assert not namespaces.of_lab(name)


def test_the_cause_is_quoted_before_its_consequences(name: str) -> None:
    """Even where the cause ends last, for it cleans up after its last words."""
    with Lab(load("single_tor"), "softswitch", name=name) as lab:
        crew = Crew(lab)
        crew.start("victim", "rank0", ["sh", "-c", "sleep 0.2; echo broken pipe >&2; exit 1"])
        crew.start("cause", "rank1", ["sh", "-c", "echo no memory >&2; sleep 0.5; exit 3"])
        crew.start("another", "rank2", ["sleep", "60"])
        with pytest.raises(LabError) as failed:
            crew.wait(lambda: False, "nothing", 30)
    assert str(failed.value) == (
        "cause ended with status 3: no memory; then victim ended with status 1: broken pipe"
    )


def test_of_many_that_fail_the_first_are_quoted(name: str) -> None:
    with Lab(load("single_tor"), "softswitch", name=name) as lab:
        crew = Crew(lab)
        for number in range(6):
            crew.start(f"p{number}", "rank0", ["sh", "-c", f"sleep {number / 10}; echo {number} >&2; exit 1"])
        with pytest.raises(LabError, match=r"^p0 .*: 0; then p1 .*: 1; .*p3 .*: 3; then 2 more$"):
            crew.wait(lambda: False, "nothing", 30)


def _occupy(lab: Lab, host: str, port: int) -> subprocess.Popen[bytes]:
    """Something else that listens at the ring's port until it is killed."""
    listens = f"s = socket.create_server(('', {port}))"
    code = f"import signal, socket; {listens}; print('on', flush=True); signal.pause()"
    process = lab.start(host, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"on\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_traffic_leaves_nothing(name: str, small: Path, number: signal.Signals) -> None:
    build.object_file()
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    held = namespaces.processes(namespaces.of_lab(name))
    cgroup = cgroups.place(name)
    process.send_signal(number)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 128 + number, words
    assert "Traceback" not in words
    _nothing_stays(name, held, cgroup)


def test_a_closed_terminal_leaves_nothing(name: str, small: Path) -> None:
    """SIGHUP, and nobody reads what it prints."""
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    held = namespaces.processes(namespaces.of_lab(name))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30)
    _nothing_stays(name, held, cgroups.place(name))


def test_down_clears_up_after_kill_9_during_traffic(name: str, small: Path) -> None:
    process = _start_run(name, small)
    _wait_for_traffic(name, process)
    held = namespaces.processes(namespaces.of_lab(name))
    assert len(held) >= 5  # switch, controller, two ranks, a sink
    cgroup = cgroups.place(name)
    process.kill()
    process.communicate(timeout=30)
    down = subprocess.run([*CLI, "down", name], capture_output=True, text=True, check=False, cwd=ROOT)
    assert down.returncode == 0, down.stderr
    _nothing_stays(name, held, cgroup)


def test_command_line_run(name: str) -> None:
    done = subprocess.run(
        [*CLI, "run", "two_tor", "--name", name, "--megabytes", "10", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["good"] is True
    assert {len(stream["read"]["sha256"]) for stream in data["streams"]} == {64}
    assert [switch["switch"] for switch in data["switches"]] == ["tor0", "tor1"]
    assert "rings gather 10 MB" in done.stderr


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A lab with one of each: two ranks, a shadow node, a switch."""
    file = tmp_path / "small.yaml"
    file.write_text(
        "title: small\nswitches: [tor]\ndp_groups: [{ranks: [tor, tor]}]\nshadow_nodes: [[tor]]\n"
    )
    return file


def _start_run(name: str, topology: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*CLI, "run", topology, "--name", name, "--megabytes", "100000", "--iterations", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    _started.append(process)
    return process


def _wait_for_traffic(name: str, process: subprocess.Popen[str]) -> None:
    """Until a shadow node has read something."""
    output = state.folder(name) / "shadow0.out.log"
    deadline = time.monotonic() + 60
    while not (output.exists() and "received" in output.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _nothing_stays(name: str, held: list[int], cgroup: str | None) -> None:
    assert not namespaces.of_lab(name)
    assert not state.folder(name).exists()
    assert cgroup is None or not Path(cgroup).exists()
    assert not alive(held)
