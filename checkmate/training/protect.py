"""`checkmate.protect`: from here on, shadow nodes follow a DDP run."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import grpc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate import state
from checkmate.layout import Layout
from checkmate.optimizers import UnsupportedOptimizer, spec_of
from checkmate.ring import Place, Ring, connect_ring
from checkmate.rpc import shadow_pb2 as pb
from checkmate.tagger import Tagger, TaggerUnavailable
from checkmate.training import restore, session
from checkmate.training.client import Line, Stubs, reason
from checkmate.training.hook import GradientHook
from checkmate.training.publish import Author, Publisher
from checkmate.training.records import Recorder, Watched
from checkmate.training.restore import Start
from checkmate.training.seeding import Seeder, Source
from checkmate.training.session import Session
from checkmate.training.slices import Buffers, Slices, kept_beside, state_names, synchronised
from checkmate.training.steps import Steps

_log: Final = logging.getLogger("checkmate")

WAIT: Final = 30.0
FLUSH_SECONDS: Final = 10.0
"""How long `close` waits until the shadow nodes have the last record."""
HASTE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.1


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
    _check_kept(watched)
    stubs = Stubs(place.job)
    start = restore.take_start()
    if start is None:
        start = Start(restore.plan_fresh(place, stubs, min(wait, restore.FRESH_SECONDS)))
        if start.plan.trouble and place.rank == 0:
            _log.warning("%s: checkmate.restore, before protect, would have resumed it", start.plan.trouble)
    return Protection(place, watched, stubs, start, deadline)


def _check_kept(watched: Watched) -> None:
    """`StateError` where something can't be kept, before training begins."""
    for name, give in (
        ("scheduler", watched.scheduler and watched.scheduler.state_dict),
        ("scaler", watched.scaler and watched.scaler.state_dict),
        ("extra", watched.extra),
    ):
        if give is not None:
            try:
                state.dumps(give())
            except state.StateError as error:
                raise state.StateError(f"{name}: {error}") from None


class Protection:
    """A protected run. A context manager; `close` ends it, as does the end of the script."""

    def __init__(self, place: Session, watched: Watched, stubs: Stubs, start: Start, deadline: float) -> None:
        self.session = place
        self._watched = watched
        self._stubs = stubs
        self._start = start
        names = session.trained(watched.ddp)
        parameters = list(names.values())
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._layout: Layout = session.lay_out(watched.ddp, place.shards)
        self._spec = spec_of(watched.optimizer, numbers)
        _check_all_stepped(self._spec, list(names))
        self._device = parameters[0].device.type
        self._steps = Steps(start.next_iteration)
        self._tagger, self._ring = _connect(place, self._layout, start)
        self._hook = GradientHook(watched.ddp, self._layout, parameters, self._ring, start.next_iteration)
        plan = start.plan
        author = Author(place.job.job, plan.incarnation, plan.run, place.group, place.position, place.side)
        begin = self._begin_request if place.first else None
        self._lines = [
            Line(node, stubs.to(node.id), begin, self._replied, self._begun) for node in place.nodes
        ]
        source = Source(parameters, watched.optimizer, self._steps)
        self._seeders = {
            node.id: Seeder(node.id, stubs.to(node.id), source, self._seed_header) for node in place.nodes
        }
        self._publisher = Publisher(author, self._lines, self._hook.passed, self._fault)
        self._buffers = self._new_buffers()
        self._recorder = self._new_recorder(names)
        self._hook.on_reduced = self._recorder.reduced
        self._troubles: dict[int, str] = {}
        self._closed = False
        self._pid = os.getpid()
        session.protected.add(id(watched.ddp))
        atexit.register(self._at_exit)
        self._bring_up(deadline)

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
        last = last and _ends_well(sys.exc_info()[1])
        atexit.unregister(self._at_exit)
        session.protected.discard(id(self._watched.ddp))
        patience = FLUSH_SECONDS if last and self._hook.error is None else HASTE_SECONDS
        deadline = time.monotonic() + patience
        self._recorder.close(last)
        self._publisher.close(patience)
        for line in self._lines:
            if line.connected:
                line.finish(deadline - time.monotonic())
        for seeder in self._seeders.values():
            seeder.close()
        for line in self._lines:
            line.close()
        self._hook.close()
        self._ring.close()
        if self._tagger is not None:
            self._tagger.close()
        self._stubs.close()

    def __enter__(self) -> Protection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(last=_ends_well(error))

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

    def _new_buffers(self) -> Buffers | None:
        ddp, place = self._watched.ddp, self.session
        if not place.first and synchronised(ddp):
            return None
        return Buffers(lambda: kept_beside(ddp), everything=place.first, changed=self._start.own_buffers)

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
        self._seed_at_start(box[0])
        waiting = [""]
        if place.first:
            waiting = [self._await_ready(deadline)]
        dist.broadcast_object_list(waiting, src=place.spokesman, group=self._watched.ddp.process_group)
        if place.first and waiting[0]:
            _log.warning("training begins without all shadow nodes: %s", waiting[0])

    def _seed_at_start(self, begun: list[int]) -> None:
        """Ring position p sends the shards s with s mod n = p, to every holder that hasn't kept them."""
        place = self.session
        for shard in range(place.position, place.shards, place.ranks):
            kept = self._start.plan.holders.get((place.group, shard), ()) if self._start.keep else ()
            for node in place.holders(shard):
                if node.id in begun and node.id not in kept:
                    self._seeders[node.id].want(shard, self._layout.of_shard(shard))

    def _await_ready(self, deadline: float) -> str:
        """Wait until all holds of the group are connected and seeded; what isn't, by then."""
        while True:
            lacking = self._lacking()
            if not lacking or time.monotonic() > deadline:
                return "; ".join(lacking)
            time.sleep(_POLL_SECONDS)

    def _lacking(self) -> list[str]:
        """What keeps the group's nodes from following, if anything does."""
        place, found = self.session, []
        for node in place.nodes:
            try:
                status = self._stubs.to(node.id).Status(pb.StatusRequest(job=place.job.job), timeout=2)
            except grpc.RpcError as error:
                found.append(f"shadow node {node.id} ({node.mgmt}): {reason(error)}")
                continue
            held = {
                hold.shard.shard: hold
                for hold in status.holds
                if (hold.shard.group, hold.incarnation) == (place.group, self.incarnation)
            }
            for shard in range(place.shards):
                if node in place.holders(shard) and (trouble := _not_ready(held.get(shard))):
                    found.append(f"shadow node {node.id}, shard {shard}: {trouble}")
        return found

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


def _check_all_stepped(spec: pb.OptimizerSpec, names: Sequence[str]) -> None:
    """`UnsupportedOptimizer` where another optimizer would step a parameter: nodes wouldn't know."""
    stepped = {number for group in spec.groups for number in group.parameters}
    left = [name for number, name in enumerate(names) if number not in stepped]
    if left:
        raise UnsupportedOptimizer(
            f"the optimizer lacks {left[0]} and {len(left) - 1} others that are trained: give them to it, in "
            "a parameter group, or set requires_grad=False; one optimizer steps a protected model"
        )


def _not_ready(hold: pb.HoldStatus | None) -> str:
    """Why a hold can't follow yet; empty where it can."""
    if hold is None:
        return "not begun"
    if hold.connected < hold.streams:
        return f"{hold.connected} of {hold.streams} streams are connected"
    return "" if hold.seeded else "not seeded"


def _connect(place: Session, layout: Layout, start: Start) -> tuple[Tagger | None, Ring]:
    """The tagger on boundary ranks, and the ring."""
    common = layout.fingerprint + f"{start.plan.run} {start.next_iteration}".encode()
    where = Place(
        place.position,
        place.ips,
        place.job.channels,
        incarnation=start.plan.incarnation,
        dscp_bit=place.job.tag.dscp_bit,
        fingerprint=hashlib.blake2b(common, digest_size=16).digest(),
    )
    tagger, trouble = None, None
    if place.side is not None:
        try:
            tagger = Tagger.attach()
        except TaggerUnavailable as error:
            trouble = (f"rank {place.rank}: {error.missing}", error.remedy)
    troubles: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(troubles, trouble)
    found = next((one for one in troubles if one is not None), None)
    if found is not None:
        if tagger is not None:
            tagger.close()
        raise TaggerUnavailable(*found)
    try:
        return tagger, connect_ring(where, tagger)
    except BaseException:
        if tagger is not None:
            tagger.close()
        raise
