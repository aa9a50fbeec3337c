"""Processes that are the ranks of a process group and run functions, for tests of training."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from checkmate.ring.place import RingError

_SECONDS = 100.0


_IMPORTED: Final = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "checkmate.training.protect",
)
"""What most functions need. It takes seconds to import."""


class RankProcesses:
    """Processes that import nothing: they are forked from one that has. All functions are at module level.

    They are used again, but not after a failure.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_IMPORTED))
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(rank, ranks, *arguments)` in `ranks` processes; return their results by rank."""
        while len(self._ends) < ranks:
            parent_end, child_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self._ends.append(parent_end)
            self._processes.append(process)
        self._runs += 1
        store = str(Path(self._folder.name, f"store{self._runs}"))
        for rank in range(ranks):
            self._ends[rank].send((rank, ranks, store, function, arguments))
        answers = [self._answer(rank) for rank in range(ranks)]
        for end in self._ends[:ranks]:
            with contextlib.suppress(OSError):  # its process has ended, which is among the answers
                end.send(None)
        bad = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(answers) if words]
        if bad:
            self._end()
        assert not bad, "\n".join(bad)
        return [result for _, result in answers]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._ends.clear()

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            if not self._ends[rank].poll(_SECONDS):
                return f"no answer in {_SECONDS:g} s", None
            words, result = self._ends[rank].recv()
            return str(words), result
        except EOFError:
            return "its process ended", None


def _serve(end: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        rank, ranks, store, function, arguments = end.recv()
        result, words = None, ""
        try:
            timeout = datetime.timedelta(seconds=_SECONDS / 2)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
            )
            dist.barrier()  # all have connected before the function of one may replace the group
            result = function(rank, ranks, *arguments)
        except BaseException:  # noqa: BLE001 - the test shows it
            words = traceback.format_exc()
            _leave()  # others that wait for this rank fail at once
        end.send((words, result))
        # All leave together: a rank that left as soon as it was done would break the connections that another
        # still opens, of a group that the function made.
        end.recv()
        _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def be_a_host(rank: int) -> None:
    """Have NCCL take this rank for a host of its own, so that ranks may share a GPU."""
    os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}


def join_nccl(
    rank: int,
    count: int,
    store: str,
    backend: str = "cpu:gloo,cuda:nccl",
    device: torch.device | None = None,
) -> None:
    """Replace the default process group by one with NCCL on the GPU that ranks share, bound to a `device`."""
    be_a_host(rank)
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=count, device_id=device
    )


def failing_backward(loss: torch.Tensor) -> str:
    """Run a backward that has to fail because of a ring; return the error once all ranks are here."""
    with pytest.raises(RingError) as excinfo:
        torch.autograd.backward(loss)
    dist.barrier()
    return str(excinfo.value)
