"""The checkpoints on disk that a start of training may use, as rank 0 finds them for all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CHECKPOINTS_VARIABLE: Final = "CHECKMATE_CHECKPOINTS"
_LISTED: Final = 3
"""The number of unused checkpoints that a message names."""


@dataclass(frozen=True)
class OnDisk:
    """The checkpoints on disk, the newest first, and their greatest generation."""

    paths: tuple[Path, ...] = ()
    generation: int = 0

    @property
    def passed_over(self) -> str:
        """The older checkpoints, for a message; empty if there are none."""
        names = [path.name for path in self.paths[1:]]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return ", ".join(names[:_LISTED]) + more

    def message(self) -> list[object]:
        """Return what JSON can express, for `of_message`."""
        return [self.generation, *map(str, self.paths)]

    @classmethod
    def of_message(cls, message: Any) -> OnDisk:
        """Return what a `message` of another rank describes. Raise `ValueError` if it is something else."""
        if not isinstance(message, list) or not message or not isinstance(message[0], int):
            raise ValueError("must be a generation and paths")
        return cls(tuple(Path(str(path)) for path in message[1:]), message[0])


def look(folder: str | Path | None, discarded: int = 0) -> OnDisk:
    """Return the checkpoints in a folder, by default $CHECKMATE_CHECKPOINTS.

    Those of runs up to the generation `discarded` do not count.

    Raises:
        DiskError: The folder can't be read.
    """
    chosen = folder or os.environ.get(CHECKPOINTS_VARIABLE)
    if not chosen:
        return OnDisk()
    from checkmate.consolidate import kept  # noqa: PLC0415 - most starts need nothing from disk

    place = Path(chosen).absolute()
    return OnDisk(tuple(kept.choices(place, discarded)), kept.greatest_generation(place))


def nothing(folder: str | Path | None) -> str:
    """Return a message for the case that `look` has found no checkpoint."""
    if chosen := folder or os.environ.get(CHECKPOINTS_VARIABLE):
        return f"{chosen} does not contain a checkpoint"
    return f"no checkpoint folder is set (pass checkpoints= or set {CHECKPOINTS_VARIABLE})"
