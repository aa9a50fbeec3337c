"""Takes a checkpoint, once or every so many iterations, and keeps the last few on disk."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import torch

from checkmate.consolidate import disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import Missing, Snapshot, SnapshotReader
from checkmate.nodes.offers import LAB_HINT
from checkmate.nodes.standing import Lacking, NoAnswer
from checkmate.schema import Job
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
    return _write(nodes.read(timeout), path, kind, start, replace=False)


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

    The last `keep` stay in `folder`. Until `stopped`: what can't be had now is told to `trouble`, once, and
    tried again; `over` is called once it can be had. What can't be written or removed is told each time that
    one is due, and the next one is tried.
    """
    due, told, ended = -1, "", False
    waiting = _Waiting(nodes.job, trouble, over)
    newest = ("", -1)  # that is saved: its run and iteration
    while not stopped.is_set():
        try:
            source = nodes.source()
            stepped, ended = source.stepped, source.ended
            if not stepped - every < due <= stepped + every:
                due = next_due(stepped, every)  # the first time, or training went back
            if ended and stepped >= 0 and newest != (source.beginning.run, stepped):
                due = stepped
            if stepped >= due - (not ended):
                start = time.monotonic()
                snapshot = nodes.read(timeout, at_least=due)
                _try(trouble, disk.clear_unfinished, folder)
                path = disk.path_of(folder, snapshot.iteration, kind)
                saved(_write(snapshot, path, kind, start, replace=True))
                newest = (snapshot.run, snapshot.iteration)
                _try(trouble, disk.keep, folder, keep)
                due = next_due(snapshot.iteration + 1, every)
            told = ""
            waiting.end()
        except disk.DiskError as error:
            waiting.end()  # it was had
            due = next_due(due + 1, every)
            if not (ended and str(error) == told):
                trouble(str(error))
            told = str(error)
            if ended:
                stopped.wait(AGAIN_SECONDS)  # nothing else comes: the last one is tried again
        except (Lacking, Missing, StateError) as error:
            waiting.for_(error)
        stopped.wait(POLL_SECONDS)


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


def _write(snapshot: Snapshot, path: Path, kind: disk.Format, start: float, *, replace: bool) -> Saved:
    disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind, replace=replace)
    states = [values for group in snapshot.groups for values in group.states.values()]
    tensors = [
        t for tensor, values in states for t in (tensor, *values.values()) if isinstance(t, torch.Tensor)
    ]
    return Saved(
        path,
        snapshot.job.job,
        snapshot.run,
        snapshot.iteration,
        sum(group.layout.shards for group in snapshot.groups),
        sum(tensor.nbytes for tensor in tensors),
        time.monotonic() - start,
    )
