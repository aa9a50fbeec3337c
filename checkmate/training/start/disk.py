"""Resumes from a checkpoint on disk, written by `checkmate consolidate`, if the shadow nodes have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkmate import state
from checkmate.consolidate import disk
from checkmate.consolidate.stages import Trained
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.start.counterparts import Counterparts, StageRanks
from checkmate.training.start.install import (
    InstallError,
    check_record,
    install_gradients,
    install_record,
    load_optimizer,
)
from checkmate.training.start.local_parts import LocalParts, load_model
from checkmate.training.start.membership import Membership


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint on disk has brought."""

    record: pb.IterationRecord
    """Of the checkpoint's iteration, as shadow nodes get it with the seeds."""
    extra: Any
    """This rank's."""
    ended: bool = False
    """Whether training had ended with that iteration."""
    other_ranks: str = ""
    """How the ranks have changed since, for a warning in this rank's log; empty if it has none to give."""


def trained_by(place: Membership, watched: Watched) -> Trained:
    """Return what this rank's DP group trains."""
    known = [(name, p.shape, state.dtype_name(p.dtype)) for name, p in watched.model.trained().items()]
    return Trained.of(known, sharded=bool(watched.model.shard_ranks), share=place.share)


def resume(path: Path, place: Membership, watched: Watched, stages: Sequence[Sequence[int]]) -> Resumed:
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
        found = disk.stage_in(checkpoint, stage)
    except KeyError:
        raise InstallError(f"{path} has no stage {stage}") from None
    if found["job"] != place.job.job:
        raise InstallError(f"{path} belongs to the job {found['job']}, not to {place.job.job}")
    if parts.misfits:
        raise InstallError(f"{path} doesn't fit the script: {parts.misfits[0]}")
    try:
        resumed, ranks = _install(found, place, watched, StageRanks.of(place.job, stages[stage]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise InstallError(f"{path} doesn't fit the script: {' '.join(str(error).split())}") from error
    named = "it" if "model" in checkpoint else f"stage {stage} of it"
    return replace(resumed, other_ranks=ranks.warning(place.rank, named))


def _install(
    found: dict[str, Any], place: Membership, watched: Watched, ours: StageRanks
) -> tuple[Resumed, Counterparts]:
    ranks = Counterparts.of(found, ours)
    record = _record_of(found, place, ranks.of_rank)
    check_record(record, watched, place)
    missing, unexpected = load_model(watched.model, found["model"])
    lacking = set(missing) & watched.model.trained().keys()
    if lacking or unexpected:
        raise InstallError(f"parameters missing: {sorted(lacking)}, unknown: {unexpected}")
    load_optimizer(watched.optimizer, found["optimizer"])
    parameters = watched.model.trained()
    names = set(found.get("with_gradient", ()))
    numbers = [number for number, name in enumerate(parameters) if name in names]
    install_gradients(list(parameters.values()), numbers)
    record.parts[0].step.with_gradient.extend(numbers)
    options = [options_of(group) for group in watched.optimizer.param_groups]
    record.parts[0].step.MergeFrom(pb.Step(options=options, next_options=options))
    extra = install_record(watched, record, place.position)
    return Resumed(record, extra, ended=bool(found.get("ended"))), ranks


def _record_of(found: dict[str, Any], place: Membership, of_rank: Mapping[int, int]) -> pb.IterationRecord:
    """Return the record of a checkpoint's iteration, which is sent to shadow nodes with the seeds.

    It does not have the optimizer's options yet. `of_rank` has the checkpoint's rank in the place of each of
    ours. A rank without one gets the lowest rank's `extra`, because that often counts what all ranks have
    done; but no random generators, because two ranks would draw the same numbers.
    """
    record = pb.IterationRecord(iteration=found["iteration"])
    members = place.job.dp_groups[place.group].ranks
    buffers = found.get("rank_buffers", {})  # what differs from those of the stage's first rank
    first = buffers.get(of_rank.get(members[0].rank), {})
    common = found["extra"].get(min(found["extra"], default=None))
    for position, member in enumerate(members):
        part = record.parts.add(
            job=place.job.job, group=place.group, position=position, iteration=found["iteration"]
        )
        theirs = of_rank.get(member.rank)
        if theirs in found["rng"]:
            part.rng = state.dump_generators(found["rng"][theirs])
        if theirs in found["extra"] or (found["extra"] and theirs is None):
            part.extra = state.dumps(found["extra"].get(theirs, common))
        own = found["buffers"] | buffers.get(theirs, {})
        if position and (names := first.keys() | buffers.get(theirs, {}).keys()):
            part.buffers = state.dumps({name: own[name] for name in sorted(names)})
    step = record.parts[0].step
    step.scheduler_class = found.get("scheduler_class", "")
    for name in ("scheduler", "scaler"):
        if found[name] is not None:
            setattr(step, name, state.dumps(found[name]))
    for name, tensor in (found["buffers"] | first).items():
        record.buffers[name] = state.dumps(tensor)
    return record
