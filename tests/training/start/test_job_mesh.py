"""The places of a job's ranks in the mesh for `fully_shard`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkmate.job.schema import Mesh
from checkmate.training.errors import SessionError
from checkmate.training.start.named_job import arranged
from testbed.jobs import job


def test_groups_without_a_mesh_are_the_shards_of_one_model() -> None:
    described = job(groups=3, ranks=2)  # [0, 1], [2, 3], [4, 5]
    assert arranged(described).tolist() == [[[[0], [2], [4]], [[1], [3], [5]]]]


def test_ranks_of_a_mesh_are_numbered_row_by_row() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=2, tp=2)
    rows = torch.arange(24).view(2, 3, 2, 2)
    described = job(groups=8, ranks=3)
    members = rows.permute(0, 2, 3, 1).reshape(8, 3).tolist()
    groups = tuple(
        replace(
            group,
            ranks=tuple(
                replace(rank, rank=number) for rank, number in zip(group.ranks, numbers, strict=True)
            ),
        )
        for group, numbers in zip(described.dp_groups, members, strict=True)
    )
    assert torch.equal(arranged(replace(described, dp_groups=groups, mesh=mesh)), rows)


def test_groups_of_different_sizes_are_refused() -> None:
    described = job(groups=2, ranks=3)
    less = replace(described.dp_groups[1], ranks=described.dp_groups[1].ranks[:2])
    with pytest.raises(SessionError, match="have 3, 2 ranks: each shard needs the same number of replicas"):
        arranged(replace(described, dp_groups=(described.dp_groups[0], less)))
