"""`checkmate.protect`: from here on, shadow nodes follow a DDP run."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.layout import Layout
from checkmate.nodes.stubs import Stubs
from checkmate.optimizers import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.schema import ShadowNode
from checkmate.training import restore, session
from checkmate.training.checks import check_all_stepped, check_kept
from checkmate.training.client import Line
from checkmate.training.formats import lay_out_state
from checkmate.training.hook import GradientHook
from checkmate.training.publish import Author, Publisher
from checkmate.training.ready import await_ready
from checkmate.training.records import Recorder, Watched
from checkmate.training.restore import Start
from checkmate.training.seeding import Seeder, Source
from checkmate.training.session import Session
from checkmate.training.slices import Buffers, Slices, frozen_state, kept_beside, state_names, synchronised
from checkmate.training.start_seeds import give_buffers, seed_at_start
from checkmate.training.steps import Steps
from checkmate.training.wiring import connect

_log: Final = logging.getLogger("checkmate")

WAIT: Final = 30.0
FLUSH_SECONDS: Final = 10.0
"""How long `close` waits until the shadow nodes have the last record."""
AWAY_SECONDS: Final = 3.0
"""In the end, a node whose connection is broken is waited for so long: it may be coming back."""
HASTE_SECONDS: Final = 0.5


def protect(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Callable[[], Any] | None = None,
    wait: float = WAIT,
) -> Protection:
    """Have the job's shadow nodes follow this run. All ranks call it, before the first backward.

    `scheduler`, `scaler`: what the script uses with `optimizer`; they are restored with it. `extra()` is
    called after each step and gives what else is to be restored: plain values and tensors. It waits up to
    `wait` seconds until the nodes are connected and seeded, and goes on in any case. Nothing later waits for
    a node. `SessionError`, `UnsupportedOptimizer`, `LayoutError`, `TaggerUnavailable` and `RingError` say
    what is wrong.
    """
    deadline = time.monotonic() + wait
    place = session.join(ddp)
    watched = Watched(ddp, optimizer, scheduler, scaler, extra)
    check_kept(watched)
    with ExitStack() as undo:
        stubs = Stubs(place.job)
        undo.callback(stubs.close)
        start = restore.take_start()
        if start is None:
            start = Start(restore.plan_fresh(place, stubs, min(wait, restore.FRESH_SECONDS)))
            if start.plan.trouble and place.rank == 0:
                _log.warning(
                    "%s: checkmate.restore, before protect, would have resumed it", start.plan.trouble
                )
        protection = Protection(place, watched, stubs, start, deadline)
        undo.pop_all()
        return protection


class Protection:
    """A protected run. A context manager; `close` ends it, as does the end of the script."""

    def __init__(self, place: Session, watched: Watched, stubs: Stubs, start: Start, deadline: float) -> None:
        self.session = place
        self._watched = watched
        self._stubs = stubs
        self._start = start
        self._troubles: dict[int, str] = {}
        self._closed = False
        # Of `close`: where we don't come to be, nothing is waited for.
        self._last, self._patience, self._deadline = False, 0.0, 0.0
        self._pid = os.getpid()
        with ExitStack() as undo:
            undo.callback(stubs.close)
            names = session.trained(watched.ddp)
            parameters = list(names.values())
            numbers = {parameter: number for number, parameter in enumerate(parameters)}
            self._layout: Layout = session.lay_out(watched.ddp, place.shards)
            self._spec = spec_of(watched.optimizer, numbers)
            check_all_stepped(self._spec, list(names))
            lay_out_state(watched.optimizer)
            self._device = parameters[0].device.type
            self._steps = Steps(start.next_iteration)
            ring = connect(place, self._layout, start, undo)
            self._hook = GradientHook(watched.ddp, self._layout, parameters, ring, start.next_iteration)
            undo.callback(self._hook.close)
            self._lines = [self._new_line(node, undo) for node in place.nodes]
            source = Source(self._layout, parameters, watched.optimizer, self._steps)
            self._seeders = {node.id: self._new_seeder(node, source, undo) for node in place.nodes}
            undo.callback(self._finish_lines)
            self._publisher = Publisher(self._author(), self._lines, self._hook.passed, self._fault)
            undo.callback(lambda: self._publisher.close(self._patience))
            self._buffers = self._new_buffers(set(parameters))
            self._recorder = self._new_recorder(names)
            undo.callback(lambda: self._recorder.close(self._last))
            self._hook.on_reduced = self._recorder.reduced
            session.protected.add(id(watched.ddp))
            undo.callback(session.protected.discard, id(watched.ddp))
            atexit.register(self._at_exit)
            undo.callback(atexit.unregister, self._at_exit)
            self._bring_up(deadline)
            self._hook.register()  # last: nothing takes it back, and without us backward is DDP's own
            self._undo = undo.pop_all()

    @property
    def iteration(self) -> int:
        """The last iteration whose backward has begun; one less than the first before that."""
        return self._hook.iteration

    @property
    def incarnation(self) -> int:
        """The number of this start of training."""
        return self._start.plan.incarnation

    def close(self, last: bool = True) -> None:
        """End the protection; backward fails from then on. `last`: training has come to its end.

        Waits up to `FLUSH_SECONDS` until the nodes have the last record; after an error not for long, since
        the job starts again then. Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._last = last and _ends_well(sys.exc_info()[1])
        self._patience = FLUSH_SECONDS if self._last and self._hook.error is None else HASTE_SECONDS
        self._deadline = time.monotonic() + self._patience
        self._undo.close()

    def __enter__(self) -> Protection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(last=_ends_well(error))

    def _author(self) -> Author:
        place, plan = self.session, self._start.plan
        return Author(
            place.job.job, plan.incarnation, plan.run, plan.start, place.group, place.position, place.side
        )

    def _new_line(self, node: ShadowNode, undo: ExitStack) -> Line:
        begin = self._begin_request if self.session.first else None
        line = Line(node, self._stubs.to(node.id), begin, self._replied, self._begun, tls=self._stubs.tls)
        undo.callback(line.close)
        return line

    def _new_seeder(self, node: ShadowNode, source: Source, undo: ExitStack) -> Seeder:
        seeder = Seeder(node.id, self._stubs.to(node.id), source, self._seed_header)
        undo.callback(seeder.close)
        return seeder

    def _finish_lines(self) -> None:
        """Nothing follows. A node that is away may be coming back: it isn't waited for as long."""
        for line in self._lines:
            line.finish(0)
        away = time.monotonic() + AWAY_SECONDS
        for line in self._lines:
            if line.begun.is_set():
                until = self._deadline if line.connected else min(away, self._deadline)
                line.finish(until - time.monotonic())

    def _new_recorder(self, names: Mapping[str, nn.Parameter]) -> Recorder:
        return Recorder(
            self._watched,
            names,
            self._steps,
            self._publisher.put,
            self._hook.stream_ends,
            slices=Slices(self._layout, list(names.values())) if self.session.first else None,
            buffers=self._buffers,
        )

    def _new_buffers(self, trained: set[nn.Parameter]) -> Buffers | None:
        """What is kept beside trained parameters; only the first rank says what all ranks have alike."""
        ddp, optimizer = self._watched.ddp, self._watched.optimizer
        if self.session.first:
            return Buffers(lambda: kept_beside(ddp) | frozen_state(optimizer, trained), everything=True)
        if synchronised(ddp):
            return None
        return Buffers(lambda: kept_beside(ddp), everything=False, changed=self._start.own_buffers)

    def _bring_up(self, deadline: float) -> None:
        """Begin at the nodes, seed them, and wait for both until the deadline."""
        place = self.session
        for line in self._lines:
            line.start()
        box: list[list[int]] = [[]]
        if place.first:
            for line in self._lines:
                line.begun.wait(max(deadline - time.monotonic(), 0))
            box = [[line.node.id for line in self._lines if line.begun.is_set()]]
        dist.broadcast_object_list(box, src=place.spokesman, group=self._watched.ddp.process_group)
        seeders = {node: self._seeders[node] for node in box[0]}
        seed_at_start(place, self._layout, self._start, seeders)
        if place.first and self._buffers is not None:
            give_buffers(place, self._buffers, self._start, seeders, deadline)
        waiting = [""]
        if place.first:
            waiting = [await_ready(place, self._stubs, self.incarnation, deadline)]
        dist.broadcast_object_list(waiting, src=place.spokesman, group=self._watched.ddp.process_group)
        if place.first and waiting[0]:
            _log.warning("training begins without all shadow nodes: %s", waiting[0])

    def _begin_request(self) -> pb.BeginRequest:
        """What the group's first rank says to a node, at connect and at every reconnect."""
        start = self._start
        return pb.BeginRequest(
            job=self.session.job.job,
            group=self.session.group,
            incarnation=self.incarnation,
            first_iteration=start.next_iteration,
            next_iteration=self._hook.iteration + 1,
            layout=self._layout.to_json(),
            optimizer=self._spec,
            keep=start.keep,
            torch=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            device=self._device,
            ranks=self.session.ranks,
            run=start.plan.run,
            start=start.plan.start,
            names=self._names(),
            buffers=sorted(self._buffers.names) if self._buffers is not None else (),
        )

    def _names(self) -> dict[str, str]:
        """The keys of the model's `state_dict()` whose tensors the nodes are given."""
        given = {parameter.name for parameter in self._layout.parameters}
        given |= self._buffers.names if self._buffers is not None else set()
        return {key: name for key, name in state_names(self._watched.ddp).items() if name in given}

    def _begun(self, request: pb.BeginRequest) -> None:
        """A node has come late, or come back: it lacks what is sent only once."""
        if self._buffers is not None and request.next_iteration > request.first_iteration:
            self._buffers.again()

    def _seed_header(self, shard: int, iteration: int) -> pb.SeedHeader:
        record = self._start.record if iteration == self._start.next_iteration - 1 else None
        return pb.SeedHeader(
            job=self.session.job.job,
            incarnation=self.incarnation,
            run=self._start.plan.run,
            start=self._start.plan.start,
            shard=pb.Shard(group=self.session.group, shard=shard),
            iteration=iteration,
            record=record,
        )

    def _replied(self, node: int, reply: pb.RecordReply) -> None:
        """A node's answer to a record: it may want seeds of shards that are ours to send."""
        for wanted in reply.wanted:
            if wanted.shard % self.session.ranks == self.session.position:
                numbers = wanted.parameters or self._layout.of_shard(wanted.shard)
                self._seeders[node].want(wanted.shard, numbers)
        if reply.buffers and self._buffers is not None:
            self._buffers.again()
        if reply.trouble != self._troubles.get(node, ""):
            self._troubles[node] = reply.trouble
            _log.warning("shadow node %d: %s", node, reply.trouble or "all is well again")

    def _fault(self, error: Exception) -> None:
        self._recorder.fault = error

    def _at_exit(self) -> None:
        """The script ends: the last iteration, unless it ends by an error. A forked child's end is not it."""
        if os.getpid() == self._pid:
            self.close(last=getattr(sys, "last_value", None) is None)


def _ends_well(error: BaseException | None) -> bool:
    """Whether a script that ends by this has come to its end; `sys.exit(0)` is none that failed."""
    return error is None or (isinstance(error, SystemExit) and not error.code)
