"""Takes a checkpoint, once or every so many iterations, and keeps the last few on disk."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec

import torch

from checkmate.consolidate import disk, kept
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import Missing, Snapshot, SnapshotReader
from checkmate.job.schema import Job
from checkmate.nodes.offers import LAB_HINT, Source
from checkmate.nodes.standing import Lacking, NoAnswer
from checkmate.state import StateError

P = ParamSpec("P")

POLL_SECONDS = 0.3
AGAIN_SECONDS = 10.0
_NAMED = 3
"""Of nodes that can't be reached."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk now. `nbytes`: of parameters and optimizer state."""

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
    """Save the newest iteration as `path`. `Missing` if there is none in time, `DiskError`.

    `trouble` is told what can't be removed of what killed writers have left beside it.
    """
    start = time.monotonic()
    _try(trouble, disk.clear_unfinished, path.parent)
    return _write(nodes.read(timeout), path, kind, start, over=False)


def follow(
    nodes: SnapshotReader,
    folder: Path,
    kind: disk.Format,
    timeout: float,
    every: int,
    keep: int,
    stopped: threading.Event,
    saved: Callable[[Saved], None],
    trouble: Callable[[str], None],
    over: Callable[[], None] = lambda: None,
) -> None:
    """Save each iteration t for which t + 1 is a multiple of `every`, or the first after it that can be had,
    and the last one of all.

    The last `keep` stay in `folder`, and the last of each generation. Until `stopped`: what can't be had now
    is told to `trouble`, once, and tried again; `over` is called once it can be had. What can't be written or
    removed is told each time that one is due, and the next one is tried.
    """
    waiting, shelf = _Waiting(nodes.job, trouble, over), _Shelf(folder, kind, trouble)
    due, told = _Due(every), ""
    while not stopped.is_set():
        try:
            if due.can_be_had(nodes.source()):
                start = time.monotonic()
                one = shelf.put(nodes.read(timeout, at_least=due.iteration), start)
                saved(one)
                due.saved(one)
                _try(trouble, kept.tidy, folder, keep, one.path)
            told = ""
            waiting.end()
        except disk.DiskError as error:
            waiting.end()  # it was had
            due.failed()
            if not (due.ended and str(error) == told):
                trouble(str(error))
            told = str(error)
            if due.ended:
                stopped.wait(AGAIN_SECONDS)  # nothing else comes: the last one is tried again
        except (Lacking, Missing, StateError) as error:
            waiting.for_(error)
        stopped.wait(POLL_SECONDS)


class _Due:
    """The iteration that is to be saved next: each `every`th, and the last of all."""

    def __init__(self, every: int) -> None:
        self.iteration = -1
        self.ended = False
        """Whether training has come to its end."""
        self._every = every
        self._saved = ("", -1)

    def can_be_had(self, source: Source) -> bool:
        """Whether it is stepped, or the next one that will be."""
        stepped, self.ended = source.stepped, source.ended
        if not stepped - self._every < self.iteration <= stepped + self._every:
            self.iteration = next_due(stepped, self._every)  # the first time, or training went back
        if self.ended and stepped >= 0 and self._saved != (source.beginning.run, stepped):
            self.iteration = stepped
        return stepped >= self.iteration - (not self.ended)

    def saved(self, one: Saved) -> None:
        """It is done, or one after it."""
        self._saved = (one.run, one.iteration)
        self.iteration = next_due(one.iteration + 1, self._every)

    def failed(self) -> None:
        """It is passed over."""
        self.iteration = next_due(self.iteration + 1, self._every)


class _Shelf:
    """Puts checkpoints into a folder, under names by which the last one is the newest."""

    def __init__(self, folder: Path, kind: disk.Format, trouble: Callable[[str], None]) -> None:
        self._folder, self._kind, self._trouble = folder, kind, trouble
        self._run, self._generation = "", 0

    def put(self, snapshot: Snapshot, start: float) -> Saved:
        """Save a snapshot. `DiskError`."""
        _try(self._trouble, disk.clear_unfinished, self._folder)
        if snapshot.run != self._run:
            self._generation = kept.generation_for(self._folder, snapshot.run, snapshot.generation)
            self._run = snapshot.run
        numbered = replace(snapshot, generation=self._generation)
        path = kept.path_of(self._folder, self._generation, snapshot.iteration, self._kind)
        return _write(numbered, path, self._kind, start, over=True)


def _try(trouble: Callable[[str], None], do: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do what nothing else depends on; tell if it fails."""
    try:
        do(*args, **kwargs)
    except disk.DiskError as error:
        trouble(str(error))


class _Waiting:
    """Tells of a time in which nothing can be had: when it begins, of shards that join in, when it is over.

    How nodes put it changes from attempt to attempt, as they are started again and seeded: that is no news.
    What is wrong with a shard itself (`Lacking.wrong`) is told once for each reason, whatever its numbers.
    """

    def __init__(self, job: Job, begun: Callable[[str], None], over: Callable[[], None]) -> None:
        self._job, self._begun, self._over = job, begun, over
        self._told: set[object] = set()

    def for_(self, error: Lacking | Missing | StateError) -> None:
        """Another attempt has failed."""
        lacking = error if isinstance(error, Lacking) else error.__cause__
        of: set[object] = {str(error)}
        if isinstance(lacking, Lacking):
            of = {*lacking.shards, *((shard, _wrong(lacking.shards[shard])) for shard in lacking.wrong)}
        if not of <= self._told:
            self._begun(_unreached(self._job, lacking) if isinstance(lacking, NoAnswer) else str(error))
        self._told |= of

    def end(self) -> None:
        """An attempt has not failed."""
        if self._told:
            self._over()
        self._told.clear()


def _wrong(troubles: list[str]) -> str:
    """The same for every iteration."""
    return re.sub(r"\d+", "", ", ".join(troubles))


def _unreached(job: Job, error: NoAnswer) -> str:
    """Each node once, though it holds several shards."""
    said = list(dict.fromkeys(text for troubles in error.shards.values() for text in troubles))
    more = f", and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return f"no shadow node of job {job.job} can be reached: {', '.join(said[:_NAMED])}{more}; {LAB_HINT}"


def next_due(iteration: int, every: int) -> int:
    """The first iteration from this one on (and 0) after which so many more are done."""
    return (max(iteration, 0) // every + 1) * every - 1


def _write(snapshot: Snapshot, path: Path, kind: disk.Format, start: float, *, over: bool) -> Saved:
    disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind, replace=over)
    states = [values for group in snapshot.groups for values in group.states.values()]
    tensors = [
        t for tensor, values in states for t in (tensor, *values.values()) if isinstance(t, torch.Tensor)
    ]
    return Saved(
        path,
        snapshot.job.job,
        snapshot.run,
        snapshot.generation,
        snapshot.iteration,
        sum(group.layout.shards for group in snapshot.groups),
        sum(tensor.nbytes for tensor in tensors),
        time.monotonic() - start,
    )
