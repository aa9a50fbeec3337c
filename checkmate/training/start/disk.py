"""Resumes from a checkpoint on disk, written by `checkmate consolidate`, if the shadow nodes have none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkmate import state
from checkmate.consolidate import disk, kept
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import (
    InstallError,
    check_ranks,
    check_record,
    install_record,
    load_optimizer,
)
from checkmate.training.start.membership import Membership

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
    place = Path(chosen).absolute()
    return OnDisk(tuple(kept.choices(place, discarded)), kept.greatest_generation(place))


def nothing(folder: str | Path | None) -> str:
    """Return a message for the case that `look` has found no checkpoint."""
    if chosen := folder or os.environ.get(CHECKPOINTS_VARIABLE):
        return f"{chosen} does not contain a checkpoint"
    return f"no checkpoint folder is set (pass checkpoints= or set {CHECKPOINTS_VARIABLE})"


def resume(path: Path, place: Membership, watched: Watched) -> tuple[pb.IterationRecord, Any]:
    """Install a checkpoint, bit for bit.

    Returns:
        The record of the checkpoint's iteration, and this rank's `extra`.

    Raises:
        DiskError: It can't be read.
        InstallError: It is of another job or doesn't fit the script.
    """
    if watched.model.shard_ranks:
        raise InstallError(
            f"{path} can't be loaded into a sharded model: load it with torch.distributed.checkpoint and "
            "set_state_dict after `checkmate reset JOB`, without checkpoints="
        )
    checkpoint = disk.load(path)
    try:
        found = disk.group_of(checkpoint, place.group)
    except KeyError:
        raise InstallError(f"{path} has no DP group {place.group}") from None
    if found["job"] != place.job.job:
        raise InstallError(f"{path} belongs to the job {found['job']}, not to {place.job.job}")
    try:
        return _install(found, place, watched)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InstallError(f"{path} doesn't fit the script: {' '.join(str(error).split())}") from error


def _install(found: dict[str, Any], place: Membership, watched: Watched) -> tuple[pb.IterationRecord, Any]:
    check_ranks(len(found["rng"]), place)
    record = _record_of(found, place)
    check_record(record, watched, place)
    missing, unexpected = watched.model.inner.load_state_dict(found["model"], strict=False)
    lacking = set(missing) & watched.model.trained().keys()
    if lacking or unexpected:
        raise InstallError(f"parameters missing: {sorted(lacking)}, unknown: {unexpected}")
    load_optimizer(watched.optimizer, found["optimizer"])
    options = [options_of(group) for group in watched.optimizer.param_groups]
    record.parts[0].step.MergeFrom(pb.Step(options=options, next_options=options))
    return record, install_record(watched, record, place.position)


def _record_of(found: dict[str, Any], place: Membership) -> pb.IterationRecord:
    """Return the record of a checkpoint's iteration, which is sent to shadow nodes with the seeds.

    It does not have the optimizer's options yet.
    """
    record = pb.IterationRecord(iteration=found["iteration"])
    for position, member in enumerate(place.job.dp_groups[place.group].ranks):
        part = record.parts.add(
            job=place.job.job, group=place.group, position=position, iteration=found["iteration"]
        )
        if member.rank in found["rng"]:
            part.rng = state.dump_generators(found["rng"][member.rank])
        if member.rank in found["extra"]:
            part.extra = state.dumps(found["extra"][member.rank])
        own = found.get("rank_buffers", {}).get(member.rank)
        if own:
            part.buffers = state.dumps(own)
    step = record.parts[0].step
    step.scheduler_class = found.get("scheduler_class", "")
    for name in ("scheduler", "scaler"):
        if found[name] is not None:
            setattr(step, name, state.dumps(found[name]))
    for name, tensor in found["buffers"].items():
        record.buffers[name] = state.dumps(tensor)
    return record
