"""Installs the dictionary of a stage, with whole tensors or this rank's parts of them: bit for bit.

It comes from a checkpoint on disk, or is assembled of what shadow nodes hold of other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from checkmate import state
from checkmate.base.wording import counted
from checkmate.consolidate.chunks import Box
from checkmate.consolidate.stages import Trained, stages
from checkmate.job.partial import present_of
from checkmate.job.schema import Job
from checkmate.optim.options import OUTSIDE, put_options
from checkmate.optim.supported import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.capture import Watched
from checkmate.training.record.copied_state import CopiedState
from checkmate.training.start import exchange
from checkmate.training.start.all_ranks import TRAINING_ENDED, log_once
from checkmate.training.start.install import (
    InstallError,
    check_record,
    install_gradients,
    install_record,
    load_optimizer,
    part_of,
    put_entries,
    restored_parts,
)
from checkmate.training.start.places import Place
from checkmate.wire.parameter import Parameter

_log: Final = logging.getLogger("checkmate")
_MAX_NAMED: Final = 3
"""The number of ranks that a message names."""


@dataclass(frozen=True)
class Resumed:
    """The result of a checkpoint's installation."""

    record: pb.IterationRecord
    """The record of the checkpoint's iteration, as shadow nodes get it with the seeds."""
    extra: Any
    """This rank's."""
    training_ended: bool = False
    """Whether training had ended with that iteration."""
    other_ranks: str = ""
    """The changes of the ranks since, for a warning in this rank's log; empty if it has none to give."""
    former_groups: Sequence[int] = ()
    """DP groups of former ranks whose state it is, if shadow nodes hold that."""


def trained_by(place: Place, watched: Watched) -> Trained:
    """Return what this rank's DP group trains."""
    described = [(name, p.shape, state.dtype_name(p.dtype)) for name, p in watched.model.trained().items()]
    return Trained.of(described, sharded=bool(watched.model.shard_ranks), share=place.share)


def stages_of_job(place: Place, watched: Watched) -> list[list[int]]:
    """Return the DP groups of each stage of the job. All ranks call it."""
    message = trained_by(place, watched).message()
    messages = exchange.gather(message if place.first else None, name_of=place.name_of)
    return stages(
        place.job, [Trained.of_message(messages[group.ranks[0].rank]) for group in place.job.dp_groups]
    )


def gather_besides(place: Place, watched: Watched, resumed: Resumed | None) -> None:
    """Give a record what each rank of the DP group knows beside its tensors of state. All ranks call it.

    Each rank knows its own part, and any of them seeds nodes with all. A rank that failed has `None` resumed.
    """
    if (copied := watched.copied) is None:
        return
    record = resumed.record if resumed is not None else pb.IterationRecord()
    own_part = part_of(record, place.position).beside.hex()
    besides = exchange.gather(own_part, name_of=place.name_of)
    for part, member in zip(record.parts, place.job.dp_groups[place.group].ranks, strict=False):
        is_told = copied.is_told_by(part.position)
        part.beside = bytes.fromhex(besides[member.rank]) if is_told else b""


def say_resumed(place: Place, resumed: Resumed, source: str, change: str = "") -> None:
    """Log what all ranks have resumed from, perhaps with a `change`, and what is not as it was."""
    record = resumed.record
    words = f"iteration {record.iteration + 1} comes next ({restored_parts(record)})"
    log_once(place, f"resumed from {source}{change}: {words}")
    if resumed.training_ended:
        log_once(place, TRAINING_ENDED.format(record.iteration))
    if resumed.other_ranks:
        _log.warning("%s: %s", source, resumed.other_ranks)


def install_stage(
    stage_data: dict[str, Any],
    parts: LocalParts,
    place: Place,
    groups: Collection[int],
    source: str,
    named: str = "it",
) -> Resumed:
    """Install a stage's dictionary, of which this rank has its parts.

    Args:
        stage_data: The dictionary.
        parts: What has selected them.
        place: This rank's place.
        groups: The DP groups of this rank's stage.
        source: Its source in messages.
        named: The dictionary in messages about its ranks, such as `stage 1 of it`.

    Raises:
        InstallError: It doesn't fit the script.
    """
    if parts.misfits:
        raise InstallError(f"{source} doesn't fit the script: {parts.misfits[0]}")
    ranks = Counterparts.from_checkpoint(stage_data, StageRanks.of_stage(place.job, groups))
    try:
        resumed = _install(stage_data, place, parts.watched, ranks)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InstallError(f"{source} doesn't fit the script: {' '.join(str(error).split())}") from error
    return replace(resumed, other_ranks=ranks.warning(place.rank, named))


def _install(stage_data: dict[str, Any], place: Place, watched: Watched, ranks: Counterparts) -> Resumed:
    record = _record_of(stage_data, place, ranks.of_rank)
    check_record(record, watched, place)
    missing, unexpected = load_model(watched.model, stage_data["model"])
    lacking = set(missing) & watched.model.trained().keys()
    if lacking or unexpected:
        raise InstallError(f"parameters missing: {sorted(lacking)}, unknown: {unexpected}")
    copied = watched.copied
    if copied is None:
        load_optimizer(watched.optimizer, stage_data["optimizer"])
    else:
        _install_copied(copied, watched.optimizer, stage_data)
        copied.look()
        record.parts[place.position].beside = copied.beside
    parameters = watched.model.trained()
    names = set(stage_data.get("with_gradient", ()))
    numbers = [number for number, name in enumerate(parameters) if name in names]
    install_gradients(list(parameters.values()), numbers)
    record.parts[0].step.with_gradient.extend(numbers)
    options = [options_of(group) for group in watched.optimizer.param_groups]
    record.parts[0].step.MergeFrom(pb.Step(options=options, next_options=options))
    extra = install_record(watched, record, place.position)
    return Resumed(record, extra, training_ended=bool(stage_data.get("ended")))


def _install_copied(
    copied: CopiedState, optimizer: torch.optim.Optimizer, stage_data: Mapping[str, Any]
) -> None:
    """Set optimizer state that is copied, and the options, from a checkpoint."""
    saved = stage_data["optimizer"]
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    of_parameter = {parameter: saved["state"].get(key, {}) for key, parameter in zip(keys, flat, strict=True)}
    states = [of_parameter.get(parameter, {}) for parameter in copied.parameters]
    copied.install_states(states, stage_data.get("optimizer_counters", ()))
    trained = set(copied.parameters)
    for parameter, entries in of_parameter.items():
        if entries and parameter not in trained:
            put_entries(optimizer, parameter, entries)
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        put_options(group, {key: value for key, value in options.items() if key not in OUTSIDE})


def _record_of(stage_data: dict[str, Any], place: Place, of_rank: Mapping[int, int]) -> pb.IterationRecord:
    """Return the record of a checkpoint's iteration, which is sent to shadow nodes with the seeds.

    It does not have the optimizer's options yet. `of_rank` has the checkpoint's rank in the place of each of
    ours. A rank without one gets the lowest rank's `extra`, because that often counts what all ranks have
    done; but no random generators, because two ranks would draw the same numbers.
    """
    record = pb.IterationRecord(iteration=stage_data["iteration"])
    members = place.job.dp_groups[place.group].ranks
    buffers = stage_data.get("rank_buffers", {})  # what differs from those of the stage's first rank
    first = buffers.get(of_rank.get(members[0].rank), {})
    common = stage_data["extra"].get(min(stage_data["extra"], default=None))
    for position, member in enumerate(members):
        part = record.parts.add(
            job=place.job.job, group=place.group, position=position, iteration=stage_data["iteration"]
        )
        counterpart = of_rank.get(member.rank)
        if counterpart in stage_data["rng"]:
            part.rng = state.dump_generators(stage_data["rng"][counterpart])
        if counterpart in stage_data["extra"] or (stage_data["extra"] and counterpart is None):
            part.extra = state.dumps(stage_data["extra"].get(counterpart, common))
        own_buffers = stage_data["buffers"] | buffers.get(counterpart, {})
        if position and (names := first.keys() | buffers.get(counterpart, {}).keys()):
            part.buffers = state.dumps({name: own_buffers[name] for name in sorted(names)})
    step = record.parts[0].step
    step.scheduler_class = stage_data.get("scheduler_class", "")
    for name in ("scheduler", "scaler"):
        if stage_data[name] is not None:
            setattr(step, name, state.dumps(stage_data[name]))
    for name, tensor in (stage_data["buffers"] | first).items():
        record.buffers[name] = state.dumps(tensor)
    return record


class LocalParts:
    """Selects the parts that a rank reads: of its stage only, and only its chunks of a sharded model.

    `misfits` has what of the checkpoint does not fit the script, in words.
    """

    def __init__(self, watched: Watched, stage: int) -> None:
        """Look at a script's model and optimizer."""
        from checkmate.consolidate.assemble import not_trained  # noqa: PLC0415 - most starts read no disk

        self.watched = watched
        model = watched.model
        self._stage = f"group{stage}"
        described = [*model.describe(), *model.describe_frozen()] if model.shard_ranks else []
        self._chunks = {chunk.name: chunk for chunk in described if chunk.whole}
        self._keys = model.state_names()
        self._names: dict[object, str] = {}
        names = {parameter: name for name, parameter in model.parameters().items()}
        flat = (p for group in watched.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(flat):
            if name := names.get(parameter):
                self._names |= dict.fromkeys([number, name, not_trained(number)], name)
        self.misfits: list[str] = []

    def select(self, path: Sequence[object], shape: Sequence[int]) -> Box | None:
        """Return this rank's part of a tensor, or `None` for all of it.

        Args:
            path: The keys that lead to it: `("model", "weight")`, or `("group1", "model", "weight")`.
            shape: Its shape.
        """
        first, *inner = path
        if isinstance(first, str) and first.startswith("group"):
            if first != self._stage:
                return Box((0,) * len(shape), (0,) * len(shape))
            path = inner
        chunk = self._parameter(path)
        if chunk is None or (path[0] == "optimizer" and not shape):
            return None
        if tuple(shape) != chunk.whole:
            key, parameter = ".".join(map(str, path)), f"{chunk.name} {list(chunk.whole)}"
            self.misfits.append(f"it has {key} {list(shape)} in place of {parameter}")
            return None
        return Box(chunk.offset, chunk.shape)

    def _parameter(self, path: Sequence[object]) -> Parameter | None:
        """Return the parameter to which a tensor belongs, if it is one of which this rank has a chunk."""
        match path:
            case ["model", str(key)]:
                return self._chunks.get(self._keys.get(key, key))
            case ["buffers", str(name)]:
                return self._chunks.get(name)
            case ["optimizer", "state", number, _]:
                return self._chunks.get(self._names.get(number, ""))
        return None


def load_model(model: TrainedModel, tensors_read: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Set a model's `state_dict()`, of which `tensors_read` has this rank's parts.

    Returns:
        The keys that are missing, and those that the model does not know.
    """
    tensors, names = model.tensors(), model.state_names()
    parts = {
        key: state.sharded_like(tensors[names[key]], part) if names.get(key) in tensors else part
        for key, part in tensors_read.items()
    }
    missing, unexpected = model.inner.load_state_dict(parts, strict=False)
    return missing, unexpected


@dataclass(frozen=True)
class StageRanks:
    """The global ranks of a stage, in order of their places, and the size of its tensor parallelism."""

    ranks: tuple[int, ...]
    tp: int = 1
    present: tuple[int, ...] = ()
    """The replicas of the model that are there; none are named if all are."""

    @classmethod
    def of_stage(cls, job: Job, groups: Collection[int]) -> StageRanks:
        """Return those of a job's stage of these DP groups."""
        ranks = (rank.rank for group in groups for rank in job.dp_groups[group].ranks)
        return cls(tuple(sorted(ranks)), 1 if job.mesh is None else job.mesh.tp, present_of(job))

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The ranks, by their places in the whole job."""
        return {divmod(self._whole_number(i), self.tp): rank for i, rank in enumerate(self.ranks)}

    def _whole_number(self, number: int) -> int:
        """Return the number that a rank of the stage has if all replicas are there."""
        if not self.present:
            return number
        of_replica = len(self.ranks) // len(self.present)
        return self.present[number // of_replica] * of_replica + number % of_replica


@dataclass(frozen=True)
class Counterparts:
    """The ranks of a stage, as they were and are."""

    saved_ranks: StageRanks
    present_ranks: StageRanks

    @classmethod
    def from_checkpoint(cls, stage_data: Mapping[str, Any], present: StageRanks) -> Counterparts:
        """Return those for the part of a checkpoint that has a stage.

        Up to protocol 4 it does not name its ranks. All of them have random generators.
        """
        ranks, tp = stage_data.get("ranks", sorted(stage_data["rng"])), stage_data.get("tp", present.tp)
        replicas = tuple(stage_data.get("present", ()))
        return cls(StageRanks(tuple(ranks), tp, replicas), present)

    @cached_property
    def of_rank(self) -> Mapping[int, int]:
        """The checkpoint's rank at the place of each of ours, if it has one there."""
        places = self.saved_ranks.places
        return {rank: places[place] for place, rank in self.present_ranks.places.items() if place in places}

    def warning(self, rank: int, stage: str) -> str:
        """Return what the log of one of our ranks has to say, or "".

        The first rank tells of all changes, any other one only of what it lacks itself.

        Args:
            rank: The rank.
            stage: The checkpoint's part in messages, such as `stage 1 of it`.
        """
        first, *_ = self.present_ranks.ranks
        new = [number for number in self.present_ranks.ranks if number not in self.of_rank]
        extra = f"extra() of the former rank {self.saved_ranks.ranks[0]}"
        if rank != first:
            warning = f"rank {rank} keeps the script's random generators, and gets {extra}"
            return f"{warning}, because there was no rank in its place" if rank in new else ""
        if not new and len(self.of_rank) == len(self.saved_ranks.ranks):
            return ""
        before, now = counted(len(self.saved_ranks.ranks), "rank"), len(self.present_ranks.ranks)
        warning = f"{stage} is of {before}, and there are {now} now"
        if new:
            more = f" and {len(new) - _MAX_NAMED} more" if new[_MAX_NAMED:] else ""
            names = f"{', '.join(map(str, new[:_MAX_NAMED]))}{more}"
            warning += f": ranks {names} keep the script's random generators, and get {extra}"
        return warning
