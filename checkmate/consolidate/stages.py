"""Finds the DP groups that train one model, or one stage of it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from checkmate.job.mesh import coordinates
from checkmate.job.schema import Job
from checkmate.wire.layout import Layout
from checkmate.wire.shares import WHOLE, Share


@dataclass(frozen=True)
class Trained:
    """The model that a DP group trains, as far as its stage follows from that."""

    parameters: str
    """A fingerprint of the parameters, as they are without shards."""
    sharded: bool = False
    share: Share = WHOLE

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, Sequence[int], str]], *, sharded: bool, share: Share = WHOLE
    ) -> Trained:
        """Return it for trained parameters: their names, whole shapes and types."""
        data = json.dumps([[name, list(shape), dtype] for name, shape, dtype in parameters])
        return cls(hashlib.blake2b(data.encode(), digest_size=16).hexdigest(), sharded, share)

    @classmethod
    def from_layout(cls, layout: Layout) -> Trained:
        """Return it for a layout."""
        parameters = [
            (parameter.name, parameter.whole or parameter.shape, parameter.dtype)
            for parameter in layout.parameters
        ]
        return cls.of(
            parameters, sharded=any(parameter.whole for parameter in layout.parameters), share=layout.share
        )

    def message(self) -> dict[str, Any]:
        """Return what JSON can express, for `of_message`."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> Trained:
        """Return it from a `message`."""
        return cls(**{**message, "share": Share(**message["share"])})


def stages(job: Job, trained: Sequence[Trained]) -> list[list[int]]:
    """Return the DP groups of each stage, in order of their first ones.

    The DP groups of a sharded model are one stage: those of one `pp` in the job's mesh, or else those that
    have chunks of the same parameters. So are those with shares of a model, on the same hosts. Each other DP
    group is a stage.

    Args:
        job: The job.
        trained: What each of its DP groups trains.
    """
    result: list[list[int]] = []
    sharded: dict[object, list[int]] = {}
    for group, group_trained in enumerate(trained):
        if group_trained.share.count > 1:
            stage = next((stage for stage in result if _continues(job, trained, stage, group)), [])
        elif group_trained.sharded:
            key = group_trained.parameters if job.mesh is None else coordinates(job, group)["pp"]
            stage = sharded.setdefault(key, [])
        else:
            stage = []
        if not stage:
            result.append(stage)
        stage.append(group)
    return result


def _continues(job: Job, trained: Sequence[Trained], stage: Sequence[int], group: int) -> bool:
    """Return whether a DP group has the next share of a model, of which a stage's groups have the first."""
    first, candidate = trained[stage[0]], trained[group]
    hosts = [{rank.host for rank in job.dp_groups[member].ranks} for member in (stage[0], group)]
    next_share = Share(len(stage), first.share.count)
    return candidate.share == next_share and candidate.parameters == first.parameters and hosts[0] == hosts[1]
