"""Resumes from a checkpoint on disk, written by `checkmate consolidate`, if the shadow nodes have none.

Rank 0 lists the checkpoints for all ranks. Each rank installs its own parts of the newest one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkmate.consolidate import checkpoint_folder, disk
from checkmate.training.record.capture import Watched
from checkmate.training.start.all_ranks import ANEW, RestoreError, log_once, run_on_all_ranks
from checkmate.training.start.install import (
    InstallError,
)
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import NewRun, WithoutState
from checkmate.training.start.stage_data import (
    LocalParts,
    Resumed,
    gather_besides,
    install_stage,
    say_resumed,
    stages_of_job,
)

_log: Final = logging.getLogger("checkmate")
CHECKPOINTS_VARIABLE: Final = "CHECKMATE_CHECKPOINTS"
_MAX_NAMED: Final = 3
"""The number of unused checkpoints that a message names."""


@dataclass(frozen=True)
class OnDisk:
    """The checkpoints on disk, the newest first, and their greatest generation."""

    paths: tuple[Path, ...] = ()
    generation: int = 0

    @property
    def unused_names(self) -> str:
        """The older checkpoints, for a message; empty if there are none."""
        names = [path.name for path in self.paths[1:]]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(names[:_MAX_NAMED]) + more

    def message(self) -> list[object]:
        """Return what JSON can express, for `from_message`."""
        return [self.generation, *map(str, self.paths)]

    @classmethod
    def from_message(cls, message: Any) -> OnDisk:
        """Return the checkpoints in another rank's `message`. Raise `ValueError` if it is something else."""
        if not isinstance(message, list) or not message or not isinstance(message[0], int):
            raise ValueError("must be a generation and paths")
        return cls(tuple(Path(str(path)) for path in message[1:]), message[0])


def list_checkpoints(folder: str | Path | None, discarded: int = 0) -> OnDisk:
    """Return the checkpoints in a folder, by default $CHECKMATE_CHECKPOINTS.

    Those of runs up to the generation `discarded` do not count.

    Raises:
        DiskError: The folder can't be read.
    """
    name = folder or os.environ.get(CHECKPOINTS_VARIABLE)
    if not name:
        return OnDisk()
    path = Path(name).absolute()
    choices = tuple(checkpoint_folder.choices(path, discarded))
    return OnDisk(choices, checkpoint_folder.greatest_generation(path))


def no_checkpoint(folder: str | Path | None) -> str:
    """Return a message for the case that `list_checkpoints` has found no checkpoint."""
    if name := folder or os.environ.get(CHECKPOINTS_VARIABLE):
        return f"{name} does not contain a checkpoint"
    return f"no checkpoint folder is set (pass checkpoints= or set {CHECKPOINTS_VARIABLE})"


def resume(
    place: Place, watched: Watched, plan: NewRun | WithoutState, checkpoints: OnDisk
) -> tuple[Start, Any]:
    """Resume from the newest checkpoint. Only the user chooses an older one: it loses iterations."""
    path, *older = checkpoints.paths
    groups = stages_of_job(place, watched)
    resumed, trouble, _ = run_on_all_ranks(place, lambda: install_checkpoint(path, place, watched, groups))
    gather_besides(place, watched, resumed)
    if trouble:
        instead = f"checkpoints={str(older[0])!r} selects the one before it" if older else ""
        raise RestoreError("; ".join(filter(None, [plan.trouble, trouble, instead, ANEW])))
    say_resumed(place, resumed, str(path))
    if older:
        log_once(place, f"older checkpoints were not used: {checkpoints.unused_names}")
    record = resumed.record
    return Start(plan, record.iteration + 1, record=record, copied=watched.copied), resumed.extra


def install_checkpoint(
    path: Path, place: Place, watched: Watched, stages: Sequence[Sequence[int]]
) -> Resumed:
    """Install a checkpoint, bit for bit.

    Args:
        path: The checkpoint.
        place: This rank's place.
        watched: What it trains.
        stages: The DP groups of each stage of the job.

    Raises:
        DiskError: It can't be read.
        InstallError: It is of another job or doesn't fit the script.
    """
    stage = next(number for number, groups in enumerate(stages) if place.group in groups)
    parts = LocalParts(watched, stage)
    checkpoint = disk.load(path, parts.select)
    try:
        stage_data = disk.stage_in(checkpoint, stage)
    except KeyError:
        raise InstallError(f"{path} has no stage {stage}") from None
    if stage_data["job"] != place.job.job:
        raise InstallError(f"{path} belongs to the job {stage_data['job']}, not to {place.job.job}")
    part = "it" if "model" in checkpoint else f"stage {stage} of it"
    return install_stage(stage_data, parts, place, stages[stage], str(path), part)
