"""`checkmate.protect`: have shadow nodes follow a DDP run."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar, Final

from torch import nn

from checkmate.base.wording import in_ranges, size
from checkmate.errors import CheckmateError
from checkmate.events.kinds import PROTECT_ENDED, PROTECT_STARTED
from checkmate.events.process_log import say, seconds_since
from checkmate.nodes.stubs import Stubs
from checkmate.optim.kernel import described_device
from checkmate.optim.several import OwnedShare
from checkmate.optim.supported import kind_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import restore
from checkmate.training.checks import (
    Optimizers,
    Scaler,
    Schedulers,
    check_all_stepped,
    check_kept,
    check_model,
    check_schedulers,
    watched_of,
)
from checkmate.training.default_log import show_log
from checkmate.training.ending import ends_well, said_end
from checkmate.training.errors import RegroupError, SessionError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.gradients.buckets import CopiedGradients
from checkmate.training.gradients.setup import make_front
from checkmate.training.kept_events import keep_events
from checkmate.training.lines.seeder import SeedSource, values_of
from checkmate.training.loop import Batch, Loop, generators_of
from checkmate.training.model.choosing import model_of
from checkmate.training.record.buffers import Buffers, frozen_state
from checkmate.training.record.capture import Watched
from checkmate.training.record.copied_state import CopiedState, Follow
from checkmate.training.record.generators import FirstBatch
from checkmate.training.record.publisher import Publisher
from checkmate.training.record.recorder import Recorder
from checkmate.training.record.windows import Slices
from checkmate.training.start.all_ranks import ANEW, RestoreError
from checkmate.training.start.followers import Followers, Opening
from checkmate.training.start.install import lay_out_state, own_buffers
from checkmate.training.start.named_job import named_job
from checkmate.training.start.nccl_runtime import slicing_of
from checkmate.training.start.places import Handover, Place, Start, copied_state, join, lay_out_shares
from checkmate.training.start.plans import NewRun
from checkmate.training.start.survivor import Survivor
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")

WAIT: Final = 30.0
IN_PLACE_SECONDS: Final = 3.0
"""Seconds that a recovery in place waits for shadow nodes, of the `wait` for a start."""
FLUSH_SECONDS: Final = 10.0
"""Seconds that `close` waits for the shadow nodes to step the last iteration."""
REPAIRED_SECONDS: Final = 10.0
"""Seconds for which a rank that has ended takes what the rank before sends again."""
HASTE_SECONDS: Final = 0.5
"""Seconds that it waits after an error: the job will be restarted."""
_UNTAGGED: Final = (
    "gradients are not tagged, so shadow nodes don't follow: %s. Training goes on without checkpoints; "
    "protect(required=True) makes this an error"
)


@dataclass(frozen=True, kw_only=True)
class ProtectedRun:
    """The script's training and how it begins, before anything is created for it."""

    place: Place
    start: Start
    watched: Watched
    layouts: Mapping[int, Layout]
    """Layouts of the DP groups that train the model, by group."""
    optimizer: pb.OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class ProtectionParts:
    """The parts of a protection that work while it is open."""

    gradients: CopiedGradients
    recorder: Recorder
    loop: Loop
    publisher: Publisher
    followers: Followers
    steps: StepExclusion
    waiting: str
    """Which shadow nodes do not follow from the start on, in words, on the first rank of a DP group."""


def protect(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Schedulers | None = None,
    scaler: Scaler | None = None,
    extra: Callable[[], Any] | None = None,
    wait: float = WAIT,
    required: bool = False,
    follow: Follow = "auto",
) -> Protection:
    """Have the job's shadow nodes follow this run.

    All ranks call it before the first backward, and after `restore` if they call that. The environment
    variable CHECKMATE_JOB must contain the path of the job's YAML file.

    Args:
        model: The model: a DistributedDataParallel, or a model that `fully_shard` has sharded on the mesh of
            `shard_mesh`. Its gradients must not have a communication hook yet.
        optimizer: The optimizer that steps all parameters that the model trains, or several, each of which
            steps parameters of its own.
        scheduler: The learning rate scheduler, if the script has one. It is restored with the optimizer. With
            several optimizers, their schedulers.
        scaler: The GradScaler, if the script has one. It is restored with the optimizer.
        extra: Returns further state to restore on this rank: plain values and tensors. It is called several
            times per iteration.
        wait: How many seconds to wait until the shadow nodes are connected and seeded. Training begins in any
            case, and never waits for a node later.
        required: With `collective: nccl`, whether it is an error if gradients can't be tagged. Otherwise
            training goes on with a warning, and without shadow nodes.
        follow: How nodes follow: "gradients", by repeating the optimizer's step; or "state", by copies of
            parameters and optimizer state after each step, which takes copies by hosts. By default "state"
            only if the optimizer's step can't be repeated.

    Returns:
        The protection. Use it as a context manager, or call its `close` at the end of training.

    Raises:
        SessionError: The job's YAML, torchrun's environment and the model's process group contradict one
            another, or a model of this process is protected already; or gradients can't be tagged although
            that is `required`.
        RefusedError: Shadow nodes can't repeat what the script does, e.g. because of DDP's join(), another
            communication hook, or FSDP's settings.
        UnsupportedOptimizer: Shadow nodes can't repeat the optimizer's step, and its state can't be copied.
        LayoutError: A parameter is not dense in memory.
        StateError: Some state (scheduler, scaler, `extra`, a buffer) can't be stored.
        RestoreError: Rank 0 could not plan the start of training; or `restore` was not called, although nodes
            hold what an earlier process has trained.
        KeysError: The keys of role trainer are missing or can't be used.
        TaggerUnavailable: A boundary rank can't tag its segments, e.g. for lack of a capability.
        RingError: The ring could not be connected.
    """
    deadline = time.monotonic() + wait
    job = named_job()
    wrapped = model_of(model, job.copies, optimizer)
    place = join(wrapped, job)
    if place.rank == 0 or place.first:
        show_log()
    keep_events(place.rank, place.job.job)
    say(logging.DEBUG, PROTECT_STARTED(), "protect has begun")
    began_at = time.monotonic()
    handover = Handover.of(wrapped)
    watched = watched_of(wrapped, optimizer, scheduler, scaler, extra)
    if isinstance(watched.optimizer, OwnedShare):
        watched.optimizer.follow()
    check_schedulers(watched)
    check_model(watched, job.copies)
    check_kept(watched)
    names = wrapped.trained()
    restored = handover.take_start()
    copied = restored.copied if restored is not None else None
    if restored is not None and restored.follow != follow:
        raise SessionError(
            f"checkmate.restore was called with follow={restored.follow!r}, and checkmate.protect with "
            f"follow={follow!r}: give both the same"
        )
    if copied is None:
        copied = copied_state(place, wrapped, watched.optimizer, follow)
    watched = replace(watched, copied=copied)
    layouts = lay_out_shares(wrapped, place, slicing_of(place, wrapped), copied)
    if copied is None:
        numbers = {parameter: number for number, parameter in enumerate(names.values())}
        spec = spec_of(watched.optimizer, numbers)
        lay_out_state(watched.optimizer)
    else:
        spec = copied.spec
        _say_copied(place, copied)
    check_all_stepped(spec, list(names))
    with ExitStack() as undo:
        stubs = undo.enter_context(handover.take_stubs(place.job, place.keys()))
        start = restored or _start_afresh(place, stubs, min(wait, restore.FRESH_SECONDS))
        handover.hold()
        undo.callback(handover.release)
        if start.stayed and not getattr(
            start.plan, "former", b""
        ):  # nodes have kept their state, and others join during training
            deadline = min(deadline, time.monotonic() + IN_PLACE_SECONDS)
        run = ProtectedRun(place=place, start=start, watched=watched, layouts=layouts, optimizer=spec)
        protection = _assemble(run, stubs, deadline, undo, required=required)
    _say_recovery(place, start)
    event = PROTECT_ENDED(
        iteration=start.next_iteration,
        incarnation=start.plan.incarnation,
        waiting=protection.waiting,
        seconds=seconds_since(began_at),
    )
    say(logging.DEBUG, event, "iteration %d comes next", start.next_iteration)
    return protection


def _say_copied(place: Place, copied: CopiedState) -> None:
    """Log on the first rank what copies of state take."""
    if place.rank == 0:
        gradients = sum(parameter.nbytes for parameter in copied.described if not parameter.state)
        kinds = " and ".join(dict.fromkeys(kind_of(copied.spec, group) for group in copied.spec.groups))
        _log.info(
            "the state of %s is copied, because shadow nodes do not repeat its steps: %s of parameters and "
            "state an iteration, %.1f times the bytes of gradients",
            kinds,
            size(copied.nbytes),
            copied.nbytes / gradients,
        )


def _say_recovery(place: Place, start: Start) -> None:
    """Log, on the first rank whose process has stayed, that training goes on after another one's failure."""
    loss, Survivor.loss = Survivor.loss, None
    if loss is None or place.rank != min(start.stayed, default=place.rank):
        return
    show_log()
    seconds = time.monotonic() - loss.at
    source = "all ranks have read the state"
    if survivors := start.survivors:
        ranks = f"ranks {in_ranges(survivors)} have" if len(survivors) > 1 else f"rank {survivors[0]} has"
        source = f"{ranks} kept parameters and optimizer state"
    _log.info("recovered in place in %.1f s: %s; %s", seconds, loss.words, source)


def _start_afresh(place: Place, stubs: Stubs, timeout: float) -> Start:
    """Return a start of training without a `restore` before it.

    Raise `RestoreError` if the nodes have an earlier process's training, which would be lost.
    """
    if Survivor.has_trained:
        raise RestoreError(
            "the script calls checkmate.protect without checkmate.restore, and this process has trained, so "
            "that it can't begin again: call checkmate.restore first"
        )
    plan = restore.plan_fresh(place, stubs, timeout)
    if isinstance(plan, NewRun) and plan.trouble and (Survivor.is_wanted or not Handover.has_protected):
        raise RestoreError(
            f"{plan.trouble}, and the script does not resume from it: call checkmate.restore before protect, "
            f"which changes nothing if nodes hold nothing; or discard it: {ANEW}"
        )
    return Start(plan)


def _assemble(
    run: ProtectedRun, stubs: Stubs, deadline: float, undo: ExitStack, *, required: bool
) -> Protection:
    """Create all parts in turn, and bring the nodes up.

    `undo` closes the parts created so far; the protection takes it over.
    """
    place, start, watched, layouts = run.place, run.start, run.watched, run.layouts
    names, layout = watched.model.trained(), layouts[place.group]
    parameters = list(names.values())
    devices = {parameter.device for parameter in parameters}
    front, untagged = make_front(
        watched.model, place, layouts, start, devices, undo, required=required, copied=watched.copied
    )
    if untagged:
        place = replace(place, followed=False)
        run = replace(run, place=place)
        if place.first:
            _log.warning(_UNTAGGED, "; ".join(untagged))
    undo.callback(front.close)
    gradients = front.buckets
    generators = generators_of(place, start)
    steps, buffers = StepExclusion(start.next_iteration), _recorded_buffers(place, watched, parameters, start)
    device = described_device(parameters[0].device)
    state_names = watched.model.state_names()
    opening = Opening(
        place, start, state_names, layout, run.optimizer, device, buffers, lambda: gradients.iteration
    )
    slices = Slices(layout, parameters, watched.optimizer, repeated=watched.copied is None)
    suspects = slices if place.first else None
    values = values_of(parameters, watched.optimizer) if watched.copied is None else watched.copied.values
    repairs = gradients.repairs if place.side is not None else None
    repair = None if repairs is None else repairs.ask
    followers = Followers(opening, stubs, SeedSource(layout, values, steps), suspects, repair)
    undo.callback(followers.close)
    repairs_from = (lambda: None) if repairs is None else lambda: repairs.oldest
    publisher = Publisher(opening.author(), followers.lines, gradients.has_passed, repairs_from)
    undo.callback(publisher.close, 0.0)
    recorder = Recorder(
        watched,
        names,
        steps,
        publisher.put,
        gradients.stream_ends,
        slices=slices,
        first=place.first,
        marking=start.plan.marks or bool(generators.get("marks")),
        resumed=generators,
        buffers=buffers,
        await_departed=publisher.await_departed,
        on_refused=followers.report_refusal,
        copies=front.steps,
    )
    undo.callback(recorder.close, last=False)
    if generators and place.first:
        undo.callback(FirstBatch(watched.model.outer, start.extra, lambda: gradients.iteration).remove)
    waiting = followers.bring_up(deadline) if place.followed else "; ".join(untagged)
    front.register(recorder.reduced, recorder.on_backward)  # last, because DDP can't unregister a hook
    in_loop = generators if generators.get("in_loop") else None
    loop = Loop(
        *(recorder, in_loop, lambda: gradients.iteration >= start.next_iteration),
        at_end=Protection.leave_if_wanted,
    )
    parts = ProtectionParts(
        gradients=gradients,
        recorder=recorder,
        loop=loop,
        publisher=publisher,
        followers=followers,
        steps=steps,
        waiting=waiting,
    )
    return Protection(run, parts, undo)


def _recorded_buffers(
    place: Place, watched: Watched, parameters: Sequence[nn.Parameter], start: Start
) -> Buffers:
    """Return the buffers that this rank records; only the first rank records those that all ranks share."""
    model, optimizer = watched.model, watched.optimizer
    if place.first:
        trained = set(parameters)
        return Buffers(
            lambda: model.kept_beside() | frozen_state(optimizer, trained, model.parameters), everything=True
        )
    if model.broadcasts_buffers:
        return Buffers(model.extra_states, everything=False)  # which DDP does not broadcast
    changed_before = own_buffers(start.record, place.position)
    return Buffers(model.kept_beside, everything=False, changed_before=changed_before)


class Protection:
    """A protected run, returned by `protect`.

    It is a context manager. `close`, the end of the `with` block or the end of the script end it. If the
    script does something during training that shadow nodes can't repeat, the optimizer's `step` raises
    `RefusedError`, or `StateError` if some state can't be stored.
    """

    present: ClassVar[Protection | None] = None
    """The open one of this process."""
    regrouping: ClassVar[str] = ""
    """Why the function is to be left at the end of an iteration, in words, or ""."""
    has_left: ClassVar[bool] = False
    """Whether it was told so, by an error that it may catch."""

    def __init__(self, run: ProtectedRun, parts: ProtectionParts, undo: ExitStack) -> None:
        """Take over all parts, and `undo`, which closes them in any state."""
        self.waiting = parts.waiting
        """Which shadow nodes do not follow from the start on, in words, on the first rank of a DP group."""
        self.place = run.place
        self._incarnation = run.start.plan.incarnation
        self._run = run
        self._steps = parts.steps
        self._gradients = parts.gradients
        self._recorder = parts.recorder
        self._loop = parts.loop
        self._publisher = parts.publisher
        self._followers = parts.followers
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)
        self._undo = undo.pop_all()
        Protection.present = self

    @property
    def iteration(self) -> int:
        """Number of the last iteration whose backward has begun; before the first, the number before it."""
        return self._gradients.iteration

    @property
    def has_trained(self) -> bool:
        """Whether an iteration has ended since it began."""
        return self._steps.stepped >= self._run.start.next_iteration

    @property
    def incarnation(self) -> int:
        """Number of this start of training, 0 to 255."""
        return self._incarnation

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over batches and mark the end of each iteration: `for batch in protection.steps(loader)`.

        An iteration ends when the next batch is requested, before it is drawn. The state that a resumed run
        needs is captured at that moment, so everything in the loop's body belongs to the iteration. A run
        that resumes within such a loop enters it again; creating the iterator again does not disturb random
        generators. The script has to skip batches that were already used.

        Args:
            batches: For example a DataLoader.

        Returns:
            An iterator over the batches.
        """
        return self._loop.steps(batches)

    def mark(self) -> None:
        """Mark the end of an iteration, as the last statement of the loop's body: an alternative to `steps`.

        A script that calls it once must call it at the end of every iteration. If it is called several times
        before the next forward, the last call counts.
        """
        self._recorder.mark()
        self.leave_if_wanted()

    @classmethod
    def leave_if_wanted(cls) -> None:
        """Raise `RegroupError` if the function is to be left here, where an iteration has ended."""
        if cls.regrouping:
            cls.has_left = True
            raise RegroupError(cls.regrouping)

    def close(self, last: bool = True) -> None:
        """End the protection. Backward fails from then on.

        Wait up to 10 seconds (after an error, 0.5) for the shadow nodes to step the last iteration, and log a
        warning if they do not. Calling it again has no effect.

        Args:
            last: Whether training is complete, so that the last iteration counts although no forward follows.
        """
        self._end(last, well=ends_well(sys.exc_info()[1]))

    def _end(self, last: bool, *, well: bool) -> None:
        """Close once. `well`: whether the script does not end by an error."""
        if self._closed:
            return
        self._closed = True
        Protection.present = None
        last = last and well and self._recorder.refusal is None
        if not well:
            self._gradients.give_up()
        patience = FLUSH_SECONDS if last and self._gradients.error is None else HASTE_SECONDS
        deadline = time.monotonic() + patience
        broken = self._gradients.error
        with self._undo, said_end(lambda: self._publisher.newest, broken, completed=lambda: last, well=well):
            with suppress(CheckmateError):  # the refusal, which is raised below
                self._recorder.close(last)
            if Survivor.is_wanted:
                Survivor.note_progress(self._steps.stepped)
            run = self._run
            if Survivor.is_wanted and not well and run.watched.copied is None:
                Survivor.keep(
                    run.start.plan.run, self._steps.settled, run.layouts[run.place.group], run.watched
                )
            self._publisher.close(patience)
            iteration = self._publisher.newest
            is_awaited = last and iteration >= 0
            repairs = self._gradients.repairs if is_awaited else None
            if repairs is not None and self.place.side is not None:
                self._followers.await_stepped(iteration, deadline)  # till then, nodes may ask for lost copies
                is_awaited = False
            self._followers.finish(deadline)
            if repairs is not None:
                repairs.linger(REPAIRED_SECONDS if broken is None else HASTE_SECONDS)
            unpublished = self._recorder.refusal or self._publisher.error
            if unpublished is not None and well:  # nothing has raised it yet, or the script has caught it
                if self._recorder.refusal is None:
                    failed = self._publisher.failed_iteration
                    self._followers.report_refusal(failed, unpublished, marks=self._recorder.is_marking)
                raise unpublished
            if is_awaited and self.place.first:
                self._followers.await_stepped(iteration, deadline)

    def fail(self) -> None:
        """End the protection after a failure, if the script has not: what is complete still leaves."""
        self._end(last=False, well=False)

    def __enter__(self) -> Protection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(last=True, well=ends_well(error))

    def _at_exit(self) -> None:
        """Close at the end of the script, but not at that of a forked child."""
        if os.getpid() != self._pid:
            return
        try:
            self._end(last=True, well=getattr(sys, "last_value", None) is None)
        except Exception as error:  # noqa: BLE001 - whatever it is
            # Python ignores errors here, and whoever started the script would take it for a success.
            _log.error("%s: %s", type(error).__name__, error)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
