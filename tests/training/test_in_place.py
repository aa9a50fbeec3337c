"""Recovery in place: survivors keep their processes, and the run has an undisturbed one's bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.units import NOBODY
from tests.support.waiting import wait_until
from tests.training.test_host_copies import ITERATIONS, JOBS, RANKS, LoopbackJob, folder, installed

__all__ = ["folder"]

KILLED_AT = 9
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
    pytest.mark.timeout(300),
]


def pid_of(job: LoopbackJob, rank: int, name: str = "killed") -> int:
    """Return a rank's process, as it has noted it last."""
    return int(job.lines(name, rank)[-1]["pid"])


def reached(job: LoopbackJob, iteration: int, name: str = "killed") -> bool:
    """Return whether all ranks have noted an iteration."""
    return all(any(line["iteration"] >= iteration for line in job.lines(name, rank)) for rank in range(RANKS))


def train_undisturbed(job: LoopbackJob) -> None:
    undisturbed = job.launch("undisturbed")
    assert undisturbed.wait(120) == 0, job.log("undisturbed")
    job.command("reset", "--yes")


def train_to_kill(job: LoopbackJob) -> subprocess.Popen[bytes]:
    """Train undisturbed, and then up to an iteration at which something is killed."""
    train_undisturbed(job)
    killed = job.launch("killed", 0.2)
    wait_until(lambda: reached(job, KILLED_AT), "iterations", 60)
    return killed


def finish(job: LoopbackJob, killed: subprocess.Popen[bytes], recoveries: int = 1) -> None:
    """Wait for the end; fail unless each rank has the undisturbed run's losses."""
    assert killed.wait(150) == 0, job.log("killed")
    for rank in range(RANKS):
        expected = {line["iteration"]: line["loss"] for line in job.lines("undisturbed", rank)}
        lines = job.lines("killed", rank)
        assert len(expected) == ITERATIONS
        assert [expected[line["iteration"]] for line in lines] == [line["loss"] for line in lines]
        assert {line["iteration"] for line in lines} == expected.keys()
        assert len(lines) - ITERATIONS <= recoveries, "each recovery repeats one iteration at most"
        assert lines[-1]["count"] == ITERATIONS
    assert "Traceback" not in job.log("shadow0") + job.log("shadow1")


@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in JOBS if kind != "ddp")]
)
def test_survivors_keep_their_processes(folder: Path, kind: str, keep: bool) -> None:
    """The first rank dies, whose parameters DistributedDataParallel would broadcast to all others."""
    job = LoopbackJob(folder, kind, **JOBS[kind])
    with job.nodes():
        train_undisturbed(job)
        killed = job.launch("killed", 0.2, "--spare", keep=keep)
        wait_until(lambda: reached(job, KILLED_AT), "iterations", 60)
        (folder / "killed" / "die0").touch()
        os.chown(folder / "killed" / "die0", NOBODY, NOBODY)
        finish(job, killed)
    for rank in range(RANKS):
        pids = list(dict.fromkeys(line["pid"] for line in job.lines("killed", rank)))
        assert len(pids) == (2 if rank == 0 else 1)
        assert job.lines("killed", rank)[-1]["begin"] >= KILLED_AT
    log = job.log("killed")
    assert len(re.findall("is started again", log)) == 1
    assert re.search(r"recovered in place in [\d.]+ s: rank 0: its process has ended", log)
    sources = {
        True: "ranks 1-3 have kept parameters and optimizer state",
        False: "all ranks have read the state",
    }
    assert sources[keep] in log
    assert "rank 0 was killed by SIGKILL, and is started again" in log


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp-muon", "ddp-schedulefree", "fsdp-lion", "ddp-spread"])
def test_copied_state_recovers_in_place(folder: Path, kind: str) -> None:
    """All ranks read it, also those that were told to keep theirs."""
    model, _, optimizer = kind.partition("-")
    installed(optimizer)
    job = LoopbackJob(folder, kind, **JOBS[model])
    with job.nodes():
        killed = train_to_kill(job)
        os.kill(pid_of(job, 2), signal.SIGKILL)
        finish(job, killed)
    assert len({line["pid"] for line in job.lines("killed", 0)}) == 1
    assert "all ranks have read the state" in job.log("killed")


@pytest.mark.slow
def test_two_ranks_die_at_once(folder: Path) -> None:
    job = LoopbackJob(folder, "ddp", **JOBS["ddp"])
    with job.nodes():
        killed = train_to_kill(job)
        for rank in (1, 3):
            os.kill(pid_of(job, rank), signal.SIGKILL)
        finish(job, killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "is started again",
        "resumed from the shadow nodes: iteration [1-9]",
        "follow DP group 0, from iteration [1-9]",
    ],
)
def test_a_survivor_dies_during_a_recovery(folder: Path, moment: str) -> None:
    job = LoopbackJob(folder, "ddp", **JOBS["ddp"])
    with job.nodes():
        killed = train_to_kill(job)
        survivor = pid_of(job, 2)
        os.kill(pid_of(job, 0), signal.SIGKILL)
        wait_until(lambda: re.search(moment, job.log("killed")), "the moment", 60)
        os.kill(survivor, signal.SIGKILL)
        finish(job, killed, recoveries=2)


@pytest.mark.slow
def test_a_shadow_node_and_a_rank_die(folder: Path) -> None:
    """The node that dies hosts the meeting."""
    job = LoopbackJob(folder, "ddp", **JOBS["ddp"])
    with job.nodes():
        killed = train_to_kill(job)
        os.kill(job.node_process(0).pid, signal.SIGKILL)
        os.kill(pid_of(job, 1), signal.SIGKILL)
        finish(job, killed, recoveries=2)


def counts(pid: int) -> tuple[int, int, int]:
    """Return a process's threads, descriptors, and resident kilobytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = re.findall(r"VmRSS:\s+(\d+)", status)
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")), int(resident)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_recoveries_leave_nothing_behind(folder: Path) -> None:
    job = LoopbackJob(folder, "ddp", **JOBS["ddp"])
    job.iterations = 400
    seen = []
    with job.nodes():
        killed = job.launch("killed", 0.1, "--spare")
        wait_until(lambda: reached(job, 5), "iterations", 60)
        for _ in range(40):
            begin = job.lines("killed", 0)[-1]["iteration"]
            os.kill(pid_of(job, 3), signal.SIGKILL)
            wait_until(lambda begin=begin: reached(job, begin + 3), "iterations", 60)  # type: ignore[misc]
            seen.append(counts(pid_of(job, 0)))
        killed.send_signal(signal.SIGINT)
        killed.wait(30)
    assert len({line["pid"] for line in job.lines("killed", 0)}) == 1
    threads, descriptors, resident = zip(*seen, strict=True)
    assert max(threads[20:]) <= max(threads[:20]), threads
    assert max(descriptors[20:]) <= max(descriptors[:20]), descriptors
    assert max(resident[30:]) <= 1.03 * max(resident[10:20]), resident
