"""A training that one shadow node follows in a process of its own, which can be measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import yaml
from rich.progress import track

from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from checkmate.keys.roles import Role
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from testbed.copies import Copies
from testbed.jobs import keys_of
from testbed.small_training import SmallTraining

SHAPES: Final = ((1024, 2048),) * 12
ITERATIONS: Final = 8
_WAIT_SECONDS: Final = 120.0


class Forgetful(SmallTraining):
    """A training that keeps only its newest state."""

    def _note(self) -> None:
        self.states.clear()
        super()._note()


def train_with_node(job: Job) -> tuple[Forgetful, int, list[int]]:
    """Train with node 0 following.

    Returns:
        The training, and the process's resident bytes without state and after each step.
    """
    keys = keys_of(job, Role.READER)
    with node(job), open_channel(job, 0, keys) as channel, contextlib.ExitStack() as stack:
        stub = ShadowStub(channel)
        empty = status(stub, job).memory_bytes
        copies = Copies(job)
        stack.callback(copies.close)
        training = Forgetful(job, copies, shapes=SHAPES)
        stack.callback(training.close)
        training.begin([0])
        for parameter in training.layout.of_shard(0):
            training.seed(0, 0, [parameter])
        wait(lambda: status(stub, job).holds[0].live)
        resident = []
        for iteration in track(range(ITERATIONS), "iterations", transient=True):
            training.iterate()
            wait(lambda: status(stub, job).holds[0].stepped == iteration)  # noqa: B023
            resident.append(status(stub, job).memory_bytes)
    return training, empty, resident


@contextlib.contextmanager
def node(job: Job) -> Iterator[None]:
    """Yield the job's shadow node 0, as a process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(yaml.safe_dump(data_of(job, exclude_none=True)))
        command = [sys.executable, "-m", "checkmate.cli.entry", "shadow", str(file), "--id", "0", "--no-view"]
        command += ["--insecure"] if job.keys is None else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout
            if not process.stdout.readline().startswith("ready"):
                raise RuntimeError("the shadow node did not start")
            yield
        finally:
            process.terminate()
            process.wait()


def status(stub: ShadowStub, job: Job) -> pb.NodeStatus:
    """Return the node's status."""
    return stub.Status(pb.StatusRequest(protocol=PROTOCOL, job=job.job), timeout=10)


def wait(condition: Callable[[], bool]) -> None:
    """Poll a condition; raise `TimeoutError` after two minutes."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the shadow node does not follow")
        time.sleep(0.02)
