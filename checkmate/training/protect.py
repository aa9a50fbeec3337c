"""`checkmate.protect`: from here on, shadow nodes follow a DDP run."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import restore
from checkmate.training.checks import check_all_stepped, check_ddp, check_kept, check_script
from checkmate.training.exclusion import StepExclusion
from checkmate.training.gradients.hook import GradientHook
from checkmate.training.gradients.wiring import connect
from checkmate.training.lines.seeder import SeedSource
from checkmate.training.loop import Batch, Loop, resumed_in
from checkmate.training.record.buffers import Buffers, frozen_state, kept_beside, synchronised
from checkmate.training.record.publisher import Publisher
from checkmate.training.record.recorder import PendingFault, Recorder, Watched
from checkmate.training.record.windows import Slices
from checkmate.training.start import membership
from checkmate.training.start.followers import Followers
from checkmate.training.start.formats import lay_out_state
from checkmate.training.start.membership import Membership
from checkmate.training.start.opening import Opening
from checkmate.training.start.standing import ModelStanding, Start
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")

WAIT: Final = 30.0
FLUSH_SECONDS: Final = 10.0
"""How long `close` waits until the shadow nodes have stepped the last iteration."""
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

    `scheduler`, `scaler`: what the script uses with `optimizer`; they are restored with it. `extra()` gives
    what else is to be restored, plain values and tensors, as of now; it is called several times an iteration.
    It waits up to `wait` seconds until the nodes are connected and seeded, and goes on in any case. Nothing
    later waits for a node. `SessionError`, `RefusedError`, `UnsupportedOptimizer`, `LayoutError`,
    `StateError`, `TaggerUnavailable` and `RingError` say what is wrong.
    """
    deadline = time.monotonic() + wait
    place = membership.join(ddp)
    standing = ModelStanding.of(ddp)
    watched = Watched(ddp, optimizer, scheduler, scaler, extra)
    check_ddp(ddp)
    check_script(watched)
    check_kept(watched)
    layout, spec = _describe(place, watched)
    with ExitStack() as undo:
        stubs = Stubs(place.job)
        undo.callback(stubs.close)
        start = standing.take_start() or _begin_anew(place, stubs, min(wait, restore.FRESH_SECONDS))
        standing.hold()
        undo.callback(standing.release)
        return _assemble(place, watched, layout, spec, stubs, start, deadline, undo)


def _describe(place: Membership, watched: Watched) -> tuple[Layout, pb.OptimizerSpec]:
    """What shadow nodes have to know of model and optimizer, once it is found that they can follow these."""
    names = membership.trained(watched.ddp)
    layout = membership.lay_out(watched.ddp, place.shards)
    spec = spec_of(watched.optimizer, {parameter: number for number, parameter in enumerate(names.values())})
    check_all_stepped(spec, list(names))
    lay_out_state(watched.optimizer)
    return layout, spec


def _begin_anew(place: Membership, stubs: Stubs, timeout: float) -> Start:
    """The start of training that no `restore` came before."""
    start = Start(restore.plan_fresh(place, stubs, timeout))
    if start.plan.trouble and place.rank == 0:
        _log.warning("%s: checkmate.restore, before protect, would have resumed it", start.plan.trouble)
    return start


def _assemble(
    place: Membership,
    watched: Watched,
    layout: Layout,
    spec: pb.OptimizerSpec,
    stubs: Stubs,
    start: Start,
    deadline: float,
    undo: ExitStack,
) -> Protection:
    """Make all parts, each finished before the next, and bring the nodes up.

    `undo` closes those that there are; the protection takes it over.
    """
    names = membership.trained(watched.ddp)
    parameters = list(names.values())
    ring = connect(place, layout, start, undo)
    hook = GradientHook(watched.ddp, layout, parameters, ring, start.next_iteration)
    undo.callback(hook.close)
    steps, buffers, fault = (
        StepExclusion(start.next_iteration),
        _buffers(place, watched, parameters, start),
        PendingFault(),
    )
    device = parameters[0].device.type
    opening = Opening(place, start, watched.ddp, layout, spec, device, buffers, lambda: hook.iteration)
    slices = Slices(layout, parameters, watched.optimizer) if place.first else None
    followers = Followers(opening, stubs, SeedSource(layout, parameters, watched.optimizer, steps), slices)
    undo.callback(followers.close)
    publisher = Publisher(opening.author(), followers.lines, hook.passed, fault.set)
    undo.callback(publisher.close, 0.0)
    recorder = Recorder(
        watched,
        names,
        steps,
        publisher.put,
        hook.stream_ends,
        fault,
        slices=slices,
        buffers=buffers,
        await_departed=publisher.await_departed,
    )
    undo.callback(recorder.close, last=False)
    followers.bring_up(deadline)
    hook.register(recorder.reduced)  # last: nothing takes it back, and without us backward is DDP's own
    loop = Loop(recorder, resumed_in(place, start), lambda: hook.iteration >= start.next_iteration)
    return Protection(place, start, hook, recorder, loop, publisher, followers, undo)


def _buffers(
    place: Membership, watched: Watched, trained: Sequence[nn.Parameter], start: Start
) -> Buffers | None:
    """What this rank says beside trained parameters; only the first one says what all ranks have alike."""
    ddp, optimizer = watched.ddp, watched.optimizer
    if place.first:
        return Buffers(lambda: kept_beside(ddp) | frozen_state(optimizer, set(trained)), everything=True)
    if synchronised(ddp):
        return None
    return Buffers(lambda: kept_beside(ddp), everything=False, changed=start.own_buffers)


class Protection:
    """A protected run. A context manager; `close` ends it, as does the end of the script."""

    def __init__(
        self,
        place: Membership,
        start: Start,
        hook: GradientHook,
        recorder: Recorder,
        loop: Loop,
        publisher: Publisher,
        followers: Followers,
        undo: ExitStack,
    ) -> None:
        """`undo` closes all parts, whatever they are at; it is taken over."""
        self.session = place
        self._incarnation = start.plan.incarnation
        self._hook = hook
        self._recorder = recorder
        self._loop = loop
        self._publisher = publisher
        self._followers = followers
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)
        self._undo = undo.pop_all()

    @property
    def iteration(self) -> int:
        """The last iteration whose backward has begun; one less than the first before that."""
        return self._hook.iteration

    @property
    def incarnation(self) -> int:
        """The number of this start of training."""
        return self._incarnation

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, one after another: `for batch in protection.steps(loader)`.

        An iteration ends as the next batch is asked for, before it is drawn. All that a resumed run needs is
        captured there, so everything that the loop's body does belongs to the iteration. A run that resumes
        within such a loop enters it again; that the iterator is made anew leaves random generators as they
        were. Batches that are used up already the script has to leave out.
        """
        return self._loop.steps(batches)

    def mark(self) -> None:
        """The iteration ends here: what `steps` does, as the last statement of a loop's body.

        Once called, it is called at the end of each iteration. A later mark before the next forward counts
        instead.
        """
        self._recorder.mark()

    def close(self, last: bool = True) -> None:
        """End the protection; backward fails from then on. `last`: training has come to its end.

        Waits up to `FLUSH_SECONDS` until the nodes have stepped the last iteration, and logs a warning if
        that was not enough; after an error not for long, since the job starts again then. Calling it again
        does nothing.
        """
        if self._closed:
            return
        self._closed = True
        last = last and _ends_well(sys.exc_info()[1])
        patience = FLUSH_SECONDS if last and self._hook.error is None else HASTE_SECONDS
        deadline = time.monotonic() + patience
        with self._undo:
            self._recorder.close(last)
            self._publisher.close(patience)
            self._followers.finish(deadline)
            iteration = self._publisher.newest
            if last and self.session.first and iteration is not None:
                self._followers.await_stepped(iteration, deadline)

    def __enter__(self) -> Protection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(last=_ends_well(error))

    def _at_exit(self) -> None:
        """The script ends: the last iteration, unless it ends by an error. A forked child's end is not it."""
        if os.getpid() == self._pid:
            self.close(last=getattr(sys, "last_value", None) is None)


def _ends_well(error: BaseException | None) -> bool:
    """Whether a script that ends by this has come to its end; `sys.exit(0)` is none that failed."""
    return error is None or (isinstance(error, SystemExit) and not error.code)
