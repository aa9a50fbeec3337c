"""A lab whose processes are forked by a server with all imports done: a start takes a twentieth of a second.

They are normal processes, with their own namespace and cgroup, that can be killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from pyroute2 import netns

from topologies.kernel import namespaces
from topologies.lab import Lab

_PRELOADED: Final = """
torch numpy torch.distributed torch.nn.parallel torch.optim pyroute2
checkmate.training.protect checkmate.cli.main checkmate.shadow.process checkmate.shadow.view
controlplane.serve softswitch.process tests.chaos.model
torch.distributed.fsdp checkmate.training.model.fsdp checkmate.training.gradients.fsdp_hooks
topologies.training.in_rank topologies.training.verdict
"""
_MODULE: Final = [sys.executable, "-m"]


class Forked:
    """A process forked by a server, with the used part of the interface of `subprocess.Popen`."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, -n after signal n; `None` while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired` on timeout."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # the server has waited for it, and says so soon
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedLab(Lab):
    """A lab that forks Python modules (`[sys.executable, "-m", ...]`), and starts other commands normally."""

    _context: Any = None

    def __enter__(self) -> ForkedLab:
        self.up()
        return self

    def switch_process(self, name: str) -> subprocess.Popen[bytes]:
        """Return the process of a running switch."""
        return self._processes[name]

    @classmethod
    def serve(cls) -> None:
        """Start the server, in this process's environment."""
        cls._context = multiprocessing.get_context("forkserver")
        cls._context.set_forkserver_preload(_PRELOADED.split())

    def start(
        self,
        node: str,
        argv: Sequence[str | Path],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        cpus: Collection[int] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process, like `Lab.start`."""
        words = [str(word) for word in argv if word != "-P"]
        if words[:2] != _MODULE or isinstance(stdout, int):
            return super().start(
                node, argv, stdin=stdin, stdout=stdout, stderr=stderr, environment=environment, cpus=cpus
            )
        groups = None
        if self._cgroup is not None:
            folder = Path(self._cgroup, node)
            folder.mkdir(exist_ok=True)
            groups = str(folder / "cgroup.procs")
        files = [
            getattr(file, "name", os.devnull)
            for file in (stdout, stdout if stderr == subprocess.STDOUT else stderr)
        ]
        variables = {"CHECKMATE_JOB": str(self.job_file_at(node)), **(environment or {})}
        process = self._context.Process(
            target=_become, args=(self.namespace(node), groups, files, variables, words[2:])
        )
        process.start()
        return cast("subprocess.Popen[bytes]", Forked(process))


def _become(
    namespace: str,
    group: str | None,
    files: Sequence[str],
    variables: Mapping[str, str],
    words: Sequence[str],
) -> None:
    """Run a module like `python -m`, in the forked process."""
    os.setsid()
    if group is not None:
        Path(group).write_text(str(os.getpid()))
    netns.setns(str(namespaces.FOLDER / namespace), flags=0)
    for number, file in zip((1, 2), files, strict=True):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(variables)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
