"""A folder of checkpoints: how they are named, which is the newest, which stay.

Names alone say which is the newest, by generation and iteration. The time of writing doesn't: clocks go
wrong, and a copy has a new one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkmate.consolidate import unfinished
from checkmate.consolidate.disk import DiskError, Format, is_checkpoint, reason_of, run_of

_NAME: Final = re.compile(r"(?:generation-(?P<generation>\d{4,})-)?iteration-(?P<iteration>\d{8,})(?:\.pt)?")
"""Without a generation: of before there were any, which counts as 0."""


@dataclass(frozen=True, order=True)
class Kept:
    """A checkpoint in a folder. Greater ones are newer."""

    generation: int
    iteration: int
    path: Path


def path_of(folder: Path, generation: int, iteration: int, kind: Format) -> Path:
    """Return where an iteration is kept: `generation-0002-iteration-00000041`, or with `.pt`."""
    suffix = ".pt" if kind == "torch" else ""
    return folder / f"generation-{generation:04}-iteration-{iteration:08}{suffix}"


def listed(folder: Path) -> list[Kept]:
    """Return what a folder has under such names, whole or not, the newest first. `DiskError`."""
    try:
        found = [kept for path in folder.iterdir() if (kept := _kept(path)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DiskError(f"can't list {folder}: {reason_of(error)}") from None
    return sorted(found, reverse=True)


def whole(folder: Path) -> list[Kept]:
    """Return the whole checkpoints in a folder, the newest first. `DiskError`."""
    try:
        return [kept for kept in listed(folder) if is_checkpoint(kept.path)]
    except OSError as error:
        raise DiskError(f"can't list {folder}: {reason_of(error)}") from None


def _kept(path: Path) -> Kept | None:
    match = _NAME.fullmatch(path.name)
    return Kept(int(match["generation"] or 0), int(match["iteration"]), path) if match else None


def choices(place: Path) -> list[Path]:
    """Return what can be resumed from, the newest first: what a folder has, or `place` if it is a checkpoint.

    The newest may be damaged, which is no reason to take an older one in silence. `DiskError`.
    """
    return [place] if is_checkpoint(place) else [kept.path for kept in listed(place)]


def greatest_generation(place: Path) -> int:
    """Return the greatest in a folder, or in that of a checkpoint; 0 if there is none. `DiskError`."""
    folder = place.absolute().parent if is_checkpoint(place) else place
    return max((kept.generation for kept in listed(folder)), default=0)


def generation_for(folder: Path, run: str, generation: int) -> int:
    """Return the generation under which to keep checkpoints of a run that has this one. `DiskError`.

    It is another one if the folder has newer checkpoints of other runs. Shadow nodes and trainers that have
    not seen these may count from 1 again; but what is written now is the newest.
    """
    found = listed(folder)
    if not found or generation > found[0].generation:
        return generation
    newest = next(iter(whole(folder)), None)
    same = newest is not None and newest.generation == found[0].generation and run_of(newest.path) == run
    return found[0].generation + (not same)


def tidy(folder: Path, count: int, written: Path) -> None:
    """Remove all checkpoints but the newest `count`, each generation's newest, and `written`.

    `DiskError`, once all else is removed.
    """
    found = whole(folder)
    newest = {kept.generation: kept for kept in reversed(found)}
    troubles = []
    for old in found[count:]:
        if old.path == written or newest[old.generation] == old:
            continue
        try:
            unfinished.remove(old.path)
        except OSError as error:
            troubles.append(f"can't remove {old.path}: {reason_of(error)}")
    if troubles:
        raise DiskError("; ".join(troubles))
