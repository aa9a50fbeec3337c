"""A lab's part inside a rank: `-m topologies.training.in_rank ORDERS.json` runs an unmodified script.

It hooks into the script's calls of `checkmate.restore` and `checkmate.protect`. It records when each
iteration begins and ends, holds iterations back until the lab releases them, kills the rank at given points,
and can replace Checkmate by another AllReduce for comparison.

A further argument says that each host's ranks are a job of their own. It is added to the script's RANK, which
is then the rank in the lab.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from topologies.training import imports

# isort: split
import checkmate
from checkmate.training.model.choosing import model_of
from checkmate.training.start.named_job import named_job
from topologies.training.killing import arm, die
from topologies.training.orders import PHASES, Kill, Orders, read
from topologies.training.unprotected import Unprotected, Untagged, nothing_to_restore
from topologies.training.verdict import digest

_POLL_SECONDS: Final = 0.005


class RankHooks:
    """Hooks on one rank's training."""

    def __init__(self, orders: Orders) -> None:
        self.rank = int(os.environ["RANK"])
        self._orders = orders
        self._gate = Path(orders.gate) if orders.gate else None
        self._file = Path(orders.events, f"rank{self.rank}.events.jsonl")
        self.attempt = self._file.read_text().count('"event": "started"') if self._file.exists() else 0
        self.mode = ""
        self.iteration = -1
        """The iteration that began last."""
        self._began: float | None = None
        self._processor_at = 0.0
        self._accumulates, self._has_stepped = False, True
        self._state: Callable[[], object] = dict

    def note(self, event: str, **more: object) -> None:
        """Record an event with the current time."""
        record = {"event": event, "attempt": self.attempt, "pid": os.getpid(), "at": time.monotonic(), **more}
        with self._file.open("a") as file:
            print(json.dumps(record), file=file)

    def install(self) -> None:
        """Wrap `checkmate.restore` and `checkmate.protect`."""
        restore: Callable[..., Any] = checkmate.restore
        protect: Callable[..., Any] = checkmate.protect
        if self._orders.reduce != "checkmate":
            restore = nothing_to_restore
            protect = Untagged if self._orders.reduce == "untagged" else Unprotected

        def restoring(*arguments: Any, **options: Any) -> Any:
            self.note("group_ready")
            self._began, self._has_stepped = None, True  # after a recovery in place, an iteration was cut off
            restored = restore(*arguments, **options)
            self.iteration = restored.iteration - 1
            self.note("restored", iteration=restored.iteration)
            for kill in self._kills("restore"):
                die(self._before_dying(kill))
            return restored

        def protecting(model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            trained = model_of(model, named_job().copies, optimizer)
            self._state = lambda: {
                "model": trained.inner.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            protection = protect(model, optimizer, *arguments, **options)
            model.register_forward_pre_hook(lambda *_: self._before_forward())  # after Checkmate's own
            if options.get("scaler") is None:  # which may leave a step out
                optimizer.register_step_post_hook(lambda *_: self._stepped())
                self._accumulates = True
            for kill in self._kills(*PHASES):
                ranks = _ring_size(self.rank)
                arm(kill, trained, ranks, optimizer, lambda: self.iteration, self._before_dying(kill))
            if self._orders.extension is not None:
                importlib.import_module(self._orders.extension).install(self, model, optimizer)
            if self._orders.cpus is not None:
                _pin(self._orders.cpus)
            self.note("protected")
            return protection

        checkmate.restore, checkmate.protect = restoring, protecting

    def note_end(self) -> None:
        """Record the end of the script, with a digest of the trained state."""
        self._note_iteration()
        self.note("ended", digest=digest(self._state()).hex())

    def _stepped(self) -> None:
        self._has_stepped = True

    def _before_forward(self) -> None:
        """End the previous iteration, with all that the script does in it, and begin the next.

        A forward before the optimizer's step is a further micro-batch of the same iteration.
        """
        if self._accumulates and not self._has_stepped:
            return
        self._has_stepped = False
        self._note_iteration()
        while not self._may_begin():
            time.sleep(_POLL_SECONDS)
        self.iteration += 1
        self._began, self._processor_at = time.monotonic(), time.process_time()

    def _may_begin(self) -> bool:
        if self._gate is None:
            return True
        until, self.mode = self._gate.read_text().split(" ", 1)
        return self.iteration + 1 < int(until)

    def _note_iteration(self) -> None:
        if self._began is not None:
            processor = time.process_time() - self._processor_at  # of all threads
            self.note("iteration", iteration=self.iteration, began=self._began, processor=processor)

    def _kills(self, *phases: str) -> list[Kill]:
        """Return the kills of this rank in this start of the job."""
        return [
            kill
            for kill in self._orders.kills
            if kill.rank == self.rank and kill.attempt == self.attempt and kill.phase in phases
        ]

    def _before_dying(self, kill: Kill) -> Callable[[], None]:
        return lambda: self.note("killed", iteration=kill.iteration, phase=kill.phase)


def main() -> None:
    """Run the script in the orders, like `python -m`."""
    orders = read(Path(sys.argv[1]).read_text())
    os.environ["RANK"] = str(int(os.environ["RANK"]) + sum(map(int, sys.argv[2:])))
    hooks = RankHooks(orders)
    hooks.note("started", process=_process_start(), torch=imports.TORCH_AT, checkmate=imports.CHECKMATE_AT)
    hooks.install()
    sys.argv = [orders.module, *orders.arguments]
    runpy.run_module(orders.module, run_name="__main__", alter_sys=True)
    hooks.note_end()


def _ring_size(rank: int) -> int:
    """Return the number of ranks in a rank's DP group."""
    groups = ([rank_of_group.rank for rank_of_group in group.ranks] for group in named_job().dp_groups)
    return next(len(ranks) for ranks in groups if rank in ranks)


def _pin(cpus: Collection[int]) -> None:
    """Pin this process, with all of its threads, to these CPUs."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)


def _process_start() -> float:
    """Return the start time of this process, on the clock of `time.monotonic`."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    main()
