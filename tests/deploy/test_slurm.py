"""The scripts for Slurm: by themselves, and, if Slurm is installed, as jobs of a cluster in a lab."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testbed.ports import free_port
from tests.support.labs.live import needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from tests.support.slurm import Cluster, needs_slurm
from tests.support.units import NOBODY, USER, python
from tests.support.units import environment as user_environment
from tests.support.waiting import wait_until
from topologies import torchrun
from topologies.crew import Crew, serving
from topologies.describe.topology import build, load
from topologies.kernel.links import MGMT_INTERFACE
from topologies.lab import Lab

FOLDER = Path(__file__).parents[2] / "deploy" / "slurm"
SCRIPTS = sorted(FOLDER.iterdir())
RESUMED = "resumed from the shadow nodes"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def program(folder: Path, name: str, *lines: str) -> None:
    (file := folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}", "CHECKMATE_JOB": "gpt.yaml", **more}


def test_trainers_start_as_everywhere(tmp_path: Path) -> None:
    program(tmp_path, "torchrun", 'printf "%s\\n" "$@"')
    variables = environment(
        tmp_path,
        GLOO_SOCKET_IFNAME="lo",
        SLURM_STEP_NUM_NODES="2",
        SLURM_NODEID="1",
        SLURM_JOB_ID="7",
        SLURM_RESTART_COUNT="1",
    )
    command = [str(FOLDER / "trainer.sh"), "gpu0", "train.py", "--epochs", "2"]
    arguments = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    topology = load("single_tor")
    words = [str(word) for word in torchrun.command(topology, topology.trainers[0], [])]
    starter_options = {word.partition("=")[0] for word in words if word.startswith("--")} - {
        "--monitor-interval"
    }
    assert {word.partition("=")[0] for word in arguments[: len(starter_options)]} == starter_options
    assert {"--rdzv-conf=is_host=0", "--local-addr=127.0.0.1", "--rdzv-endpoint=gpu0:29400"} <= set(arguments)
    assert {"--rdzv-id=7.1", f"--max-restarts={torchrun.RESTARTS}"} <= set(arguments)
    assert arguments[len(starter_options) :] == ["train.py", "--epochs", "2"]
    del variables["CHECKMATE_JOB"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode and "CHECKMATE_JOB: name the job file" in result.stderr


def test_trainers_recover_in_place_if_they_are_told(tmp_path: Path) -> None:
    program(tmp_path, "checkmate", 'printf "%s\\n" "$@"')
    variables = environment(
        tmp_path, GLOO_SOCKET_IFNAME="lo", SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1", IN_PLACE="1"
    )
    command = [str(FOLDER / "trainer.sh"), "gpu0", "train.py", "--epochs", "2"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    arguments = ["launch", "--nnodes=2", "--node-rank=1", "--spare", "--", "train.py", "--epochs", "2"]
    assert result.stdout.splitlines() == arguments


def test_a_shadow_node_is_started_again_until_it_is_told_to_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program(
        tmp_path, "checkmate", f'echo "$@" >> {log}', f"[ $(wc -l < {log}) -gt 1 ] || exit 1", "exec sleep 60"
    )
    process = subprocess.Popen([FOLDER / "shadow.sh"], env=environment(tmp_path))
    try:
        wait_until(lambda: log.exists() and log.read_text().count("\n") == 2, "started again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert log.read_text() == "shadow --no-view gpt.yaml\n" * 2


def test_a_drained_shadow_node_that_is_stopped_is_started_again(tmp_path: Path) -> None:
    """It ends with status 0 on its own SIGTERM, and comes back empty, to be seeded."""
    log = tmp_path / "log"
    program(tmp_path, "checkmate", f"echo $$ >> {log}", "trap 'exit 0' TERM", "sleep 60 & wait")
    process = subprocess.Popen([FOLDER / "shadow.sh"], env=environment(tmp_path), start_new_session=True)
    try:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "started")
        os.kill(int(log.read_text()), signal.SIGTERM)
        wait_until(lambda: log.read_text().count("\n") == 2, "started again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_between_two_starts_a_sigterm_ends_the_script_with_status_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program(tmp_path, "checkmate", "exit 1")
    program(tmp_path, "sleep", f"echo >> {log}", "exec /bin/sleep 1")
    process = subprocess.Popen([FOLDER / "shadow.sh"], env=environment(tmp_path))
    try:
        wait_until(log.exists, "between two starts")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()


def test_a_shadow_node_with_bad_input_is_not_started_again(tmp_path: Path) -> None:
    program(tmp_path, "checkmate", "exit 2")
    result = subprocess.run([FOLDER / "shadow.sh"], env=environment(tmp_path), timeout=10, check=False)
    assert result.returncode == 2


def test_components_of_the_heterogeneous_job_are_those_of_the_separate_jobs() -> None:
    def options(name: str) -> list[set[str]]:
        text = (FOLDER / name).read_text()
        parts = re.split(r"^#SBATCH hetjob$", text, flags=re.MULTILINE)
        return [set(re.findall(r"^#SBATCH (--\S+)$", part, re.MULTILINE)) for part in parts]

    trainers, shadow = options("together.sbatch")
    assert [trainers] == options("train.sbatch")
    assert "--requeue" in trainers
    (alone,) = options("shadow.sbatch")
    assert alone - shadow == {
        "--job-name=checkmate-shadow",
        "--time=UNLIMITED",
        "--no-kill",
        "--no-requeue",
    }
    assert shadow <= alone


@pytest.fixture
def cluster(name: str) -> Iterator[tuple[Lab, Cluster, Path]]:
    """Yield a lab with a controller, Slurm on its hosts, and a folder with the scripts, without GPUs."""
    lab = Lab(build("slurm", on_one_switch(2, [1, 1], replicas=2)), name=name)
    with lab, Crew(lab) as crew, serving(crew):
        names = {"rank0": "gpu0", "rank1": "gpu1", "shadow0": "cpu0", "shadow1": "cpu1"}
        slurm_cluster = Cluster(lab, crew, names)
        folder = lab.directory / "submit"
        shutil.copytree(FOLDER, folder)
        for script in folder.glob("*.sbatch"):
            script.write_text(script.read_text().replace("#SBATCH --gpus-per-node=8\n", ""))
        yield lab, slurm_cluster, folder


def submit(lab: Lab, cluster: Cluster, folder: Path, script: str, *words: str) -> str:
    """Submit a script; return the job's number. What it says is in `NUMBER.out`."""
    variables = {
        "CHECKMATE_JOB": str(lab.job_file),
        "GLOO_SOCKET_IFNAME": MGMT_INTERFACE,
        "RANKS_PER_HOST": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    answer = cluster.run(
        "sbatch", "--parsable", "--output=%j.out", script, *words, folder=folder, **variables
    )
    assert answer.strip().isdigit(), answer
    return answer.strip()


def training(folder: Path, iterations: int) -> list[str]:
    words = ["-m", "checkmate.examples.gpt.train", "--iterations", str(iterations)]
    return [*words, "--out", str(folder / "out"), "--width", "32", "--heads", "2", "--layers", "1"]


@needs_root
@needs_clang
@needs_root
@pytest.mark.timeout(200)
def test_copies_by_hosts_need_neither_starter_nor_root() -> None:
    """Both scripts as an ordinary user, and a script that trains until it is done."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, NOBODY, NOBODY)
        (folder / "bin").mkdir()
        for command, module in (("checkmate", "checkmate.cli.entry"), ("torchrun", "torch.distributed.run")):
            program(folder / "bin", command, f'exec {python()} -m {module} "$@"')
        nodes = [{"id": 0, "mgmt": f"127.0.0.1:{free_port()}"}]
        job = {"job": "gpt", "copies": "host", "ranks": 2, "shadow_nodes": nodes}
        (folder / "gpt.yaml").write_text(yaml.safe_dump(job))
        variables = {
            **user_environment(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CHECKMATE_JOB": str(folder / "gpt.yaml"),
            "CHECKMATE_INSECURE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANKS_PER_HOST": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "7",
        }
        with (folder / "shadow.log").open("wb") as log:
            node = subprocess.Popen([*USER, FOLDER / "shadow.sh"], env=variables, stdout=log, stderr=log)
        try:
            wait_until(lambda: "ready" in (folder / "shadow.log").read_text(), "a node that serves", 60)
            script = ["-m", "checkmate.examples.complete", "--iterations", "5"]
            result = subprocess.run(
                [*USER, FOLDER / "trainer.sh", "127.0.0.1", *script],
                env=variables,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            node.terminate()
            assert node.wait(20) == 0
    assert result.returncode == 0, result.stdout + result.stderr
    assert "shadow nodes 0 follow DP group 0, from iteration 0 on" in result.stderr


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_queued_again_resumes_from_shadow_nodes_of_another(
    cluster: tuple[Lab, Cluster, Path],
) -> None:
    lab, slurm, folder = cluster
    nodes = submit(lab, slurm, folder, "shadow.sbatch")
    output = folder / f"{nodes}.out"
    wait_until(lambda: output.exists() and output.read_text().count("ready: shadow node") == 2, "ready")
    job = submit(lab, slurm, folder, "train.sbatch", *training(folder, 4000))
    log = folder / f"{job}.out"
    wait_until(lambda: log.exists() and "follow DP group 0" in log.read_text(), "protected", 120)
    wait_until(lambda: "iteration 10: loss" in log.read_text(), "trained")
    assert RESUMED not in log.read_text()
    assert slurm.run("scontrol", "requeue", job) == ""
    wait_until(lambda: RESUMED in log.read_text(), "resumed", 150)
    (first,) = re.findall(r"iteration (\d+) comes next", log.read_text())
    assert int(first) >= 10
    assert "Restarts=1 " in slurm.run("scontrol", "show", "job", job)
    assert slurm.state(nodes) == slurm.state(job) == "RUNNING"
    slurm.run("scancel", job, nodes)
    wait_until(lambda: "COMPLETING" not in slurm.run("squeue", "-h", "-o", "%T"), "ended")


@needs_root
@needs_clang
@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_heterogeneous_job_trains_and_ends_its_shadow_nodes(cluster: tuple[Lab, Cluster, Path]) -> None:
    lab, slurm, folder = cluster
    job = submit(lab, slurm, folder, "together.sbatch", *training(folder, 20))
    log = folder / f"{job}.out"
    wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), "ended", 150)
    assert slurm.state(job) == "COMPLETED", log.read_text()
    assert log.read_text().count("ready: shadow node") == 2
    assert "follow DP group 0" in log.read_text()
    assert log.read_text().count(": loss ") == 20
    assert RESUMED not in log.read_text()
