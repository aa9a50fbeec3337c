"""Takes a checkpoint once or at regular iterations, and keeps the last few on disk."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec

from checkmate.consolidate import disk, kept
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import Missing, Snapshot, SnapshotReader
from checkmate.consolidate.torchtitan_keys import keyed_for_torchtitan
from checkmate.job.schema import Job
from checkmate.nodes.standing import Lacking, NoAnswer
from checkmate.nodes.target import LAB_HINT, Source
from checkmate.state import StateError

P = ParamSpec("P")

POLL_SECONDS = 0.3
AGAIN_SECONDS = 10.0
_LISTED = 3
"""The number of unreachable nodes that a message names."""


@dataclass(frozen=True)
class Saved:
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
    nodes: SnapshotReader, path: Path, kind: disk.Format, timeout: float, trouble: Callable[[str], None]
) -> Saved:
    """Save the newest iteration as `path`.

    Args:
        nodes: Reads the snapshot.
        path: The file or folder to write.
        kind: The format.
        timeout: How many seconds to wait for a complete iteration.
        trouble: Called with a message if remains of killed writers beside `path` can't be removed.

    Raises:
        Missing: No iteration was complete in time.
        StateError: Some part of the state can't be decoded.
        DiskError: The checkpoint can't be written.
    """
    start = time.monotonic()
    _try(trouble, disk.clear_unfinished, path.parent)
    return _write(nodes.read(timeout), path, kind, start, over=False)


@dataclass(frozen=True)
class FollowListener:
    """What is called for what `follow` does."""

    saved: Callable[[Saved], None]
    """Called after each checkpoint."""
    trouble: Callable[[str], None]
    """Called with a message: once if nothing is available, which is tried again, and each time that a
    checkpoint can't be written, after which the next one is tried."""
    left: Callable[[str], None]
    """Called with a message if a checkpoint, or what a killed writer left, can't be removed."""
    over: Callable[[], None] = lambda: None
    """Called when state is available again."""
    seen: Callable[[str, int], None] = lambda _, __: None
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
    trouble = listener.trouble
    waiting, shelf = _Waiting(nodes.job, trouble, listener.over), _Shelf(folder, kind, listener.left)
    due, reported = _Due(every), ""
    while not stopped.is_set():
        try:
            source = nodes.source()
            listener.seen(source.beginning.run, source.stepped)
            if due.is_available(source):
                start = time.monotonic()
                one = shelf.put(nodes.read(timeout, at_least=due.iteration), start)
                listener.saved(one)
                due.saved(one)
                _try(listener.left, kept.tidy, folder, keep, one.path)
            reported = ""
            waiting.end()
        except disk.DiskError as error:
            waiting.end()  # reading has succeeded
            due.failed()
            if not (due.ended and str(error) == reported):
                trouble(str(error))
            reported = str(error)
            if due.ended:
                stopped.wait(AGAIN_SECONDS)  # no other iteration follows: try the last one again
        except (Lacking, Missing, StateError) as error:
            waiting.for_(error)
        stopped.wait(POLL_SECONDS)


class _Due:
    """The iteration to save next: each `every`th, and the last of all."""

    def __init__(self, every: int) -> None:
        self.iteration = -1
        self.ended = False
        """Whether training is complete."""
        self._every = every
        self._saved = ("", -1)

    def is_available(self, source: Source) -> bool:
        """Return whether it is stepped, or is the next one to be stepped."""
        stepped, self.ended = source.stepped, source.has_ended
        if not stepped - self._every < self.iteration <= stepped + self._every:
            self.iteration = next_due(stepped, self._every)  # the first time, or training went back
        if self.ended and stepped >= 0 and self._saved != (source.beginning.run, stepped):
            self.iteration = stepped
        return stepped >= self.iteration - (not self.ended)

    def saved(self, one: Saved) -> None:
        """Note that it, or a later one, was saved."""
        self._saved = (one.run, one.iteration)
        self.iteration = next_due(one.iteration + 1, self._every)

    def failed(self) -> None:
        """Skip it."""
        self.iteration = next_due(self.iteration + 1, self._every)


class _Shelf:
    """Writes checkpoints to a folder, under names that sort the last one as the newest."""

    def __init__(self, folder: Path, kind: disk.Format, left: Callable[[str], None]) -> None:
        self._folder, self._kind, self._left = folder, kind, left
        self._run, self._generation = "", 0

    def put(self, snapshot: Snapshot, start: float) -> Saved:
        """Save a snapshot. Raise `DiskError` if it can't be written."""
        _try(self._left, disk.clear_unfinished, self._folder)
        if snapshot.run != self._run:
            self._generation = kept.generation_for(self._folder, snapshot.run, snapshot.generation)
            self._run = snapshot.run
        numbered = replace(snapshot, generation=self._generation)
        path = kept.path_of(self._folder, self._generation, snapshot.iteration, self._kind)
        return _write(numbered, path, self._kind, start, over=True)


def _try(trouble: Callable[[str], None], do: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function on which nothing else depends; report its `DiskError`."""
    try:
        do(*args, **kwargs)
    except disk.DiskError as error:
        trouble(str(error))


class _Waiting:
    """Reports a time without available state: when it begins, when further shards fail, when it is over.

    It does not report again when only the wording changes, as nodes are restarted and seeded. It reports each
    reason for which a shard is wrong (`Lacking.wrong`) once, ignoring numbers.
    """

    def __init__(self, job: Job, begun: Callable[[str], None], over: Callable[[], None]) -> None:
        self._job, self._begun, self._over = job, begun, over
        self._reported: set[object] = set()

    def for_(self, error: Lacking | Missing | StateError) -> None:
        """Note a failed attempt."""
        lacking = error if isinstance(error, Lacking) else error.__cause__
        of: set[object] = {str(error)}
        if isinstance(lacking, Lacking):
            of = {*lacking.shards, *((shard, _wrong(lacking.shards[shard])) for shard in lacking.wrong)}
        if not of <= self._reported:
            self._begun(_unreached(self._job, lacking) if isinstance(lacking, NoAnswer) else str(error))
        self._reported |= of

    def end(self) -> None:
        """Note a successful attempt."""
        if self._reported:
            self._over()
        self._reported.clear()


def _wrong(troubles: list[str]) -> str:
    """Return troubles without numbers, which change with every iteration."""
    return re.sub(r"\d+", "", ", ".join(troubles))


def _unreached(job: Job, error: NoAnswer) -> str:
    """Return a message that names each node once, even if it holds several shards."""
    found = list(dict.fromkeys(text for troubles in error.shards.values() for text in troubles))
    more = f", and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"no shadow node of job {job.job} can be reached: {', '.join(found[:_LISTED])}{more}; {LAB_HINT}"


def next_due(iteration: int, every: int) -> int:
    """Return the first iteration t, not before this one or 0, for which t + 1 is a multiple of `every`."""
    return (max(iteration, 0) // every + 1) * every - 1


def _write(snapshot: Snapshot, path: Path, kind: disk.Format, start: float, *, over: bool) -> Saved:
    made = checkpoint(snapshot, by_name=kind != "torch")
    nbytes = disk.save(keyed_for_torchtitan(made) if kind == "torchtitan" else made, path, kind, replace=over)
    return Saved(
        path,
        snapshot.job.job,
        snapshot.run,
        snapshot.generation,
        snapshot.iteration,
        sum(group.layout.shards for group in snapshot.groups),
        nbytes,
        time.monotonic() - start,
    )
