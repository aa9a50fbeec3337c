"""A folder of checkpoints: their names, the newest one, and those to keep.

The names alone determine the newest, by generation and iteration. Modification times do not, because clocks
may be wrong, and copies have new ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkmate.consolidate import unfinished
from checkmate.consolidate.disk import DiskError, Format, error_reason, is_checkpoint, read_run

_NAME: Final = re.compile(
    r"(?:generation-(?P<generation>[0-9]{4,})-)?iteration-(?P<iteration>[0-9]{8,})(?:\.pt)?"
)
"""Names without a generation count as generation 0."""


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint in a folder. Newer ones compare greater."""

    generation: int
    iteration: int
    path: Path


def checkpoint_path(folder: Path, generation: int, iteration: int, kind: Format) -> Path:
    """Return an iteration's path: `generation-0002-iteration-00000041`, with `.pt` if it is a file."""
    suffix = ".pt" if kind == "torch" else ""
    return folder / f"generation-{generation:04}-iteration-{iteration:08}{suffix}"


def list_candidates(folder: Path) -> list[StoredCheckpoint]:
    """Return all paths with such names in a folder, complete or not, newest first. May raise `DiskError`."""
    try:
        checkpoints = [
            checkpoint for path in folder.iterdir() if (checkpoint := _parse_name(path)) is not None
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DiskError(f"can't list {folder}: {error_reason(error)}") from None
    return sorted(checkpoints, reverse=True)


def list_complete(folder: Path) -> list[StoredCheckpoint]:
    """Return the complete checkpoints in a folder, the newest first. May raise `DiskError`."""
    try:
        return [checkpoint for checkpoint in list_candidates(folder) if is_checkpoint(checkpoint.path)]
    except OSError as error:
        raise DiskError(f"can't list {folder}: {error_reason(error)}") from None


def _parse_name(path: Path) -> StoredCheckpoint | None:
    match = _NAME.fullmatch(path.name)
    return StoredCheckpoint(int(match["generation"] or 0), int(match["iteration"]), path) if match else None


def choices(place: Path, discarded: int = 0) -> list[Path]:
    """Return the checkpoints to resume from: those in a folder, the newest first, or `place` itself.

    A file is taken for a checkpoint whatever its name is.

    Damaged ones are included, so that an older one is never used silently. Those of a folder that are of a
    run up to the generation `discarded` are not: `checkmate reset` has discarded it.

    Raises:
        DiskError: The folder can't be read.
    """
    return (
        [place]
        if _is_file_or_checkpoint(place)
        else [
            checkpoint.path
            for checkpoint in list_candidates(place)
            if checkpoint.generation > discarded or not discarded
        ]
    )


def _is_file_or_checkpoint(place: Path) -> bool:
    """Return whether a path is a checkpoint or another file, but not a folder of checkpoints."""
    return is_checkpoint(place) or place.is_file()


def greatest_generation(place: Path) -> int:
    """Return the greatest generation in a folder, or beside a checkpoint, or 0. May raise `DiskError`."""
    folder = place.absolute().parent if _is_file_or_checkpoint(place) else place
    return max((checkpoint.generation for checkpoint in list_candidates(folder)), default=0)


def generation_for(folder: Path, run: str, generation: int) -> int:
    """Return the generation under which to write checkpoints of a run.

    It is usually the run's own. It is greater if the folder has newer checkpoints of other runs, because
    shadow nodes and trainers that do not know them may count from 1 again.

    Raises:
        DiskError: The folder can't be read.
    """
    checkpoints = list_candidates(folder)
    if not checkpoints or generation > checkpoints[0].generation:
        return generation
    newest = next(iter(list_complete(folder)), None)
    same = (
        newest is not None and newest.generation == checkpoints[0].generation and read_run(newest.path) == run
    )
    return checkpoints[0].generation + (not same)


def tidy(folder: Path, count: int, newest_path: Path) -> None:
    """Remove all checkpoints except the newest `count`, each generation's newest, and `newest_path`.

    Raises:
        DiskError: Some can't be removed. The others were.
    """
    checkpoints = list_complete(folder)
    newest = {checkpoint.generation: checkpoint for checkpoint in reversed(checkpoints)}
    troubles = []
    for checkpoint in checkpoints[count:]:
        if checkpoint.path == newest_path or newest[checkpoint.generation] == checkpoint:
            continue
        try:
            unfinished.remove(checkpoint.path)
        except OSError as error:
            troubles.append(f"can't remove {checkpoint.path}: {error_reason(error)}")
    if troubles:
        raise DiskError("; ".join(troubles))
