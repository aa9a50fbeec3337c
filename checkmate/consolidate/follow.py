"""Takes a checkpoint once or at regular iterations, and keeps the last few on disk."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec

from checkmate.consolidate import checkpoint_folder, disk
from checkmate.consolidate.assemble import checkpoint, keyed_for_torchtitan
from checkmate.consolidate.snapshot import Missing, Snapshot, SnapshotReader
from checkmate.job.schema import Job
from checkmate.nodes.standing import Lacking, NoAnswer
from checkmate.nodes.target import LAB_HINT, Source
from checkmate.state import StateError

P = ParamSpec("P")

POLL_SECONDS = 0.3
AGAIN_SECONDS = 10.0
_MAX_NAMED = 3
"""The number of unreachable nodes that a message names."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk. `nbytes`: the size of its files."""

    path: Path
    job: str
    run: str
    generation: int
    iteration: int
    shards: int
    nbytes: int
    seconds: float


def take(
    nodes: SnapshotReader, path: Path, kind: disk.Format, timeout: float, on_trouble: Callable[[str], None]
) -> SavedCheckpoint:
    """Save the newest iteration as `path`.

    Args:
        nodes: Reads the snapshot.
        path: The file or folder to write.
        kind: The format.
        timeout: How many seconds to wait for a complete iteration.
        on_trouble: Called with a message if remains of killed writers beside `path` can't be removed.

    Raises:
        Missing: No iteration was complete in time.
        StateError: Some part of the state can't be decoded.
        DiskError: The checkpoint can't be written.
    """
    start = time.monotonic()
    _try(on_trouble, disk.clear_unfinished, path.parent)
    return _write(nodes.read(timeout), path, kind, start, replaces=False)


@dataclass(frozen=True)
class FollowListener:
    """The functions that `follow` calls."""

    on_saved: Callable[[SavedCheckpoint], None]
    """Called after each checkpoint."""
    on_trouble: Callable[[str], None]
    """Called with a message: once if nothing is available, which is tried again, and each time that a
    checkpoint can't be written, after which the next one is tried."""
    on_leftover: Callable[[str], None]
    """Called with a message if a checkpoint, or what a killed writer left, can't be removed."""
    on_recovery: Callable[[], None] = lambda: None
    """Called when state is available again."""
    on_progress: Callable[[str, int], None] = lambda _, __: None
    """Called with the run and the iteration that the shadow nodes have, twice a second or so."""


def follow(
    nodes: SnapshotReader,
    folder: Path,
    kind: disk.Format,
    timeout: float,
    every: int,
    keep: int,
    stopped: threading.Event,
    listener: FollowListener,
) -> None:
    """Save every `every`th iteration and the last one of all, until stopped.

    Iteration t is due if t + 1 is a multiple of `every`. If it is not available any more, the next one is
    saved.

    Args:
        nodes: Reads the snapshots.
        folder: The folder to write to.
        kind: The format.
        timeout: How many seconds to wait for a complete iteration.
        every: The number of iterations between checkpoints.
        keep: The number of checkpoints to keep, besides the last one of each generation.
        stopped: Set it to stop.
        listener: Called for each checkpoint, and for what prevents one.
    """
    on_trouble = listener.on_trouble
    waiting, shelf = (
        _Waiting(nodes.job, on_trouble, listener.on_recovery),
        _Shelf(folder, kind, listener.on_leftover),
    )
    schedule, reported = _Schedule(every), ""
    while not stopped.is_set():
        try:
            source = nodes.source()
            listener.on_progress(source.beginning.run, source.stepped)
            if schedule.is_available(source):
                start = time.monotonic()
                checkpoint = shelf.write(nodes.read(timeout, at_least=schedule.iteration), start)
                listener.on_saved(checkpoint)
                schedule.note_saved(checkpoint)
                _try(listener.on_leftover, checkpoint_folder.tidy, folder, keep, checkpoint.path)
            reported = ""
            waiting.end()
        except disk.DiskError as error:
            waiting.end()  # reading has succeeded
            schedule.skip()
            if not (schedule.has_ended and str(error) == reported):
                on_trouble(str(error))
            reported = str(error)
            if schedule.has_ended:
                stopped.wait(AGAIN_SECONDS)  # no other iteration follows: try the last one again
        except (Lacking, Missing, StateError) as error:
            waiting.for_(error)
        stopped.wait(POLL_SECONDS)


class _Schedule:
    """The iteration to save next: each `every`th, and the last of all."""

    def __init__(self, every: int) -> None:
        self.iteration = -1
        self.has_ended = False
        """True if training is complete."""
        self._every = every
        self._last_saved = ("", -1)

    def is_available(self, source: Source) -> bool:
        """Return whether it is stepped, or is the next one to be stepped."""
        stepped, self.has_ended = source.stepped, source.has_ended
        if not stepped - self._every < self.iteration <= stepped + self._every:
            self.iteration = next_due(stepped, self._every)  # the first time, or training went back
        if self.has_ended and stepped >= 0 and self._last_saved != (source.beginning.run, stepped):
            self.iteration = stepped
        return stepped >= self.iteration - (not self.has_ended)

    def note_saved(self, checkpoint: SavedCheckpoint) -> None:
        """Note that it, or a later one, was saved."""
        self._last_saved = (checkpoint.run, checkpoint.iteration)
        self.iteration = next_due(checkpoint.iteration + 1, self._every)

    def skip(self) -> None:
        """Skip it."""
        self.iteration = next_due(self.iteration + 1, self._every)


class _Shelf:
    """Writes checkpoints to a folder, under names that sort the last one as the newest."""

    def __init__(self, folder: Path, kind: disk.Format, on_leftover: Callable[[str], None]) -> None:
        self._folder, self._kind, self._on_leftover = folder, kind, on_leftover
        self._run, self._generation = "", 0

    def write(self, snapshot: Snapshot, start: float) -> SavedCheckpoint:
        """Save a snapshot. Raise `DiskError` if it can't be written."""
        _try(self._on_leftover, disk.clear_unfinished, self._folder)
        if snapshot.run != self._run:
            self._generation = checkpoint_folder.generation_for(
                self._folder, snapshot.run, snapshot.generation
            )
            self._run = snapshot.run
        numbered = replace(snapshot, generation=self._generation)
        path = checkpoint_folder.checkpoint_path(
            self._folder, self._generation, snapshot.iteration, self._kind
        )
        return _write(numbered, path, self._kind, start, replaces=True)


def _try(on_trouble: Callable[[str], None], do: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function on which nothing else depends; report its `DiskError`."""
    try:
        do(*args, **kwargs)
    except disk.DiskError as error:
        on_trouble(str(error))


class _Waiting:
    """Reports a time without available state: when it begins, when further shards fail, when it is over.

    It does not report again when only the wording changes, as nodes are restarted and seeded. It reports each
    reason for which a shard is wrong (`Lacking.wrong`) once, ignoring numbers.
    """

    def __init__(self, job: Job, on_begin: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._job, self._on_begin, self._on_end = job, on_begin, on_end
        self._reported: set[object] = set()

    def for_(self, error: Lacking | Missing | StateError) -> None:
        """Note a failed attempt."""
        lacking = error if isinstance(error, Lacking) else error.__cause__
        of: set[object] = {str(error)}
        if isinstance(lacking, Lacking):
            of = {*lacking.shards, *((shard, _wrong(lacking.shards[shard])) for shard in lacking.wrong)}
        if not of <= self._reported:
            self._on_begin(_unreached(self._job, lacking) if isinstance(lacking, NoAnswer) else str(error))
        self._reported |= of

    def end(self) -> None:
        """Note a successful attempt."""
        if self._reported:
            self._on_end()
        self._reported.clear()


def _wrong(troubles: list[str]) -> str:
    """Return troubles without numbers, which change with every iteration."""
    return re.sub(r"\d+", "", ", ".join(troubles))


def _unreached(job: Job, error: NoAnswer) -> str:
    """Return a message that names each node once, even if it holds several shards."""
    reasons = list(dict.fromkeys(text for troubles in error.shards.values() for text in troubles))
    more = f", and {len(reasons) - _MAX_NAMED} more" if len(reasons) > _MAX_NAMED else ""
    return (
        f"no shadow node of job {job.job} can be reached: {', '.join(reasons[:_MAX_NAMED])}{more}; {LAB_HINT}"
    )


def next_due(iteration: int, every: int) -> int:
    """Return the first iteration t, not before this one or 0, for which t + 1 is a multiple of `every`."""
    return (max(iteration, 0) // every + 1) * every - 1


def _write(
    snapshot: Snapshot, path: Path, kind: disk.Format, start: float, *, replaces: bool
) -> SavedCheckpoint:
    document = checkpoint(snapshot, by_name=kind != "torch")
    nbytes = disk.save(
        keyed_for_torchtitan(document) if kind == "torchtitan" else document, path, kind, replace=replaces
    )
    return SavedCheckpoint(
        path,
        snapshot.job.job,
        snapshot.run,
        snapshot.generation,
        snapshot.iteration,
        sum(group.layout.shards for group in snapshot.groups),
        nbytes,
        time.monotonic() - start,
    )
