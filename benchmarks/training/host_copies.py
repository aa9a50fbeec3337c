"""Iteration time with copies by hosts and without Checkmate.

Twins take turns in the same processes, as in `benchmarks.training.twins`: a protected one, and two that are
plain PyTorch. Copies by hosts need no lab. Ranks share one core, and a shadow node has another.

Run as a module it is a rank: `python -m benchmarks.training.host_copies KIND`, and options of
`checkmate.examples.gpt.train`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
import yaml

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.training import twins
from checkmate.examples.gpt import train
from checkmate.examples.gpt.model import Gpt
from checkmate.output.consoles import progress, text_console
from checkmate.state import local_of
from checkmate.training.gradients.part_route import Channel
from testbed.ports import free_port
from topologies.training.record import TimedBlock

TITLE: Final = "Copies by hosts / plain PyTorch: a GPT of 5 million parameters, 4 ranks that share one core"
RANKS: Final = 4
STARTS, TURNS = 2, 40
_READY_SECONDS, _RUN_SECONDS = 60.0, 1800.0


class ShardedTwin(twins.GptTwin):
    """The same, sharded by `fully_shard` over all ranks, without replicas."""

    def wrap(self, model: Gpt, options: argparse.Namespace) -> torch.nn.Module:
        """Shard each block, and the rest."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - takes seconds
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        mesh = init_device_mesh(options.device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


OF_STATE: Final = "DDP, copies of AdamW's state"
"""A kind whose copies are of parameters and optimizer state."""
KINDS: Final[Mapping[str, tuple[type[twins.GptTwin], dict[str, Any]]]] = {
    "DDP over gloo": (twins.GptTwin, {"ranks": RANKS}),
    "FSDP without replicas": (ShardedTwin, {"mesh": {"dp_shard": RANKS}}),
    OF_STATE: (twins.GptTwin, {"ranks": RANKS}),
}
"""The twin of each kind of training, and its part of the job file."""


def measure() -> list[Result]:
    """Return every figure of this module."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [Skipped("iteration time with copies by hosts", "needs two cores")]
    results: list[Result] = []
    with progress(text_console(stderr=True)) as bar:
        task = bar.add_task("copies by hosts", total=len(KINDS) * STARTS * TURNS)
        for kind in KINDS:
            blocks: dict[str, list[TimedBlock]] = {}
            shares: list[float] = []
            for seed in range(STARTS):
                before = int(bar.tasks[0].completed)
                with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
                    race = _Race(Path(folder), kind, seed, cores)
                    timed = race.run(lambda turns: bar.update(task, completed=before + turns))  # noqa: B023
                    shares.append(race.share())
                for twin, more in timed.items():
                    blocks.setdefault(twin, []).extend(more)
            results += _results(kind, blocks)
            title = f"{kind}: bytes sent for copies / bytes of gradients"
            most = 3.03 if kind == OF_STATE else 1.01
            results.append(Figure(title, tuple(shares), "", most, most, smaller=True))
    return results


def _results(kind: str, blocks: Mapping[str, Sequence[TimedBlock]]) -> Iterator[Result]:
    protected, plain, control = ([block.seconds for block in blocks[twin]] for twin in twins.KINDS)
    pairs, same = ratios(protected, plain), ratios(control, plain)
    processor = ratios(*([block.processor for block in blocks[twin]] for twin in twins.KINDS[:2]))
    aim, limit = (None, None) if kind == OF_STATE else (1.01, 1.02)
    yield Figure(f"{kind}; {spread95(pairs)}", pairs, "", aim, limit, smaller=True)
    yield Figure(f"{kind}, control: a second plain twin; {spread95(same)}", same, "", smaller=True)
    yield Figure(f"{kind}, processor time; {spread95(processor)}", processor, "", smaller=True)
    yield Figure(f"{kind}, absolute: plain", tuple(plain), "s", smaller=True)


class _Race:
    """A start of training: a node on one core, and ranks on another, each with all twins of a kind."""

    def __init__(self, folder: Path, kind: str, seed: int, cores: Sequence[int]) -> None:
        """Write the job file."""
        self._folder, self._kind, self._seed = folder, kind, seed
        self._ranks_core, self._node_core, *_ = cores
        self._job = folder / "job.yaml"
        node = {"id": 0, "mgmt": f"127.0.0.1:{free_port()}"}
        data = {"job": "bench", "copies": "host", "shadow_nodes": [node], **KINDS[kind][1]}
        self._job.write_text(yaml.safe_dump(data))

    def run(self, show: Callable[[int], None]) -> Mapping[str, list[TimedBlock]]:
        """Return the blocks of each twin. Raise `RuntimeError` with the output of what fails."""
        node_command = ["-m", "checkmate.cli.entry", "shadow", str(self._job), "--id", "0"]
        options = ["--iterations", str(TURNS), "--seed", str(self._seed), "--batch", "8"]
        options += ["--out", str(self._folder)]
        ranks = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", "-m"]
        with self._process("node", node_command, self._node_core) as node:
            self._await(node, "node", lambda: "ready" in self._output("node"), _READY_SECONDS)
            command = [*ranks, "benchmarks.training.host_copies", self._kind, *options]
            with self._process("ranks", command, self._ranks_core) as training:

                def is_over() -> bool:
                    show(twins.turns(self._folder, RANKS))
                    return training.poll() == 0

                self._await(training, "ranks", is_over, _RUN_SECONDS)
        return twins.read(self._folder, RANKS, one_core=True)

    def share(self) -> float:
        """Return the bytes that all ranks gave their kernels for copies, for each byte of gradients."""
        files = [json.loads((self._folder / f"bytes{rank}.json").read_text()) for rank in range(RANKS)]
        gradients = [size for _, size in files]
        # FSDP's ranks have a shard each, and DDP's all have the same gradients.
        whole = sum(gradients) if "mesh" in KINDS[self._kind][1] else gradients[0]
        return float(sum(written for written, _ in files) / whole)

    @contextlib.contextmanager
    def _process(self, name: str, arguments: Sequence[str], core: int) -> Iterator[subprocess.Popen[bytes]]:
        more = {"CHECKMATE_JOB": str(self._job), "CHECKMATE_INSECURE": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["taskset", "--cpu-list", str(core), sys.executable, *arguments],
                env={**os.environ, **more},
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def _output(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _await(
        self, process: subprocess.Popen[bytes], name: str, is_there: Callable[[], bool], seconds: float
    ) -> None:
        """Wait for a condition. Raise `RuntimeError` if the process fails, or after a time."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if process.poll() or time.monotonic() > deadline:
                raise RuntimeError(f"{self._kind}: the {name} failed:\n{self._output(name)}")
            time.sleep(0.2)


def main() -> None:
    """Train one twin of each kind; write the time of each turn, and the bytes of copies, to --out."""
    kind = sys.argv.pop(1)
    options = train.parse()
    dist.init_process_group("gloo")
    make, models = KINDS[kind][0], []
    written = 0
    write = Channel.write

    def count(channel: Channel, data: memoryview) -> int:
        nonlocal written
        nbytes = write(channel, data)
        written += nbytes
        return nbytes

    def make_twin() -> twins.GptTwin:
        twin = make(options)
        models.append(twin.model)
        return twin

    with mock.patch.object(Channel, "write", count):
        follow = "state" if kind == OF_STATE else "auto"
        turns = twins.race(options, make_twin, stock=True, follow=follow)
    gradients = sum(local_of(parameter).nbytes for parameter in models[0].parameters())
    (options.out / f"bytes{dist.get_rank()}.json").write_text(json.dumps([written, turns * gradients]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
