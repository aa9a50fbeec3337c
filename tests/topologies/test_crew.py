"""Processes in a lab that are pinned, killed and restarted: hosts, the controller, the switch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.labs.live import alive, needs_root
from tests.support.waiting import wait_until
from topologies import torchrun
from topologies.crew import CHECKMATE, Crew, serving, status
from topologies.describe.topology import BadDescription, LabError, load
from topologies.kernel import processes
from topologies.kernel.processes import PYTHON, descendants
from topologies.lab import Lab

pytestmark = needs_root

# A supervisor: it restarts its child, which has its own session, when that ends.
SUPERVISOR = "while :; do setsid sh -c 'echo up; sleep 60' & wait $!; done"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    name = f"c{os.getpid()}_{random.randrange(10**6)}"
    with Lab(load("single_tor"), name=name, switch_cpus={max(os.sched_getaffinity(0))}) as crew_lab:
        yield crew_lab


@pytest.fixture
def crew(lab: Lab) -> Iterator[Crew]:
    with Crew(lab) as lab_crew:
        yield lab_crew


def await_end(pids: list[int]) -> None:
    """Check that all end soon."""
    wait_until(lambda: not alive(pids))


def test_a_process_is_pinned_and_finds_the_job(lab: Lab, crew: Crew) -> None:
    before = os.sched_getaffinity(0)
    code = (
        "import os; print(sorted(os.sched_getaffinity(0)), os.environ['CHECKMATE_JOB'], os.environ['MINE'])"
    )
    for cpu in sorted(before):
        process = crew.start(
            "one", "rank0", [sys.executable, "-c", code], cpus={cpu}, environment={"MINE": "yes"}
        )
        crew.finish([process], 20)
        assert process.output_text().split() == [f"[{cpu}]", str(lab.job_file), "yes"]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(BadDescription, match=r"CPUs \[9999\]: only"):
        crew.start("two", "rank0", ["true"], cpus={9999})


def test_what_a_process_leaves_in_its_temporary_folder_goes_with_the_lab(lab: Lab, crew: Crew) -> None:
    process = crew.start("one", "rank0", [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"])
    crew.finish([process], 20)
    temporary_folder = Path(process.output_text().strip())
    assert temporary_folder.is_dir() and temporary_folder.is_relative_to(lab.directory)


def test_switches_are_pinned_and_others_are_not(lab: Lab, crew: Crew) -> None:
    before = os.sched_getaffinity(0)
    (switch,) = lab.switch_pids.values()
    assert os.sched_getaffinity(switch) == {max(before)}
    assert os.sched_getaffinity(crew.start("free", "rank0", ["sleep", "60"]).process.pid) == before


def test_pinned_switches_go_first_as_far_as_that_is_permitted(lab: Lab, crew: Crew) -> None:
    with processes.ahead():
        permitted = os.sched_getscheduler(0)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert [os.sched_getscheduler(switch) for switch in lab.switch_pids.values()] == [permitted]
    assert os.sched_getscheduler(crew.start("last", "rank0", ["sleep", "60"]).process.pid) == os.SCHED_OTHER


def test_a_killed_process_takes_what_it_started_with_it(crew: Crew) -> None:
    member = crew.start("supervisor", "rank1", ["sh", "-c", SUPERVISOR])
    crew.wait(lambda: "up" in member.output_text(), "child to start", 10)
    tree = [member.process.pid, *member.children()]
    assert len(tree) >= 3
    crew.kill(member)
    assert member.process.returncode == -signal.SIGKILL
    await_end(tree)
    crew.wait(lambda: True, "nothing", 1)  # this is not a failure
    crew.kill(member)  # a second time changes nothing


def test_children_are_killed_and_their_parent_lives(crew: Crew) -> None:
    member = crew.start("supervisor", "rank1", ["sh", "-c", SUPERVISOR])
    crew.wait(lambda: "up" in member.output_text(), "child to start", 10)
    killed = crew.kill_children(member)
    await_end(killed)
    crew.wait(lambda: member.output_text().count("up") == 2, "child to start again", 10)
    assert member.running
    assert set(member.children()).isdisjoint(killed)


def test_a_restarted_process_is_as_before_and_its_logs_go_on(crew: Crew) -> None:
    code = "import os; print(os.environ['MINE'], os.getpid(), flush=True); import time; time.sleep(60)"
    cpu = min(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", code]
    member = crew.start("node", "shadow0", argv, cpus={cpu}, environment={"MINE": "a"})
    crew.wait(lambda: "\n" in member.output_text(), "first start", 10)
    first = member.output_text()
    crew.restart(member)  # it still runs
    crew.wait(lambda: "\n" in member.output_text(), "second start", 10)
    assert member.output_text().split()[0] == "a"
    assert member.output_text() != first
    assert os.sched_getaffinity(member.process.pid) == {cpu}
    assert member.output.read_text() == first + member.output_text()
    await_end([int(first.split()[1])])


def test_a_restarted_process_that_fails_is_quoted_by_its_new_words(crew: Crew, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f"if [ -e {flag} ]; then echo second >&2; exit 4; fi; touch {flag}; echo first >&2; sleep 60"
    member = crew.start("node", "shadow0", ["sh", "-c", script])
    crew.wait(flag.exists, "first start", 10)
    crew.restart(member)
    with pytest.raises(LabError, match=r"^node ended with status 4: second$"):
        crew.wait(lambda: False, "nothing", 10)


def test_the_cause_is_quoted_before_its_consequences(crew: Crew) -> None:
    """The cause may end last, because it cleans up after its last output."""
    crew.start("victim", "rank0", ["sh", "-c", "sleep 0.2; echo broken pipe >&2; exit 1"])
    crew.start("cause", "rank1", ["sh", "-c", "echo no memory >&2; sleep 0.5; exit 3"])
    crew.start("another", "rank2", ["sleep", "60"])
    with pytest.raises(LabError) as failed:
        crew.wait(lambda: False, "nothing", 30)
    assert str(failed.value) == (
        "cause ended with status 3: no memory; then victim ended with status 1: broken pipe"
    )


def test_of_many_that_fail_the_first_are_quoted(crew: Crew, tmp_path: Path) -> None:
    """Each fails after the one before it, and all before the crew looks."""
    turns = [tmp_path / str(number) for number in range(7)]
    failing = []
    for number, (turn, following) in enumerate(pairwise(turns)):
        script = f"until [ -e {turn} ]; do sleep 0.01; done; echo {number} >&2; touch {following}; exit 1"
        failing.append(crew.start(f"p{number}", "rank0", ["sh", "-c", script]))
    turns[0].touch()
    wait_until(lambda: not any(member.running for member in failing), "all to fail")
    with pytest.raises(LabError, match=r"^p0 .*: 0; then p1 .*: 1; .*p3 .*: 3; then 2 more$"):
        crew.wait(lambda: False, "nothing", 30)


def test_nothing_stays_of_a_crew(lab: Lab) -> None:
    with Crew(lab) as crew:
        member = crew.start("supervisor", "rank1", ["sh", "-c", SUPERVISOR])
        crew.wait(lambda: "up" in member.output_text(), "child to start", 10)
        tree = [member.process.pid, *member.children()]
    await_end(tree)


def test_the_controller_is_killed_and_serves_again(crew: Crew) -> None:
    with serving(crew) as controller:
        assert "updates written" in controller.member.output_text()
        pid = controller.member.process.pid
        controller.kill()
        await_end([pid])
        assert [switch["switch"] for switch in status(crew)] == ["tor"]
        controller.restart()
        assert ": 0 updates" in controller.member.output_text()
    assert not controller.member.running


def test_a_controller_that_was_killed_ends_its_block_quietly(crew: Crew) -> None:
    with serving(crew) as controller:
        controller.kill()


def test_a_controller_that_fails_is_quoted(crew: Crew) -> None:
    with pytest.raises(LabError, match="controller ended with status"), serving(crew, "/nowhere.yaml"):
        pass


@pytest.mark.slow
def test_the_switch_stops_and_comes_back_empty(lab: Lab, crew: Crew) -> None:
    with serving(crew) as controller:
        (pid,) = lab.switch_pids.values()
        lab.stop_switch("tor")
        await_end([pid])
        assert lab.switch_pids == {}
        crew.wait(lambda: "tor" in controller.member.error_text(), "controller to notice", 20)
        lab.restart_switch("tor")
        crew.wait(lambda: "is back: " in controller.member.error_text(), "reconciliation", 20)
        (switch,) = status(crew)
        assert not any(stream["connected"] for stream in switch["streams"])
        lab.restart_switch("tor")  # also while it runs
        assert pid not in lab.switch_pids.values()
    assert json.loads((lab.directory / "lab.json").read_text())["lab"] == lab.name


GATHERING = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
step = torch.zeros(1)
while not step.item():
    rank = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(rank)
    print("rank", dist.get_rank(), "sum", rank.item(), flush=True)
    step.fill_(os.path.exists(sys.argv[1]))
    dist.all_reduce(step)
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_the_job_again_when_a_rank_is_killed(lab: Lab, crew: Crew, tmp_path: Path) -> None:
    script, flag = tmp_path / "gathering.py", tmp_path / "end"
    script.write_text(GATHERING)
    members = [
        crew.start(
            host.name,
            host.name,
            torchrun.command(lab.topology, host, [script, flag], restarts=1),
            environment=torchrun.ENVIRONMENT,
        )
        for host in lab.topology.trainers
    ]
    crew.wait(lambda: all("sum" in m.output_text() for m in members), "ranks to gather", 60)
    workers = {m.name: m.children() for m in members}
    assert len(crew.kill_children(members[2])) == 1
    crew.wait(
        lambda: all(m.children() and set(m.children()).isdisjoint(workers[m.name]) for m in members),
        "all workers to start again",
        60,
    )
    before = [len(m.output_text()) for m in members]
    crew.wait(
        lambda: all(len(m.output_text()) > size for m, size in zip(members, before, strict=True)),
        "gathering",
        60,
    )
    flag.touch()
    crew.finish(members, 60)
    for rank, member in enumerate(members):
        lines = set(member.output_text().splitlines())
        assert lines == {f"rank {rank} sum 6.0"}
    assert descendants(members[0].process.pid) == []


@pytest.mark.parametrize(
    "command",
    [
        (*CHECKMATE, "--version"),
        (*PYTHON, "-m", "softswitch", "--help"),
        (*PYTHON, "-m", "topologies.kernel.jitter", "--help"),
        (*PYTHON, "-m", "topologies.tofino_model", "--help"),
        pytest.param((*PYTHON, "-m", "torch.distributed.run", "--help"), marks=pytest.mark.slow),
    ],
    ids=lambda command: command[3],
)
def test_what_root_starts_imports_nothing_from_where_it_is_started(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """A lab may be started in a folder that belongs to somebody else."""
    for module in ("copy", "random", "logging", "ipaddress"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('a stranger has run')")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
