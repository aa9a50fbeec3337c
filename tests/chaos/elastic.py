"""Random jobs that restart with other ranks, and are killed at any moment.

A job of copies by hosts on this machine's loopback interface goes through several starts, each with a mesh of
its own. All of its ranks are killed at some moment, perhaps before they train; a shadow node may be killed or
stopped. Each rank notes a digest of the whole model, optimizer state included, after each iteration and after
`restore`. The job passes if each start has resumed with the digest of the iteration before, by whichever
mesh, and has repeated one completed iteration at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from testbed.ports import free_port

MESHES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "ddp-1": (1, {"ranks": 1}),
    "ddp-2": (2, {"ranks": 2}),
    "ddp-3": (3, {"ranks": 3}),
    "fsdp-2": (2, {"mesh": {"dp_shard": 2}}),
    "fsdp-3": (3, {"mesh": {"dp_shard": 3}}),
    "hsdp-4": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
}
"""Ranks, and what a job file says of them."""
ITERATIONS: Final = 80
_READY_SECONDS: Final = 60.0
_START_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Start:
    """A start of training, and what happens in it. Times in seconds since it began."""

    mesh: str
    kill_at: float | None
    """When all ranks are killed; `None`: they train to the end."""
    node: int = 0
    node_at: float | None = None
    """When something happens to a shadow node."""
    stopped: float = 0.0
    """For how long it is stopped; 0: it is killed, and started again at once."""


def draw(seed: int) -> list[Start]:
    """Return the starts of a seed. A node is killed in one of them at most, because there are two."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    killing = rng.randrange(2 * count)
    starts: list[Start] = []
    for number in range(count):
        # Half of all kills come while ranks restore, and nodes go from one mesh to the other.
        kill_at = None if number == count - 1 else rng.choice([rng.uniform(6, 10), rng.uniform(10, 14)])
        node_at, stopped = None, 0.0
        if number == killing:
            node_at = rng.uniform(6, 12)
        elif rng.random() < 0.3:
            node_at, stopped = rng.uniform(6, 12), rng.uniform(0.2, 2.5)
        mesh = rng.choice([mesh for mesh in MESHES if not starts or mesh != starts[-1].mesh])
        starts.append(Start(mesh, kill_at, rng.randrange(2), node_at, stopped))
    return starts


@dataclass
class Trial:
    """One job through its starts. `problems` are empty if it has passed."""

    seed: int
    folder: Path
    starts: list[Start]
    problems: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run all starts."""
        addresses = [{"id": node, "mgmt": f"127.0.0.1:{free_port()}"} for node in range(2)]
        self._data = {"job": "elastic", "copies": "host", "replicas": 2, "shadow_nodes": addresses}
        self._file = self.folder / "job.yaml"
        self._write(self.starts[0].mesh)
        digests: dict[int, set[str]] = {}
        newest = -1
        with contextlib.ExitStack() as undo:
            self._nodes = [self._node(node) for node in range(2)]
            undo.callback(self._end_nodes)
            for number, start in enumerate(self.starts):
                self._write(start.mesh)
                self._train(number, start)
                newest = self._check(number, digests, newest)
        for node in range(2):
            text = (self.folder / f"node{node}.log").read_text()
            if "Traceback" in text:
                self.problems.append(f"node {node}: {text[text.index('Traceback') :][:500]}")
        if not self.problems and newest != ITERATIONS - 1:
            self.problems.append(f"it has ended with iteration {newest}")

    def _train(self, number: int, start: Start) -> None:
        ranks = MESHES[start.mesh][0]
        kind = start.mesh.partition("-")[0]
        (self.folder / str(number)).mkdir()
        torchrun = ["torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        script = [
            "-m",
            "tests.scripts.any_mesh",
            kind,
            str(self.folder / str(number)),
            str(ITERATIONS),
            "0.1",
        ]
        training = self._process(f"train{number}", [*torchrun, *script, "--digests"])
        began = time.monotonic()
        node_at, killed_at = start.node_at, start.kill_at
        while training.poll() is None:
            passed = time.monotonic() - began
            if node_at is not None and passed >= node_at:
                node_at = None
                self._strike(start)
            if killed_at is not None and passed >= killed_at:
                self._kill_all(number)
                break
            if passed > _START_SECONDS:
                self.problems.append(f"start {number} ({start.mesh}) has not ended in {_START_SECONDS:g} s")
                self._kill_all(number)
                break
            time.sleep(0.05)
        status = training.wait()
        if status > 0:
            self.problems.append(f"start {number} ({start.mesh}) failed:\n{self._errors(number)}")

    def _kill_all(self, number: int) -> None:
        """Kill a start's ranks, and torchrun first, which would say so."""
        folder = str(self.folder / str(number)).encode()
        processes = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                words = path.read_bytes().split(b"\0")
                if folder in words:
                    processes.append((b"torch.distributed.run" not in words, int(path.parent.name)))
        for _, process in sorted(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _strike(self, start: Start) -> None:
        node = self._nodes[start.node]
        if start.stopped:
            node.send_signal(signal.SIGSTOP)
            time.sleep(start.stopped)
            node.send_signal(signal.SIGCONT)
        else:
            node.kill()
            node.wait()
            self._nodes[start.node] = self._node(start.node)

    def _check(self, number: int, digests: dict[int, set[str]], newest: int) -> int:
        """Compare what the ranks of a start have noted; return the newest iteration that is completed."""
        completed = newest
        for file in sorted((self.folder / str(number)).glob("rank*.jsonl")):
            lines = []
            for text in file.read_text().splitlines():
                with contextlib.suppress(ValueError):  # torn by the kill
                    lines.append(json.loads(text))
            if not lines:
                continue
            begin, *rest = lines
            if begin["begin"] < newest:
                self.problems.append(
                    f"start {number}: {file.name} begins with {begin['begin']} after {newest}"
                )
            if begin["begin"] and begin["whole"] not in digests.get(begin["begin"] - 1, set()):
                self.problems.append(f"start {number}: {file.name} has another state at {begin['begin'] - 1}")
            if begin["begin"] == 0 and newest > 0:
                self.problems.append(f"start {number}: {file.name} begins from the start after {newest}")
            for line in rest:
                digests.setdefault(line["iteration"], set()).add(line["whole"])
                completed = max(completed, line["iteration"])
            self.words.append(f"start {number}: {file.name} {begin['begin']} to {completed}")
        return completed

    def _errors(self, number: int) -> str:
        text = (self.folder / f"train{number}.log").read_text(errors="replace")
        return "\n".join(
            [line for line in text.splitlines() if "Error" in line or "checkmate:" in line][-12:]
        )

    def _write(self, mesh: str) -> None:
        self._file.write_text(yaml.safe_dump({**self._data, **MESHES[mesh][1]}))

    def _node(self, number: int) -> subprocess.Popen[bytes]:
        log = self.folder / f"node{number}.log"
        ready = log.read_text().count("ready:") if log.exists() else 0
        process = self._process(
            f"node{number}", ["checkmate.cli.entry", "shadow", str(self._file), "--id", str(number)]
        )
        deadline = time.monotonic() + _READY_SECONDS
        while log.read_text().count("ready:") == ready:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"node {number} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return process

    def _end_nodes(self) -> None:
        for node in self._nodes:
            node.send_signal(signal.SIGCONT)
            node.terminate()
        for node in self._nodes:
            node.wait()

    def _process(self, name: str, module: list[str]) -> subprocess.Popen[bytes]:
        more = {"CHECKMATE_JOB": str(self._file), "CHECKMATE_INSECURE": "1", "OMP_NUM_THREADS": "1"}
        more |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *module],
                env={**os.environ, **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextlib.contextmanager
def trial_of(seed: int) -> Iterator[Trial]:
    """Yield the outcome of a seed."""
    with tempfile.TemporaryDirectory(prefix="checkmate-elastic-") as folder:
        trial = Trial(seed, Path(folder), draw(seed))
        trial.run()
        yield trial


def main() -> int:
    """Run seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        epilog="example: --first 0 --count 20",
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10, help="how many")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.first, options.first + options.count):
        began = time.monotonic()
        with trial_of(seed) as trial:
            seconds = time.monotonic() - began
            print(f"seed {seed}, {seconds:.0f} s: {'; '.join(map(str, trial.starts))}", flush=True)
            for line in trial.problems or ["passed"]:
                print(f"  {line}", flush=True)
            failed += bool(trial.problems)
    print(f"{options.count} jobs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
