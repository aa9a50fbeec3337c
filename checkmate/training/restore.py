"""`checkmate.restore`: resume from the shadow nodes or from the newest checkpoint on disk, or begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import nn

from checkmate.base.wording import at_iteration
from checkmate.events.kinds import (
    RESTORE_AGREED,
    RESTORE_ENDED,
    RESTORE_FAILED,
    RESTORE_FETCHED,
    RESTORE_STARTED,
)
from checkmate.events.process_log import say, seconds_since
from checkmate.nodes.stubs import Stubs
from checkmate.optim.several import OwnedShare, members_of
from checkmate.training.checks import Optimizers, Scaler, Schedulers, watched_of
from checkmate.training.default_log import show_log
from checkmate.training.kept_events import keep_events
from checkmate.training.model.choosing import model_of
from checkmate.training.record.capture import Watched
from checkmate.training.record.copied_state import CopiedState, Follow
from checkmate.training.record.generators import RestoredTensors
from checkmate.training.start import (
    exchange,
    fence,
    from_disk,
    from_nodes,
    places,
    plans,
    sharing,
)
from checkmate.training.start.all_ranks import (
    ANEW,
    TRAINING_ENDED,
    RestoreError,
    agree,
    log_once,
    run_on_all_ranks,
)
from checkmate.training.start.from_disk import OnDisk
from checkmate.training.start.from_nodes import Fetched
from checkmate.training.start.install import part_of, restored_parts
from checkmate.training.start.named_job import named_job
from checkmate.training.start.nccl_runtime import slicing_of
from checkmate.training.start.places import Handover, Place, Start
from checkmate.training.start.plans import (
    AfterReset,
    FromNodes,
    NewRun,
    RefusedStart,
    RestartPlan,
    WithoutState,
)
from checkmate.training.start.sharing import Readers
from checkmate.training.start.survivor import Survivor
from checkmate.wire.parameter import LayoutError

_log: Final = logging.getLogger("checkmate")

TIMEOUT: Final = 60.0
_RESET: Final = (
    "`checkmate reset` has discarded what was trained: training begins with iteration 0, and checkpoints on "
    "disk from before it are not used"
)
FRESH_SECONDS: Final = 10.0
"""Seconds that a start that needs no state from the nodes waits for them to be fenced."""


class Restored(NamedTuple):
    """The result of `restore`."""

    iteration: int
    """The next iteration; 0 if training begins."""
    extra: Any = None
    """This rank's value of `protect`'s `extra` after the iteration before; `None` if there is none."""


def restore(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Schedulers | None = None,
    scaler: Scaler | None = None,
    timeout: float = TIMEOUT,
    checkpoints: str | Path | None = None,
    follow: Follow = "auto",
) -> Restored:
    """Resume from the newest iteration that is complete on the shadow nodes.

    All ranks call it, before `protect`. The environment variable CHECKMATE_JOB must contain the path of the
    job's YAML file. Model, optimizer, scheduler, GradScaler and random generators get the state that they had
    after that iteration, bit for bit. If every node reports that it holds nothing and no checkpoint is on
    disk, nothing changes. If the nodes have no complete iteration, the newest checkpoint on disk is used.

    Args:
        model: The model, as the script wraps or shards it for training.
        optimizer: The optimizer, constructed as before, or several.
        scheduler: The learning rate scheduler, if the script has one, or those of several optimizers.
        scaler: The GradScaler, if the script has one.
        timeout: How many seconds to wait for a complete iteration on the shadow nodes.
        checkpoints: A folder of checkpoints, or one checkpoint; by default $CHECKMATE_CHECKPOINTS. If the
            newest checkpoint can't be read, an older one is used only if it is named here.
        follow: As in `protect`.

    Returns:
        The next iteration, and this rank's extra state.

    Raises:
        RestoreError: No complete state is available to resume from, or it does not fit the script.
        SessionError: The job's YAML, torchrun's environment and the model's process group disagree,
            or a model of this process is protected already, or the job has `collective: nccl` and NCCL
            can't reduce on the model's device.
        KeysError: The keys of role trainer are missing or can't be used.
        RefusedError: `scheduler` or `scaler` is something else, or FSDP's settings can't be followed.
        UnsupportedOptimizer: Shadow nodes can neither repeat the optimizer's step nor copy its state.
    """
    began_at = time.monotonic()
    job = named_job()
    wrapped = model_of(model, job.copies, optimizer)
    place = places.join(wrapped, job)
    if place.rank == 0 or place.first:
        show_log()
    keep_events(place.rank, place.job.job)
    say(logging.DEBUG, RESTORE_STARTED(), "restore has begun")
    try:
        handover = Handover.of(wrapped)
        watched = watched_of(wrapped, optimizer, scheduler, scaler)
        slicing_of(place, wrapped)  # refuses before anything is restored
        with ExitStack() as undo:
            stubs = undo.enter_context(handover.take_stubs(place.job, place.keys()))
            copied = partial(places.copied_state, place, wrapped, watched.optimizer, follow)
            start, extra = _begin(place, watched, stubs, timeout, checkpoints, copied)
            if start.next_iteration and isinstance(watched.optimizer, OwnedShare):
                watched.optimizer.share_with_others()
            undo.pop_all()
    except Exception as error:
        event = RESTORE_FAILED(why=f"{type(error).__name__}: {error}", seconds=seconds_since(began_at))
        say(logging.DEBUG, event, "restore fails: %s", error)
        raise
    if Survivor.is_wanted and start.next_iteration:
        Survivor.note_progress(start.next_iteration - 1)
    start.extra, start.follow = RestoredTensors(extra), follow
    handover.restored(start, stubs, first=place.first)
    if place.rank == 0:
        handover.warn_if_unprotected(members_of(watched.optimizer))
    source = "nodes" if start.plan.kind == "nodes" else "disk" if start.next_iteration else "start"
    event = RESTORE_ENDED(from_=source, iteration=start.next_iteration, seconds=seconds_since(began_at))
    say(logging.DEBUG, event, "iteration %d comes next", start.next_iteration)
    return Restored(start.next_iteration, extra)


def _begin(
    place: Place,
    watched: Watched,
    stubs: Stubs,
    timeout: float,
    checkpoints: str | Path | None,
    copied: Callable[[], CopiedState | None],
) -> tuple[Start, Any]:
    """Begin, or resume. `copied` tries the optimizer out, for which a run that begins has no need here."""

    def make() -> RestartPlan:
        return fence.plan_restore(
            place.job, stubs, timeout, lambda: from_disk.list_checkpoints(checkpoints).generation
        )

    began_at = time.monotonic()
    plan = agree(place, make, plans.from_message, subject="RestartPlan")
    message = plan.message()
    event = RESTORE_AGREED(
        kind=plan.kind,
        iteration=message["iteration"],
        incarnation=plan.incarnation,
        generation=plan.generation,
        why=message["trouble"],
        seconds=seconds_since(began_at),
    )
    say(
        logging.DEBUG,
        event,
        "the shadow nodes have: %s, %s",
        plan.kind,
        at_iteration(message["iteration"]),
    )
    if Survivor.has_trained and not (isinstance(plan, FromNodes) and plan.iteration >= 0):
        raise RestoreError(
            "the shadow nodes hold no state that was trained, and this process has trained, so that it can't "
            "begin again: it ends, and a new one takes its place"
        )
    if isinstance(plan, AfterReset):
        log_once(place, _RESET)
        return Start(plan), None
    if isinstance(plan, RefusedStart):
        raise RestoreError(plan.trouble)
    if isinstance(plan, FromNodes):
        watched = replace(watched, copied=copied())
        if plan.former and plan.iteration >= 0:
            from checkmate.training.start import from_other_ranks  # noqa: PLC0415 - few starts need it

            return from_other_ranks.resume(place, watched, stubs, plan, timeout)
        start = Start(plan, plan.iteration + 1, keep=True)
        survivor = _survivor(place, watched, plan)
        flags = exchange.gather([Survivor.loss is not None, survivor is not None], name_of=place.name_of)
        start.stayed = [rank for rank, (has_stayed, _) in enumerate(flags) if has_stayed]
        start.survivors = [rank for rank, (_, has_kept) in enumerate(flags) if has_kept]
        extra, trouble = _from_nodes(place, watched, stubs, plan, start, timeout, survivor)
        if trouble and start.survivors:
            log_once(place, f"all ranks read the state from shadow nodes: {trouble}")
            start.survivors = ()
            extra, trouble = _from_nodes(place, watched, stubs, plan, start, timeout)
        if not trouble:
            parts = restored_parts(start.record)
            log_once(
                place, f"resumed from the shadow nodes: iteration {start.next_iteration} comes next ({parts})"
            )
            if plan.iteration >= 0 and part_of(start.record, 0).step.last:
                log_once(place, TRAINING_ENDED.format(plan.iteration))
            return start, extra
        trouble = f"iteration {plan.iteration} can't be restored from the shadow nodes: {trouble}"
        without_nodes = partial(
            plans.plan_without_state, plan.incarnation, trouble, plan.generation_seen, plan.discarded
        )
        agreed = agree(place, without_nodes, plans.from_message, subject="RestartPlan")
        if not isinstance(agreed, WithoutState):
            raise exchange.ExchangeError("rank 0 has another Checkmate: install one version on all hosts")
        plan = replace(agreed, marks=plan.marks)
    return _begin_without_nodes(place, watched, plan, checkpoints, copied)


def _begin_without_nodes(
    place: Place,
    watched: Watched,
    plan: NewRun | WithoutState,
    checkpoints: str | Path | None,
    copied: Callable[[], CopiedState | None],
) -> tuple[Start, Any]:
    """Resume from disk, or begin with iteration 0 if there is nothing to resume from."""
    on_disk = agree(
        place,
        lambda: from_disk.list_checkpoints(checkpoints, plan.discarded),
        OnDisk.from_message,
        subject="OnDisk",
    )
    plan = plans.after_disk(plan, on_disk.generation)
    if on_disk.paths:
        if plan.trouble:
            log_once(place, plan.trouble)
        watched = watched if watched.copied is not None else replace(watched, copied=copied())
        return from_disk.resume(place, watched, plan, on_disk)
    if isinstance(plan, WithoutState):
        raise RestoreError(f"{plan.trouble}; {from_disk.no_checkpoint(checkpoints)}; {ANEW}")
    log_once(place, "the shadow nodes hold nothing: training begins with iteration 0")
    return Start(plan), None


def plan_fresh(place: Place, stubs: Stubs, timeout: float) -> RestartPlan:
    """Plan, on all ranks together, a start from iteration 0, for scripts that do not call `restore`."""

    def make() -> RestartPlan:
        generation = from_disk.list_checkpoints(None).generation
        return plans.after_disk(fence.plan_fresh(place.job, stubs, timeout), generation)

    return agree(place, make, plans.from_message, subject="RestartPlan")


def _survivor(place: Place, watched: Watched, plan: FromNodes) -> Survivor | None:
    """Return what this process has kept of the planned iteration's state, if it has."""
    survivor = Survivor.take()
    if survivor is None:
        return None
    try:
        layout = places.lay_out_shares(watched.model, place, slicing_of(place, watched.model))[place.group]
    except LayoutError:  # which reading raises again, on all ranks
        return None
    return survivor if survivor.fits(plan.run, plan.iteration, layout) else None


def _from_nodes(
    place: Place,
    watched: Watched,
    stubs: Stubs,
    plan: FromNodes,
    start: Start,
    timeout: float,
    survivor: Survivor | None = None,
) -> tuple[Any, str]:
    """Read and install the planned iteration; return the user's `extra`, and the errors of all ranks.

    `survivor`: what this rank has kept of its state.
    """
    began_at = time.monotonic()
    readers = sharing.readers_of(place, watched.model, start.survivors)

    def read(readers: Readers | None) -> Fetched:
        return from_nodes.read(place, watched, stubs, plan, timeout, readers, survivor)

    fetched, trouble, unread = run_on_all_ranks(place, partial(read, readers))
    parts = None
    if not trouble:
        tables = exchange.gather(sharing.table(fetched.states) if readers else None, name_of=place.name_of)
        prepare = partial(sharing.prepare, fetched.states, tables, readers, place.name_of)
        parts, trouble, unread = run_on_all_ranks(place, prepare)
    if trouble and unread and any(exchange.gather(readers is not None, name_of=place.name_of)):
        # another division into buckets has other parameters in a shard, for example
        log_once(place, f"each rank reads all of the state, because its part can't be read: {trouble}")
        parts = None
        fetched, trouble, _ = run_on_all_ranks(place, partial(read, None))
    if trouble:
        return None, trouble
    states = sharing.share(fetched.states, parts, place.name_of)
    event = RESTORE_FETCHED(iteration=plan.iteration, seconds=seconds_since(began_at))
    say(logging.DEBUG, event, "state read from the shadow nodes")
    whole = replace(fetched, states=states)
    extra, trouble, _ = run_on_all_ranks(place, lambda: from_nodes.install(place, watched, start, whole))
    return extra, trouble
