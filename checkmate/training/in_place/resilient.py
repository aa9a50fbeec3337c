"""`checkmate.resilient`: call a training function again after a failure elsewhere, in the same process."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch.distributed as dist

from checkmate import state
from checkmate.base.machine_memory import trim
from checkmate.base.wording import in_ranges
from checkmate.errors import CheckmateError
from checkmate.events.kinds import TRAINER_RANK_LOST
from checkmate.events.process_log import say
from checkmate.job.partial import replicas_there
from checkmate.job.schema import Job
from checkmate.keys.access import access
from checkmate.keys.roles import Role
from checkmate.launch.word import Speaker, Word
from checkmate.nodes.stubs import Stubs
from checkmate.ring.place import RingError
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import START_BYTES
from checkmate.training.default_log import show_log
from checkmate.training.errors import RegroupError, SessionError
from checkmate.training.in_place.attendance import Attendance, MeetingError, TrainingEnded
from checkmate.training.in_place.groups import ProcessGroups, Wrappers
from checkmate.training.kept_events import keep_events
from checkmate.training.protect import Protection
from checkmate.training.record.generators import capture_generators, install_generators
from checkmate.training.start.all_ranks import RestoreError
from checkmate.training.start.exchange import ExchangeError
from checkmate.training.start.named_job import follow_replicas, whole_job
from checkmate.training.start.survivor import Loss, Survivor

_log: Final = logging.getLogger("checkmate")

T = TypeVar("T")

ATTEMPTS: Final = 3
PATIENCE: Final = 60.0
MEETING_SECONDS: Final = 300.0
COLLECTIVE_SECONDS: Final = 600.0
WORD_SECONDS: Final = 5.0
"""Seconds that a failed collective waits for a shadow node's word on which rank is lost."""
LATE_SECONDS: Final = 30.0
"""Seconds in which an iteration must have ended after ranks are back; then it is broken off."""
_ELSEWHERE: Final = (RingError, MeetingError, RestoreError, ExchangeError)
"""Errors of ours that another rank's death may cause. The script itself has caused all others."""


def resilient(
    train: Callable[[], T],
    *,
    backend: str | None = None,
    timeout: float = COLLECTIVE_SECONDS,
    wait: float = MEETING_SECONDS,
    patience: float = PATIENCE,
    attempts: int = ATTEMPTS,
    keep: bool = False,
) -> T:
    """Call a training function, and call it again in this process when another rank is lost.

    All ranks call it, without a process group: it makes the default one, by way of the shadow nodes, before
    each call. The environment has RANK, WORLD_SIZE and CHECKMATE_JOB. Something has to start a lost rank's
    process again, and only that: `checkmate launch`, or torchrun with an agent for each rank.

        model, optimizer = build()           # once in a process
        def train():
            ddp = DistributedDataParallel(model)          # each time: it belongs to a process group
            first, extra = checkmate.restore(ddp, optimizer)
            with checkmate.protect(ddp, optimizer) as protection:
                for batch in protection.steps(batches(first)):
                    ...
        checkmate.resilient(train)

    Args:
        train: Wraps the model, calls `restore` and `protect`, and trains. It may make model and
            optimizer, too.
        backend: Of the default process group, as for `torch.distributed.init_process_group`: by default gloo,
            and NCCL for tensors on GPUs.
        timeout: Seconds that a collective may take.
        wait: Seconds to wait until all ranks have met. Then `MeetingError` ends the process, so that all
            ranks can be started again.
        patience: Seconds in which the function must have ended after another rank was lost. Then the process
            is ended: it hangs, or catches every error.
        attempts: Calls that may fail without a newly completed iteration between them.
        keep: Whether survivors keep parameters and optimizer state, if the nodes have the same iteration, and
            share out what a new process lacks; else all ranks read them from the nodes. On CPUs only. The
            script must not change parameters other than by the optimizer's step, not even for a forward.

    Returns:
        The function's result, once all ranks have one.

    Raises:
        MeetingError: The ranks have not met, a rank can't go on, or too many attempts have failed.
        SessionError: There is a process group already, or the environment contradicts the job.
        Others: The function's own, unless another rank's loss has caused it.
    """
    job = whole_job()
    rank = _own_rank(job)
    environment = {name: value for name, value in os.environ.items() if name in ("RANK", "WORLD_SIZE")}
    if rank == 0:
        show_log()
    keep_events(rank, job.job)
    initial = state.load_generators(state.dump_generators(capture_generators()))
    failures = FailedAttempts(attempts)
    token = secrets.token_bytes(START_BYTES)
    speaker = Speaker()
    speaker.start(_has_trained)
    Survivor.is_wanted, Survivor.is_kept = True, keep
    thaws = not gc.get_freeze_count()
    gc.freeze()  # what imports have created stays, and to search it takes a second at each release
    try:
        while True:
            if failures.count and not Survivor.has_trained:  # as a new process would begin
                install_generators(dict(initial))
            with Stubs(job, access(job, Role.TRAINER).keys) as stubs:
                attendance = Attendance(job, rank, stubs, token, trained=Survivor.has_trained)
                attempt = Attempt(attendance, job, rank, patience, speaker)
                try:
                    outcome = attempt.run(train, backend, timeout, wait)
                finally:
                    attempt.close()
            if not isinstance(outcome, Loss):
                return outcome.result
            failures.add(outcome)
            Survivor.loss = outcome
    except TrainingEnded as error:
        show_log()
        _log.info("rank %d: %s", rank, error)
        raise SystemExit(0) from None
    finally:
        Survivor.is_wanted = False
        follow_replicas(())
        os.environ.pop("RANK", None)
        os.environ.pop("WORLD_SIZE", None)
        os.environ.update(environment)
        speaker.close()
        if thaws:
            gc.unfreeze()


def _own_rank(job: Job) -> int:
    """Return this process's rank. Raise `SessionError` if the environment has others than the job."""
    if dist.is_initialized():
        raise SessionError(
            "checkmate.resilient makes the default process group itself, again after each failure: leave out "
            "torch.distributed.init_process_group"
        )
    total = job.rank_count
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal()) or int(world) != total or int(rank) >= total:
        raise SessionError(
            f"RANK is {rank} and WORLD_SIZE {world}, but the job {job.job} has {total} ranks: start the "
            "script with `checkmate launch`, or with torchrun"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise SessionError(
            "torchrun has started several ranks with one agent, which ends all of them when one dies: use "
            "`checkmate launch`, or an agent for each rank: torchrun --nnodes RANKS --node-rank R "
            "--nproc-per-node 1, without --rdzv-backend"
        )
    return int(rank)


def _has_trained() -> bool:
    """Return whether this process has trained an iteration, in this attempt or another."""
    protection = Protection.present
    return Survivor.has_trained or (protection is not None and protection.has_trained)


class FailedAttempts:
    """Attempts that have failed without a newly completed iteration between them. Pure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reached = -1
        self._in_a_row = 0
        self.count = 0
        """All of them."""

    def add(self, loss: Loss) -> None:
        """Count one. Raise `MeetingError` if there are too many."""
        self.count += 1
        self._in_a_row = 1 if loss.iteration > self._reached else self._in_a_row + 1
        self._reached = max(self._reached, loss.iteration)
        if self._in_a_row >= self._most:
            raise MeetingError(
                f"{self._in_a_row} attempts in a row have failed without a newly completed iteration; the "
                f"last one: {loss.words}"
            )


@dataclass(frozen=True)
class Completion(Generic[T]):
    """The end of training, on all ranks."""

    result: T


class Attempt:
    """One call of the training function, from the meeting on. `close` releases all that belongs to it."""

    def __init__(
        self, attendance: Attendance, job: Job, rank: int, patience: float, speaker: Speaker
    ) -> None:
        self._attendance, self._speaker = attendance, speaker
        self._job, self._rank = job, rank
        self._patience = patience
        self._groups: ProcessGroups | None = None
        self._wrappers = Wrappers()
        self._timers = _Timers()
        self._is_broken_off = False
        """Whether collectives fail because ranks are back."""
        self._undo = ExitStack()
        self._undo.callback(attendance.close)

    def run(
        self, train: Callable[[], T], backend: str | None, timeout: float, wait: float
    ) -> Completion[T] | Loss:
        """Meet, and call the function; return its result, or why it has failed if that is elsewhere."""
        try:
            meeting = self._attendance.await_meeting(wait)
            self._speaker.say(Word.MET)
            number, world = self._follow(meeting)
            self._attendance.when_lost(self._on_loss)
            self._groups = ProcessGroups(self._attendance.store(timeout), number, world, backend, timeout)
            if self._attendance.loss is not None:  # before there was anything to abort
                self._groups.abort()
            self._attendance.when_returned(self._on_return)
            with self._wrappers.watch(broadcast=not meeting.trained):
                result = train()
            if (protection := Protection.present) is not None:
                protection.close()
            if Protection.has_left:
                raise RegroupError(Protection.regrouping)  # which the script has caught
            self._attendance.conclude()
            if self._attendance.await_all_done():
                self._speaker.say(Word.CONCLUDED)
                self._groups.end()
                return Completion(result)
            words = self._attendance.loss or self._attendance.verdict
        except TrainingEnded:
            raise
        except Exception as error:
            words = self._elsewhere(error)
            if not words:
                if isinstance(error, CheckmateError) and not isinstance(error, _ELSEWHERE):
                    self._attendance.conclude(f"{type(error).__name__}: {error}")
                    self._speaker.say(Word.FINAL)
                raise
            if (protection := Protection.present) is not None:
                protection.fail()
            _forget(error)
        if self._attendance.verdict:
            self._speaker.say(Word.FINAL)
            raise MeetingError(f"training ends, because a rank can't go on: {self._attendance.verdict}")
        event = TRAINER_RANK_LOST(rank=self._attendance.lost_rank, why=words)
        say(logging.WARNING if self._rank == 0 else logging.DEBUG, event, "%s; recovering in place", words)
        self._release()
        return Loss(words, Survivor.reached, time.monotonic())

    def close(self) -> None:
        """Leave the meeting, and end what watches over it."""
        self._timers.end()
        Protection.regrouping, Protection.has_left = "", False
        self._undo.close()

    def _follow(self, meeting: pb.Meeting) -> tuple[int, int]:
        """Have the script see the job with the replicas that take part; return its rank and world size."""
        ranks = sorted(meeting.ranks)
        present = replicas_there(self._job, frozenset(ranks))
        is_whole = len(ranks) == self._job.rank_count
        follow_replicas(() if is_whole else present)
        number = ranks.index(self._rank)
        os.environ.update({"RANK": str(number), "WORLD_SIZE": str(len(ranks))})
        if not is_whole and number == 0:
            _log.warning(
                "training goes on with %d of %d replicas of the model; others come when they are back",
                len(present),
                len(self._job.dp_groups[0].ranks),
            )
        return number, len(ranks)

    def _on_return(self) -> None:
        """Have the function be left at the end of its iteration, or in a while if it marks none."""
        Protection.regrouping = f"{_words(self._attendance.returned)} back, and takes part from now on"
        self._timers.start("late", LATE_SECONDS, self._leave_at_once)

    def _leave_at_once(self) -> None:
        """Have collectives fail: the script marks no iterations, or one takes long."""
        self._is_broken_off = True
        if self._groups is not None:
            self._groups.abort()

    def _elsewhere(self, error: Exception) -> str:
        """Return which rank's loss has caused an error, or ""."""
        attendance = self._attendance
        if attendance.verdict:
            return attendance.verdict
        is_ours = isinstance(error, CheckmateError) and not isinstance(error, _ELSEWHERE)
        if attendance.loss is None and Protection.regrouping and _comes_of_regrouping(error):
            return Protection.regrouping
        if attendance.loss is None and isinstance(error, RuntimeError | OSError) and not is_ours:
            if self._is_broken_off:
                return Protection.regrouping
            attendance.await_loss(WORD_SECONDS)
        if attendance.is_blind and attendance.loss is None and not is_ours:
            return f"a shadow node can't be heard, and a collective has failed: {error}"
        return attendance.loss or ""

    def _on_loss(self) -> None:
        """Have the function end, which may wait in a collective; end the process if it does not."""
        self._timers.start("overdue", self._patience, self._end_process)
        if self._groups is not None:
            self._groups.abort()

    def _end_process(self) -> None:
        _log.error(
            "the training function has not ended %g s after a rank was lost (%s): this process ends, and has "
            "to be started again. Does the script catch every error, or hang?",
            self._patience,
            self._attendance.loss or self._attendance.verdict,
        )
        logging.shutdown()
        os._exit(1)

    def _release(self) -> None:
        """Destroy process groups, and what the function has left in memory."""
        self._wrappers.release()
        if self._groups is not None:
            self._groups.release()
        gc.collect()
        trim()  # buckets and buffers come again in other sizes, so that freed memory would add up


def _words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {in_ranges(list(ranks))} {'are' if len(ranks) > 1 else 'is'}"


class _Timers:
    """One timer of each name, until `end`: what is told twice, or late, starts none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timers: dict[str, threading.Timer] = {}
        self._has_ended = False

    def start(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        """Have a function called in some seconds, unless there is such a timer already."""
        with self._lock:
            if self._has_ended or name in self._timers:
                return
            timer = self._timers[name] = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()

    def end(self) -> None:
        """Cancel all."""
        with self._lock:
            self._has_ended = True
            for timer in self._timers.values():
                timer.cancel()


def _comes_of_regrouping(error: Exception) -> bool:
    """Return whether an error is that by which the function is left, or was raised in handling it."""
    if isinstance(error, RegroupError):
        return True
    if not any(isinstance(link, RegroupError) for link in _chain(error)):
        return False
    _log.warning("the script has raised %s: %s when it was left", type(error).__name__, error)
    return True


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error, and all that it came of."""
    chain: list[BaseException] = [error]
    for link in chain:
        sources = [link.__cause__, link.__context__]
        chain += [source for source in sources if source is not None and source not in chain]
    return chain


def _forget(error: BaseException) -> None:
    """Drop what an error's frames keep alive: process groups, and with them the sockets of gloo."""
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
