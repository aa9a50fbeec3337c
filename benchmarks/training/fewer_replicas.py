"""Going on with fewer replicas, and taking one back, beside a recovery in place with a warm spare.

Over loopback, with copies by hosts. A rank is killed again and again. In one job it has to be replaced; in
the other, the ranks go on without it after a second, which is less than a new process takes to come.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml
from rich.progress import Progress

from benchmarks.figures import Figure, Result, spread95
from testbed.ports import free_port

TITLE: Final = "Fewer replicas: stops of a GPT of 5 million parameters on 3 ranks, copies by hosts"
KILLS: Final = 12
RANKS: Final = 3
WAIT: Final = 1
_APART: Final = 6
_SECONDS: Final = 120.0
_POLL: Final = 0.002


def measure() -> list[Result]:
    """Return every figure of this module, with a sample for each kill."""
    lost: list[float] = []
    back: list[float] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("fewer replicas", total=2 * KILLS)
        with LoopbackTraining({"min_replicas": RANKS - 1, "replacement_seconds": WAIT}, []) as partial:
            for number in range(KILLS):
                stops = partial.kill(1 + number % (RANKS - 1), stops=2)
                lost.append(stops[0] - WAIT)
                back.append(stops[1])
                bar.advance(task)
            repeated = partial.repeated()
        with LoopbackTraining({}, ["--spare"]) as whole:
            recovered = [whole.kill(1 + number % (RANKS - 1), stops=1)[0] for number in range(KILLS)]
            bar.advance(task, KILLS)
    ratio = tuple(a / b for a, b in zip(back, recovered, strict=True))
    return [
        Figure(f"a rank is lost: stop of the others, beyond the wait of {WAIT} s", tuple(lost), "s"),
        Figure("it is back: stop of the others", tuple(back), "s"),
        Figure("recovery in place with a warm spare: stop of the others", tuple(recovered), "s"),
        Figure(f"back / recovery in place; {spread95(ratio)}", ratio, "", 1.0, 1.0, smaller=True),
        Figure("completed iterations repeated, of one loss and return each", (repeated / KILLS,), ""),
    ]


class LoopbackTraining(contextlib.ExitStack):
    """A node and ranks under `checkmate launch`, on this machine's loopback interface. A context manager."""

    def __init__(self, settings: dict[str, Any], options: list[str]) -> None:
        """Write the job file.

        Args:
            settings: What the job file has beside ranks and nodes.
            options: Those of `checkmate launch`.
        """
        super().__init__()
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="checkmate-bench-")))
        self._job, self._options = self._folder / "job.yaml", options
        self._lines: list[tuple[float, int]] = []
        """The times at which rank 0 has completed iterations, and these."""
        self._read_lines = 0
        node = {"id": 0, "mgmt": f"127.0.0.1:{free_port()}"}
        data = {"job": "bench", "copies": "host", "ranks": RANKS, "shadow_nodes": [node], **settings}
        self._job.write_text(yaml.safe_dump(data))

    def __enter__(self) -> LoopbackTraining:
        try:
            node = self._start("node", "shadow", str(self._job), "--id", "0")
            self._await(node, "node", lambda: "ready" in self._output("node"))
            script = ["-m", "checkmate.examples.gpt.train", "--iterations", "1000000", "--in-place"]
            script += ["--batch", "4", "--out", str(self._folder)]
            self._ranks = self._start("ranks", "launch", *self._options, "--", *script)
            self._await(self._ranks, "ranks", lambda: self._count(0) > 3 * _APART)
        except BaseException:
            self.close()
            raise
        return self

    def kill(self, rank: int, stops: int) -> list[float]:
        """Kill a rank, and return the seconds of the longest gaps between iterations of rank 0, in order.

        Args:
            rank: Its number in the whole job, which is not 0.
            stops: How many gaps to wait for: one of the loss, and perhaps one of the return.
        """
        self._watch(lambda: len(self._lines) >= self._read_lines + _APART)
        before = len(self._restarts())
        self._terminate(rank)
        self._watch(lambda: len(self._restarts()) >= before + stops)
        count = len(self._lines)
        self._watch(lambda: len(self._lines) > count + 1)
        first = self._read_lines
        self._read_lines = len(self._lines)
        result = []
        for iteration in self._restarts()[before : before + stops]:
            number = max(n for n in range(first, self._read_lines) if self._lines[n][1] == iteration)
            result.append(self._lines[number][0] - self._lines[number - 1][0])
        return result

    def _restarts(self) -> list[int]:
        """Return the iterations with which ranks have begun again."""
        return [int(text) for text in re.findall(r"iteration (\d+) comes next", self._output("ranks"))]

    def _watch(self, is_there: Callable[[], bool]) -> None:
        """Note rank 0's iterations and their times until a condition is true."""
        deadline = time.monotonic() + _SECONDS
        while not is_there():
            if self._ranks.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the ranks failed:\n{self._output('ranks')[-5000:]}")
            lines = (self._folder / "rank0.jsonl").read_text().splitlines()
            now = time.monotonic()
            self._lines += [(now, int(json.loads(line)["iteration"])) for line in lines[len(self._lines) :]]
            time.sleep(_POLL)

    def repeated(self) -> float:
        """Return how many completed iterations were repeated."""
        lines = (self._folder / "rank0.jsonl").read_text().splitlines()
        return float(len(lines) - len({json.loads(line)["iteration"] for line in lines}))

    def _terminate(self, rank: int) -> None:
        """Kill a rank's newest process."""
        start = f"rank {rank} is process"
        starts = [line for line in self._output("ranks").splitlines() if start in line]
        os.kill(int(starts[-1].split()[-1]), 9)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        more = {"CHECKMATE_JOB": str(self._job), "CHECKMATE_INSECURE": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "checkmate.cli.entry", *arguments],
                env={**os.environ, **more},
                stdout=log,
                stderr=log,
            )
        self.callback(process.wait)
        self.callback(process.terminate)
        return process

    def _output(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _count(self, rank: int) -> int:
        file = self._folder / f"rank{rank}.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _await(self, process: subprocess.Popen[bytes], name: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not is_there():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the {name} failed:\n{self._output(name)}")
            time.sleep(0.1)
