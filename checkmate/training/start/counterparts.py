"""Which rank of a checkpoint each rank of a stage takes the place of. Pure.

A rank's place is its number within its stage; with tensor parallelism, the number of the ranks that share a
sample, and its own among these. Global ranks move between stages if a job gets other replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from checkmate.job.schema import Job
from checkmate.wording import counted

_LISTED: Final = 3
"""The number of ranks that a message names."""


@dataclass(frozen=True)
class StageRanks:
    """The global ranks of a stage, in order of their places, and the size of its tensor parallelism."""

    ranks: tuple[int, ...]
    tp: int = 1

    @classmethod
    def of(cls, job: Job, groups: Collection[int]) -> StageRanks:
        """Return those of a job's stage of these DP groups."""
        ranks = (rank.rank for group in groups for rank in job.dp_groups[group].ranks)
        return cls(tuple(sorted(ranks)), 1 if job.mesh is None else job.mesh.tp)

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The ranks, by place."""
        return {divmod(number, self.tp): rank for number, rank in enumerate(self.ranks)}


@dataclass(frozen=True)
class Counterparts:
    """The ranks of a stage, as they are in a checkpoint and now."""

    theirs: StageRanks
    ours: StageRanks

    @classmethod
    def of(cls, found: Mapping[str, Any], ours: StageRanks) -> Counterparts:
        """Return those for the part of a checkpoint that has a stage.

        Up to protocol 4 it does not name its ranks. All of them have random generators.
        """
        ranks, tp = found.get("ranks", sorted(found["rng"])), found.get("tp", ours.tp)
        return cls(StageRanks(tuple(ranks), tp), ours)

    @cached_property
    def of_rank(self) -> Mapping[int, int]:
        """The checkpoint's rank at the place of each of ours, if it has one there."""
        theirs = self.theirs.places
        return {rank: theirs[place] for place, rank in self.ours.places.items() if place in theirs}

    def warning(self, rank: int, stage: str) -> str:
        """Return what the log of one of our ranks has to say, or "".

        The first rank tells of all changes, any other one only of what it lacks itself.

        Args:
            rank: The rank.
            stage: The checkpoint's part in messages, such as `stage 1 of it`.
        """
        first, *_ = self.ours.ranks
        new = [one for one in self.ours.ranks if one not in self.of_rank]
        given = f"extra() of the checkpoint's rank {self.theirs.ranks[0]}"
        if rank != first:
            lost = f"rank {rank} keeps the script's random generators, and gets {given}"
            return f"{lost}, because the checkpoint has no rank in its place" if rank in new else ""
        if not new and len(self.of_rank) == len(self.theirs.ranks):
            return ""
        before, now = counted(len(self.theirs.ranks), "rank"), len(self.ours.ranks)
        said = f"{stage} is of {before}, and there are {now} now"
        if new:
            more = f" and {len(new) - _LISTED} more" if new[_LISTED:] else ""
            listed = f"{', '.join(map(str, new[:_LISTED]))}{more}"
            said += f": ranks {listed} keep the script's random generators, and get {given}"
        return said
