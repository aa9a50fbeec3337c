"""Copies by hosts, as an ordinary user on one machine: no switch, no capability, no compiler."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import yaml

from testbed.ports import free_port
from tests.scripts.any_optimizer import OPTIMIZERS, optimizers_of
from tests.scripts.host_copies import PAUSED_AT
from tests.support.documents import check_document
from tests.support.units import NOBODY, USER, environment, python
from tests.support.waiting import wait_until

RANKS, ITERATIONS, KILLED_AT = 4, 24, 9
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder of the user's, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


class LoopbackJob:
    """A job of one machine's processes, as an ordinary user."""

    def __init__(self, folder: Path, kind: str, **job: Any) -> None:
        """Write its file, and make its keys."""
        self.folder, self.kind = folder, kind
        self.iterations = ITERATIONS
        self._nodes: list[subprocess.Popen[bytes]] = []
        nodes = [{"id": node, "mgmt": f"127.0.0.1:{free_port()}"} for node in range(2)]
        data = {"job": "mine", "copies": "host", "shadow_nodes": nodes, **job}
        self.file = folder / "job.yaml"
        self.file.write_text(yaml.safe_dump(data))
        self._environment = {
            **(users := environment(folder)),
            "PYTHONPATH": os.pathsep.join([users["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]),
            "CHECKMATE_JOB": str(self.file),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.command("keys", str(self.file))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `checkmate` to its end, which must be well."""
        argv = [*USER, python(), "-m", "checkmate.cli.entry", *arguments]
        result = subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, check=False, cwd=self.folder
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `python -m ARGUMENTS`, with its output in a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*USER, python(), "-m", *arguments],
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def log(self, name: str) -> str:
        """Return a process's output so far."""
        return (self.folder / f"{name}.log").read_text()

    @contextlib.contextmanager
    def nodes(self) -> Iterator[None]:
        """Run the shadow nodes."""
        names = [f"shadow{node}" for node in range(2)]
        self._nodes = processes = [
            self.start(name, "checkmate.cli.entry", "shadow", str(self.file), "--id", name[-1])
            for name in names
        ]
        try:
            wait_until(lambda: all("ready" in self.log(name) for name in names), "nodes to serve")
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait(20)

    def node_process(self, node: int) -> subprocess.Popen[bytes]:
        """Return a shadow node's process."""
        return self._nodes[node]

    def train(self, name: str, seconds: float = 0.0) -> subprocess.Popen[bytes]:
        """Start torchrun; its ranks write to the folder NAME."""
        results = self.folder / name
        results.mkdir(exist_ok=True)
        (results / "pause").touch()
        os.chown(results, NOBODY, NOBODY)
        script = ["tests.scripts.host_copies", self.kind, str(results), str(self.iterations), str(seconds)]
        if self.kind.startswith("alone"):
            return self.start(name, *script)
        options = [f"--nproc-per-node={RANKS}", "--standalone", "--max-restarts=10", "--monitor-interval=0.1"]
        return self.start(name, "torch.distributed.run", *options, "-m", *script)

    def launch(
        self, name: str, seconds: float = 0.0, *options: str, keep: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start `checkmate launch`; its ranks write to the folder NAME, and recover in place."""
        (results := self.folder / name).mkdir(exist_ok=True)
        os.chown(results, NOBODY, NOBODY)
        script = [
            "-m",
            "tests.scripts.host_copies",
            self.kind,
            str(results),
            str(self.iterations),
            str(seconds),
        ]
        return self.start(
            name, "checkmate.cli.entry", "launch", *options, "--", *script, "keep" if keep else "in-place"
        )

    def example(self, name: str, module: str, *options: str) -> subprocess.Popen[bytes]:
        """Start torchrun with an example of ours; its ranks write to the folder NAME."""
        (results := self.folder / name).mkdir()
        os.chown(results, NOBODY, NOBODY)
        torchrun = ["--nproc-per-node=2", "--standalone", "--max-restarts=10", "--monitor-interval=0.1"]
        script = ["-m", f"checkmate.examples.{module}", "--out", str(results), *options]
        return self.start(name, "torch.distributed.run", *torchrun, *script)

    def lines(self, name: str, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has noted of its iterations."""
        file = self.folder / name / f"rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def last_rank(processes: subprocess.Popen[bytes]) -> int:
    """Return the process id of a rank of a torchrun."""
    children = Path(f"/proc/{processes.pid}/task/{processes.pid}/children").read_text().split()
    return int(children[-1])


def check_lines(job: LoopbackJob, rank: int) -> None:
    """Fail unless a rank's losses are those of the undisturbed run, with at most one iteration repeated."""
    expected = {line["iteration"]: line for line in job.lines("undisturbed", rank)}
    lines = job.lines("killed", rank)
    assert len(lines) - ITERATIONS <= 1, "one iteration is repeated at most"
    assert lines[-1]["begin"] >= KILLED_AT
    assert [expected[line["iteration"]]["loss"] for line in lines] == [line["loss"] for line in lines]
    assert lines[-1]["count"] == ITERATIONS


JOBS: Final[dict[str, dict[str, Any]]] = {
    "ddp": {"ranks": RANKS, "replicas": 2},
    "fsdp": {"mesh": {"dp_shard": RANKS}, "replicas": 2},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "bare": {"ranks": RANKS},
    "gan": {"ranks": RANKS},
    "hooked": {"ranks": RANKS},
    "mixed": {"mesh": {"dp_shard": RANKS}},
    "zero": {"mesh": {"dp_shard": RANKS}},
    "tensor": {"mesh": {"dp_shard": 2, "tp": 2}},
}


COPIED: Final = [
    *(f"ddp-{optimizer}" for optimizer in OPTIMIZERS),
    *("fsdp-muon", "fsdp-lion", "hsdp-adopt", "zero-adopt", "tensor-lion", "bare-soap", "mixed-copied"),
]
"""Kinds with an optimizer whose state is copied."""
SLOW: Final = [kind for kind in (*JOBS, *COPIED) if kind not in ("ddp", "ddp-muon")]


def installed(optimizer: str) -> None:
    """Skip the test if the optimizer's package is missing."""
    try:
        if optimizer in OPTIMIZERS:
            optimizers_of(optimizer, list(torch.nn.Linear(2, 2).parameters()))
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp-muon", *SLOW))]
)
def test_a_killed_rank_resumes_bit_for_bit(folder: Path, kind: str) -> None:
    model, _, optimizer = kind.partition("-")
    installed(optimizer)
    job = LoopbackJob(folder, kind, **JOBS[model])
    with job.nodes():
        undisturbed = job.train("undisturbed")
        (job.folder / "undisturbed" / "pause").unlink()
        assert undisturbed.wait(120) == 0, job.log("undisturbed")
        job.command("reset", "--yes")
        killed = job.train("killed", seconds=0.2)
        wait_until(lambda: len(job.lines("killed", 0)) > PAUSED_AT, "iterations")
        document = json.loads(job.command("status", "--wait", "--json").stdout)
        check_document("status", document)
        holds = [hold for node in document["nodes"]["mine"].values() for hold in node["holds"]]
        assert [(hold["live"], hold["left_out"]) for hold in holds] == [(True, 0)] * len(holds)
        assert "copies by hosts" in job.command("status").stdout
        (job.folder / "killed" / "pause").unlink()
        wait_until(lambda: len(job.lines("killed", 0)) > KILLED_AT, "iterations")
        os.kill(last_rank(killed), signal.SIGKILL)
        assert killed.wait(120) == 0, job.log("killed")
    for rank in range(RANKS):
        check_lines(job, rank)
    assert ("is copied, because shadow nodes do not repeat its steps" in job.log("killed")) == bool(optimizer)
    assert "Traceback" not in job.log("shadow0") + job.log("shadow1")


@pytest.mark.slow
def test_what_a_script_does_after_its_loop_is_not_copied(folder: Path) -> None:
    job = LoopbackJob(folder, "alone-lion", ranks=1)
    installed("lion")
    with job.nodes():
        training = job.train("undisturbed")
        (job.folder / "undisturbed" / "pause").unlink()
        assert training.wait(60) == 0, job.log("undisturbed")
        job.command("consolidate", str(job.file), "--format", "torch", "--out", str(folder / "end"))
    (file,) = [file for file in folder.glob("end*") if file.suffix == ".pt" or file.is_file()]
    model = torch.load(file)["model"]
    expected = torch.load(folder / "undisturbed" / "end0.pt")
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


def test_a_script_of_one_process_resumes(folder: Path) -> None:
    """The reader's first script needs neither torchrun nor a process group, nor a wrapper."""
    job = LoopbackJob(folder, "alone", ranks=1)
    with job.nodes():
        undisturbed = job.train("undisturbed")
        (job.folder / "undisturbed" / "pause").unlink()
        assert undisturbed.wait(60) == 0, job.log("undisturbed")
        job.command("reset", "--yes")
        killed = job.train("killed", seconds=0.1)
        (job.folder / "killed" / "pause").unlink()
        wait_until(lambda: len(job.lines("killed", 0)) > KILLED_AT, "iterations")
        killed.kill()
        killed.wait()
        assert job.train("killed").wait(60) == 0, job.log("killed")
    check_lines(job, 0)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["accelerated", "lightning", "huggingface", "complete", "resnet"])
def test_examples_run_unchanged_and_resume(folder: Path, example: str) -> None:
    """A rank is killed at some iteration; both runs have the same losses, to the bit."""
    libraries = {"accelerated": "accelerate", "lightning": "lightning", "huggingface": "transformers"}
    pytest.importorskip(libraries.get(example, "torch"))
    job = LoopbackJob(folder, "ddp", ranks=2)
    with job.nodes():
        undisturbed = job.example("undisturbed", example, "--iterations", "40")
        assert undisturbed.wait(200) == 0, job.log("undisturbed")
        job.command("reset", "--yes")
        killed = job.example("killed", example, "--iterations", "40")
        wait_until(lambda: len(job.lines("killed", 0)) > KILLED_AT + 3, "iterations", 120)
        os.kill(last_rank(killed), signal.SIGKILL)
        assert killed.wait(200) == 0, job.log("killed")
        assert "resumed from the shadow nodes" in job.log("killed")
    for rank in range(2):
        expected = {line["iteration"]: line["loss"] for line in job.lines("undisturbed", rank)}
        losses = [(line["iteration"], line["loss"]) for line in job.lines("killed", rank)]
        assert len(expected) == 40
        assert len(losses) <= 41, "one iteration is repeated at most"
        assert {iteration: expected[iteration] for iteration, _ in losses} == dict(losses) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("example", "epoch"), [("accelerated", 20), ("lightning", 10)])
def test_examples_go_on_after_the_end_of_an_epoch(folder: Path, example: str, epoch: int) -> None:
    pytest.importorskip({"accelerated": "accelerate"}.get(example, example))
    job = LoopbackJob(folder, "ddp", ranks=2)
    with job.nodes():
        for name, iterations in (("undisturbed", 2 * epoch), ("first", epoch), ("second", 2 * epoch)):
            training = job.example(name, example, "--iterations", str(iterations))
            assert training.wait(200) == 0, job.log(name)
            if name == "undisturbed":
                job.command("reset", "--yes")
    expected = [line["loss"] for line in job.lines("undisturbed", 1)]
    both = [job.lines(name, 1) for name in ("first", "second")]
    assert [line["iteration"] for lines in both for line in lines] == [*range(2 * epoch)]
    assert [line["loss"] for lines in both for line in lines] == expected
