"""Resumes from shadow nodes that hold the job with other ranks: another mesh, other groups or shards.

What they hold is assembled as `checkmate consolidate` does it, of the chunks that their layouts describe.
Each rank reads and assembles no more than its own part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from checkmate.consolidate.assemble import stage_of
from checkmate.consolidate.snapshot import GroupState, Snapshot, combine_shards
from checkmate.consolidate.stage_state import needed_numbers
from checkmate.consolidate.stages import Trained, stages
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import BY_DISK, difference, job_of, job_ranks, ranks_digest
from checkmate.nodes.reader import ShardReading, ShardRequest, ShardState, read_shards
from checkmate.nodes.standing import Lacking, Shard
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.start import exchange
from checkmate.training.start.all_ranks import RestoreError, run_on_all_ranks
from checkmate.training.start.from_nodes import FetchError, check_way, spread
from checkmate.training.start.install import InstallError
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import FromNodes
from checkmate.training.start.stage_data import (
    LocalParts,
    Resumed,
    gather_besides,
    install_stage,
    say_resumed,
    stages_of_job,
)
from checkmate.training.start.survivor import Survivor
from checkmate.wire.layout import Layout, from_json

_SOURCE: Final = "the shadow nodes' state"


def resume(
    place: Place, watched: Watched, stubs: Stubs, plan: FromNodes, timeout: float
) -> tuple[Start, Any]:
    """Resume from the planned iteration, which other ranks have trained. All ranks call it.

    Raises:
        RestoreError: It can't be read, or doesn't fit the script. No older state may take its place.
    """
    Survivor.take()  # of other ranks: what it has kept is read like all else
    groups = stages_of_job(place, watched)
    read = partial(_install, place, watched, stubs, plan, groups, time.monotonic() + timeout)
    resumed, trouble, _ = run_on_all_ranks(place, read)
    gather_besides(place, watched, resumed)
    ranks = pb.JobRanks.FromString(plan.former)
    before, now = difference(ranks, job_ranks(place.job)) or ("other ranks", "these")
    if trouble:
        raise RestoreError(
            f"iteration {plan.iteration} is of {before}, and the job has {now}: that state can't be "
            f"assembled from the shadow nodes: {trouble}. {BY_DISK}"
        )
    say_resumed(place, resumed, _SOURCE, f" of {before} (now {now})")
    flags = exchange.gather(Survivor.loss is not None, name_of=place.name_of)
    stayed = [rank for rank, has_stayed in enumerate(flags) if has_stayed]
    start = Start(plan, plan.iteration + 1, keep=True, record=resumed.record, copied=watched.copied)
    start.stayed, start.former_groups = stayed, resumed.former_groups
    return start, resumed.extra


def _install(
    place: Place,
    watched: Watched,
    stubs: Stubs,
    plan: FromNodes,
    present_stages: Sequence[Sequence[int]],
    deadline: float,
) -> Resumed:
    """Read this rank's part of the planned iteration, and install it.

    Raises:
        FetchError: Some shard can't be read.
        InstallError: The state does not fit the script.
    """
    former = job_of(place.job, pb.JobRanks.FromString(plan.former))
    number = next(number for number, groups in enumerate(present_stages) if place.group in groups)
    parts = LocalParts(watched, number)
    reading = _Reading(place, stubs, plan, deadline)
    try:
        layouts = reading.layouts(len(former.dp_groups))
        groups = _stage_groups(former, layouts, number)
        numbers_by_group = needed_numbers({group: layouts[group] for group in groups}, parts.select)
        members = {
            group: reading.group(group, layouts[group], numbers)
            for group, numbers in numbers_by_group.items()
        }
    except Lacking as error:
        raise FetchError(str(error)) from None
    for member in members.values():
        check_way(member.optimizer, copied=watched.copied is not None)
    snapshot = Snapshot(former, plan.run, plan.iteration, (), plan.generation)
    stage_data = stage_of(snapshot, number, members, parts.select)
    resumed = install_stage(stage_data, parts, place, present_stages[number], _SOURCE)
    return replace(resumed, former_groups=groups)


def _stage_groups(former: Job, layouts: Sequence[Layout], number: int) -> Sequence[int]:
    """Return the DP groups of a stage, as they were. Raise `InstallError` if there was no such stage."""
    former_stages = stages(former, [Trained.from_layout(layout) for layout in layouts])
    if number >= len(former_stages):
        raise InstallError(f"{_SOURCE} has no stage {number}: the model was in {len(former_stages)}")
    return former_stages[number]


class _Reading:
    """Reads what nodes hold of a job's former ranks."""

    def __init__(self, place: Place, stubs: Stubs, plan: FromNodes, deadline: float) -> None:
        self._place, self._stubs, self._plan, self._deadline = place, stubs, plan, deadline
        self._ranks = ranks_digest(pb.JobRanks.FromString(plan.former))

    def layouts(self, groups: int) -> list[Layout]:
        """Return the layouts of all DP groups. Raise `Lacking` if that of one can't be read."""
        shards = self._read({(group, 0): () for group in range(groups)})
        return [from_json(shards[group, 0].header.layout) for group in range(groups)]

    def group(self, group: int, layout: Layout, numbers: Sequence[int]) -> GroupState:
        """Return the state of some parameters of a DP group, and its record.

        Raises:
            Lacking: Some shard can't be read, or buffers are missing.
        """
        names = {layout.parameters[number].name for number in numbers}
        numbers_by_shard = {
            shard: tuple(n for n in layout.of_shard(shard[1]) if layout.parameters[n].name in names)
            for shard in self._plan.holders
            if shard[0] == group
        }
        shards = self._read(numbers_by_shard)
        state = combine_shards(group, [shards[shard] for shard in sorted(shards)])
        if not state.record.parts:
            raise Lacking({(group, 0): [f"the record of iteration {self._plan.iteration} is missing"]})
        return state

    def _read(self, numbers_by_shard: Mapping[Shard, tuple[int, ...]]) -> dict[Shard, ShardState]:
        """Return some parameters of shards, or only the headers of those without a number."""
        plan, job = self._plan, self._place.job.job
        requests = {
            ShardRequest(
                job, plan.run, plan.iteration, *shard, parameters=numbers, ranks=self._ranks
            ): spread(plan.holders[shard], self._place.rank)
            for shard, numbers in numbers_by_shard.items()
        }
        return read_shards(self._stubs, requests, ShardReading(self._deadline))
