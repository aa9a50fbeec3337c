"""Runs a plan: undisturbed as a plain script, and with Checkmate, kills and restarts."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from checkmate.job.files import read_job
from checkmate.job.validation import data_of
from testbed.copies import local_job
from testbed.ports import free_port
from tests.script_fuzz.children import PRELOADED
from tests.script_fuzz.history import Attempt, History
from tests.script_fuzz.plan import Kill, ScriptPlan

ATTEMPT_SECONDS: Final = 30.0
"""Within which an attempt must end; a usual one takes half a second."""
_ALONE_SECONDS: Final = 2.0
"""How long a rank may live without the other one."""
_ENDING_SECONDS: Final = 5.0
_NODES_SECONDS: Final = 20.0


class HarnessError(RuntimeError):
    """A case without a verdict, because something else than Checkmate has failed."""


class Cases:
    """Runs cases in turn. A context manager; at its end no process is left."""

    def __init__(self, keep: Path | None = None) -> None:
        """Prepare the server from which processes are forked. `keep`: a folder for the files of cases."""
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._keep = keep
        self._number = 0
        self._stack = ExitStack()

    def __enter__(self) -> Cases:
        folder = tempfile.mkdtemp(prefix="script-fuzz-")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._folder = Path(folder)
        os.environ["XDG_CACHE_HOME"] = folder  # for jobs that were checked
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, plan: ScriptPlan) -> History:
        """Run a plan. Raise `HarnessError` if the plain script or the shadow nodes fail."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        try:
            with self._nodes(plan, folder) as (job, await_nodes):
                plain = self._attempt(plan, folder, "", 0, None)
                if plain.outcome != "ended":
                    raise HarnessError(f"the plain script: {plain.outcome}: {plain.why}\n{plain.output}")
                await_nodes()
                return History(plain, tuple(self._attempts(plan, folder, job)))
        finally:
            if self._keep is not None:
                shutil.copytree(folder, self._keep / f"{plan.seed}-{self._number}", ignore=_only_files)
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _nodes(self, plan: ScriptPlan, folder: Path) -> Iterator[tuple[str, Any]]:
        """Start the process with the shadow nodes; yield the job file, and what waits for them."""
        file = folder / "job.yaml"
        if plan.copies == "host":
            nodes = [{"id": node, "mgmt": f"127.0.0.1:{free_port()}"} for node in range(plan.nodes)]
            data = {"job": "fuzz", "copies": "host", "ranks": 2, "shadow_nodes": nodes}
            file.write_text(yaml.safe_dump(data))
            job = read_job(file)
        else:
            job = local_job(ranks=2, nodes=plan.nodes, nics=1)
            file.write_text(yaml.safe_dump(data_of(job, exclude_none=True)))
        reader, writer = self._context.Pipe(duplex=False)
        arguments = (job, str(folder / "switch"), str(folder / "nodes.out"), writer)
        process = self._context.Process(target=_serve, args=arguments)
        process.start()
        writer.close()

        def await_nodes() -> None:
            try:
                if reader.poll(_NODES_SECONDS) and reader.recv():
                    return
            except EOFError:
                pass
            raise HarnessError(f"the shadow nodes do not start: {_text(folder / 'nodes.out')}")

        try:
            yield str(file), await_nodes
        finally:
            _end(process)
            reader.close()

    def _attempts(self, plan: ScriptPlan, folder: Path, job: str) -> Iterator[Attempt]:
        """Start the ranks until they end well, or have failed too often."""
        kills, failures = list(plan.kills), 0
        before = None
        for number in range(len(plan.kills) + plan.restarts + 1):
            attempt = self._attempt(plan, folder, job, number, kills[0] if kills else None)
            yield attempt
            if attempt.outcome == "killed":
                kills.pop(0)
            elif attempt.outcome == "refused" and failures < plan.restarts and not _repeats(attempt, before):
                failures += 1
            else:
                return
            before = attempt

    def _attempt(self, plan: ScriptPlan, folder: Path, job: str, number: int, kill: Kill | None) -> Attempt:
        processes, names = [], []
        hung = False
        try:
            for rank in range(2):
                orders = (plan, rank, str(folder), number, job, kill)
                processes.append(self._context.Process(target=_run_rank, args=orders))
                processes[-1].start()
                names.append(folder / f"rank{rank}-{number if job else 'plain'}")
            hung = not _await_end(processes, kill)
        finally:
            for process in processes:
                _end(process)
        events = [event for name in names for event in _events(name.with_suffix(".jsonl"))]
        output = "\n".join(_text(name.with_suffix(".out")) for name in names)
        return Attempt.of(events, output, [process.exitcode for process in processes], hung=hung)


def _serve(*arguments: Any) -> None:
    from tests.script_fuzz.nodes import serve  # noqa: PLC0415 - in the forked process, which has torch

    serve(*arguments)


def _run_rank(*orders: Any) -> None:
    from tests.script_fuzz.rank import RankOrders, run_rank  # noqa: PLC0415 - as above

    run_rank(RankOrders(*orders))


def _repeats(attempt: Attempt, before: Attempt | None) -> bool:
    """Return whether an attempt was refused like the one before, in the same turn, as the next would be."""
    return before is not None and all(
        (repeated_attempt.outcome, repeated_attempt.why, repeated_attempt.reached)
        == ("refused", attempt.why, attempt.reached)
        for repeated_attempt in (before, attempt)
    )


def _await_end(processes: Sequence[Any], kill: Kill | None) -> bool:
    """Wait until the ranks end, and end those that outlive another one; return false if they hang."""
    deadline, alone = time.monotonic() + ATTEMPT_SECONDS, None
    while living := [process for process in processes if process.exitcode is None]:
        codes = [process.exitcode for process in processes if process.exitcode is not None]
        if alone is None and any(codes):
            lone = kill is None or kill.lone or -signal.SIGKILL not in codes
            alone = time.monotonic() + (_ALONE_SECONDS if lone else 0.0)
        remaining = min(deadline, alone or deadline) - time.monotonic()
        if remaining <= 0:
            if alone is None:
                _show_stacks(living)
            return alone is not None
        multiprocessing.connection.wait([process.sentinel for process in living], remaining)
    return True


def _show_stacks(processes: Sequence[Any]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _end(process: Any) -> None:
    process.kill()
    process.join(_ENDING_SECONDS)


def _events(file: Path) -> list[dict[str, Any]]:
    lines = _text(file).split("\n")[:-1]  # a killed rank's last line may be incomplete
    return [json.loads(line) for line in lines]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _only_files(folder: str, names: list[str]) -> list[str]:
    """Return what is not to be copied: sockets."""
    return [name for name in names if not Path(folder, name).is_file()]
