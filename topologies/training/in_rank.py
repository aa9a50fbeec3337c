"""A lab's part inside a rank: `-m topologies.training.in_rank ORDERS.json` runs an unmodified script.

It hooks into the script's calls of `checkmate.restore` and `checkmate.protect`. It records when each
iteration begins and ends, holds iterations back until the lab releases them, kills the rank at given points,
and can replace Checkmate by another AllReduce for comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

import checkmate
from checkmate import Restored
from checkmate.ring import connect_ring
from checkmate.ring.connections import PlainSocket
from checkmate.ring.place import RingPlace, host_ports, ring_ports
from checkmate.tagger import TaggedSocket
from checkmate.training.gradients.host_reducer import HostReducer, HostRings, merge
from checkmate.training.gradients.reducing import Reducer, RingReducer
from checkmate.training.gradients.wiring import make_reduction
from checkmate.training.model.choosing import model_of
from checkmate.training.model.trained import TrainedModel
from checkmate.training.start.membership import Membership, join, lay_out_shares, named_job
from checkmate.wire.layout import Layout
from checkmate.wire.schedule import RING_SLICING
from topologies.training.orders import PHASES, Kill, Orders, read
from topologies.training.verdict import digest

Batch = TypeVar("Batch")


def nothing_to_restore(*_: Any, **__: Any) -> Restored:
    """Replace `checkmate.restore`: training begins with iteration 0."""
    return Restored(0, None)


class Unprotected:
    """Replacement of `checkmate.protect`: DDP's own AllReduce averages gradients."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches."""
        return iter(batches)

    def mark(self) -> None:
        """Do nothing: the ends of iterations are not needed."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PORTS: Final = 1000
"""More than the rings of one job have at an address."""


class Untagged(Unprotected):
    """Replacement of `checkmate.protect`: the same ring and bits, without tags, records and shadow nodes."""

    def __init__(self, module: nn.Module, *_: Any, ring: int = 0, **__: Any) -> None:
        """Connect it; `ring` is its number if the process has several."""
        model = model_of(module)
        session = join(model)
        layouts = lay_out_shares(model, session, RING_SLICING)
        layout = layouts[session.group]
        place = RingPlace(
            session.position,
            session.ips,
            session.job.channels,
            ports=[port + ring * _PORTS for port in ring_ports(session.job, session.group)],
            device=session.interface,
            fingerprint=layout.fingerprint,
        )
        pinned = next(iter(model.trained().values())).is_cuda
        divisor = session.replicas if model.averages else 1
        with contextlib.ExitStack() as undo:
            inner = RingReducer(
                undo.enter_context(connect_ring(place)), layout, pinned=pinned, divisor=divisor
            )
            reducer: Reducer = inner
            if session.together:
                rings = undo.enter_context(HostRings(_host_place(session, layouts, ring)))
                merged = merge(list(layouts.values()))
                reducer = HostReducer(merged, session.share.index, inner, rings, pinned=pinned)
            hook = make_reduction(model, reducer, 0)
            undo.callback(hook.close)
            hook.register()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the rings."""
        self._undo.close()


def _host_place(session: Membership, layouts: Mapping[int, Layout], ring: int) -> RingPlace:
    """Return this rank's place among those of its host that train its model."""
    ranks = session.host_ranks
    return RingPlace(
        session.share.index,
        [str(rank.ip) for rank in ranks],
        1,
        ports=[port - ring * _PORTS for port in host_ports(session.job, ranks)],
        fingerprint=layouts[session.together[0]].fingerprint,
    )


def arm(
    kill: Kill,
    model: TrainedModel,
    ranks: int,
    optimizer: Optimizer,
    iteration: Callable[[], int],
    last_words: Callable[[], None],
) -> None:
    """Have this process kill itself at the point in `kill`.

    Args:
        kill: The point.
        model: The model.
        ranks: The number of ranks in this rank's DP group.
        optimizer: Its optimizer.
        iteration: Returns the current iteration.
        last_words: Called just before.
    """

    def die_if_due(*_: Any) -> None:
        if iteration() == kill.iteration:
            die(last_words)

    if kill.phase == "forward":
        modules = list(model.inner.modules())
        modules[len(modules) // 2].register_forward_hook(die_if_due)
    elif kill.phase == "before the step":
        optimizer.register_step_pre_hook(die_if_due)
    elif kill.phase == "after the step":
        optimizer.register_step_post_hook(die_if_due)
    else:
        rounds = ranks - 1
        first = 2 * rounds * kill.bucket + (rounds if kill.phase == "all-gather" else 0)
        _watch_ring(range(first, first + rounds), iteration, kill.iteration, last_words)


def _watch_ring(
    chunks: range, iteration: Callable[[], int], when: int, last_words: Callable[[], None]
) -> None:
    """Kill this process in the middle of a write of these chunks, as counted on one ring connection."""
    watched: list[object] = []
    begun = -1

    def begin(sock: Any, length: int, shadow_id: int | None, original: Callable[..., None]) -> None:
        nonlocal begun
        if iteration() == when and watched[:1] in ([], [sock]):
            watched[:] = [sock]
            begun += 1
        original(sock, length, shadow_id)

    def write(sock: Any, piece: memoryview | bytes, original: Callable[..., None]) -> None:
        if watched[:1] == [sock] and begun in chunks[1:]:
            original(sock, piece[: len(piece) // 2])
            die(last_words)
        original(sock, piece)

    for kind in (PlainSocket, TaggedSocket):
        _wrap(kind, begin, write)


def _wrap(kind: Any, begin: Callable[..., None], write: Callable[..., None]) -> None:
    begin_before, write_before = kind.begin_chunk, kind.write
    kind.begin_chunk = lambda self, length, shadow_id=None: begin(self, length, shadow_id, begin_before)
    kind.write = lambda self, piece: write(self, piece, write_before)


def die(last_words: Callable[[], None]) -> None:
    """Call `last_words`, and kill this process with SIGKILL."""
    last_words()
    os.kill(os.getpid(), signal.SIGKILL)


_POLL_SECONDS: Final = 0.005


class Driven:
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
        self._used = 0.0
        self._accumulates, self._over = False, True
        self._state: Callable[[], object] = dict

    def note(self, event: str, **more: object) -> None:
        """Record an event with the current time."""
        said = {"event": event, "attempt": self.attempt, "pid": os.getpid(), "at": time.monotonic(), **more}
        with self._file.open("a") as file:
            print(json.dumps(said), file=file)

    def install(self) -> None:
        """Wrap `checkmate.restore` and `checkmate.protect`."""
        restore: Callable[..., Any] = checkmate.restore
        protect: Callable[..., Any] = checkmate.protect
        if self._orders.reduce != "checkmate":
            restore = nothing_to_restore
            protect = Untagged if self._orders.reduce == "untagged" else Unprotected

        def restoring(*arguments: Any, **options: Any) -> Any:
            self.note("group_ready")
            restored = restore(*arguments, **options)
            self.iteration = restored.iteration - 1
            self.note("restored", iteration=restored.iteration)
            for kill in self._kills("restore"):
                die(self._before_dying(kill))
            return restored

        def protecting(model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            trained = model_of(model)
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

    def ended(self) -> None:
        """Record the end of the script, with a digest of the trained state."""
        self._note_iteration()
        self.note("ended", digest=digest(self._state()).hex())

    def _stepped(self) -> None:
        self._over = True

    def _before_forward(self) -> None:
        """End the previous iteration, with all that the script does in it, and begin the next.

        A forward before the optimizer's step is a further micro-batch of the same iteration.
        """
        if self._accumulates and not self._over:
            return
        self._over = False
        self._note_iteration()
        while not self._may_begin():
            time.sleep(_POLL_SECONDS)
        self.iteration += 1
        self._began, self._used = time.monotonic(), time.process_time()

    def _may_begin(self) -> bool:
        if self._gate is None:
            return True
        until, self.mode = self._gate.read_text().split(" ", 1)
        return self.iteration + 1 < int(until)

    def _note_iteration(self) -> None:
        if self._began is not None:
            used = time.process_time() - self._used  # of all threads
            self.note("iteration", iteration=self.iteration, began=self._began, processor=used)

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
    driven = Driven(orders)
    driven.note("started", process=_process_start())
    driven.install()
    sys.argv = [orders.module, *orders.arguments]
    runpy.run_module(orders.module, run_name="__main__", alter_sys=True)
    driven.ended()


def _ring_size(rank: int) -> int:
    """Return the number of ranks in a rank's DP group."""
    groups = ([one.rank for one in group.ranks] for group in named_job().dp_groups)
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
