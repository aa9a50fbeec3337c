"""Shadow nodes whose job file has another mesh, or other DP groups, than the job that restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from checkmate.job.files import read_job
from checkmate.job.partial import PartialJob
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.nodes.other_ranks import OtherRanks, difference, job_of, job_ranks, other_ranks
from checkmate.nodes.standing import holders_of
from checkmate.rpc import shadow_pb2 as pb
from testbed.jobs import job_data
from tests.support.fuzz import fuzz, messages
from tests.support.job_files import meshed, write
from tests.support.shadow.standings import hold, node


def grouped(*groups: list[int]) -> Job:
    """Return a job that lists its DP groups."""
    data = job_data(groups=len(groups), ranks=len(groups[0]))
    for group, numbers in zip(data["dp_groups"], groups, strict=True):
        for rank, number in zip(group["ranks"], numbers, strict=True):
            rank["rank"] = number
    return of_data(Job, data)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"shard": 2}, {"tp": 2}, ("a mesh with dp_shard 2 and tp 1", "a mesh with dp_shard 1 and tp 2")),
        ({"shard": 2}, {"pp": 2}, ("a mesh with pp 1 and dp_shard 2", "a mesh with pp 2 and dp_shard 1")),
        (
            {"pp": 2, "shard": 3},
            {"pp": 3, "shard": 2},
            ("a mesh with pp 2 and dp_shard 3", "a mesh with pp 3 and dp_shard 2"),
        ),
        ({"replicate": 4}, {"replicate": 4, "gpus": 2}, ("1 DP group of 4 ranks", "2 DP groups of 2 ranks")),
    ],
)
def test_meshes_of_as_many_groups_are_told_apart(
    old: dict[str, int], new: dict[str, int], words: tuple[str, str], tmp_path: Path
) -> None:
    old_ranks, new_ranks = (job_ranks(read_job(write(tmp_path, meshed(**mesh)))) for mesh in (old, new))
    assert difference(old_ranks, old_ranks) is None
    assert difference(old_ranks, new_ranks) == words


def test_more_ranks_on_a_host_train_the_same_shards(tmp_path: Path) -> None:
    single, two = (read_job(write(tmp_path, meshed(shard=2, gpus=gpus))) for gpus in (1, 2))
    assert difference(job_ranks(single), job_ranks(two)) is None


def test_groups_are_told_apart_by_their_ranks_and_order(tmp_path: Path) -> None:
    """Records name a rank by its place in the ring. A mesh may take the place of the groups that it has."""
    own_ranks = job_ranks(grouped([0, 2], [1, 3]))
    assert difference(own_ranks, job_ranks(read_job(write(tmp_path, meshed(shard=2))))) is None
    swapped = job_ranks(grouped([0, 1], [2, 3]))
    assert difference(own_ranks, swapped) == ("DP group 0 with ranks 0, 2", "it with ranks 0, 1")
    turned = job_ranks(grouped([0, 2], [3, 1]))
    assert difference(own_ranks, turned) == ("DP group 1 with ranks 1, 3", "it with ranks 3, 1")


def test_a_node_that_comes_back_with_an_older_run_does_not_count(tmp_path: Path) -> None:
    """It was away while the others were given another mesh, and began a new run."""
    old, new = (read_job(write(tmp_path, meshed(**{dimension: 2}, nodes=2))) for dimension in ("shard", "tp"))
    stale, newest = node(0, hold((0, 0), 40, 40)), node(1, hold((0, 0), 5000, 5000))
    stale.job_ranks.CopyFrom(job_ranks(old))
    newest.job_ranks.CopyFrom(job_ranks(new))
    stale.holds[0].generation, newest.holds[0].generation = 1, 2
    answers: dict[int, pb.NodeStatus | str] = {0: stale, 1: newest}
    assert other_ranks(new, answers) == ""
    assert "tp 2" in other_ranks(old, answers)


def test_the_node_and_both_meshes_are_named(tmp_path: Path) -> None:
    """A node that holds nothing does not count."""
    old, new = (read_job(write(tmp_path, meshed(**{dimension: 2}, nodes=2))) for dimension in ("shard", "tp"))
    holder, nothing = node(1, hold((0, 1), 6, 8)), node(0)
    for node_status in (holder, nothing):
        node_status.job_ranks.CopyFrom(job_ranks(old))
    answers: dict[int, pb.NodeStatus | str] = {0: nothing, 1: holder, 2: "can't be reached"}
    assert other_ranks(old, answers) == ""
    assert other_ranks(new, answers) == (
        "shadow node 1 (192.168.100.1:7000) holds a state at iteration 6, and its job file has a mesh with "
        "dp_shard 2 and tp 1, but the job now has a mesh with dp_shard 1 and tp 2"
    )


NUMBERS = st.sampled_from([0, 1, 2, 3, (1 << 32) - 1])


@fuzz(
    100,
    ranks=messages(
        pb.JobRanks,
        ranks=NUMBERS,
        hosts=st.just("a"),
        shadow_nodes=st.integers(0, 1),
        replicas=NUMBERS,
        present=NUMBERS,
    ),
)
def test_any_ranks_that_a_node_tells_make_a_job_of_their_size_or_none(ranks: pb.JobRanks) -> None:
    job = grouped([0, 2], [1, 3])
    try:
        former = job_of(job, ranks)
    except OtherRanks:
        return
    assert former.rank_count == len({rank.rank for group in former.dp_groups for rank in group.ranks})
    shards = sum(len(group.shadow_nodes or ()) for group in former.dp_groups)
    assert sum(len(set(holders)) for holders in holders_of(former).values()) == shards * former.replicas
    if isinstance(former, PartialJob):
        assert {len(group.ranks) for group in former.dp_groups} == {len(former.present)}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"replicas": 3},
        {"replicas": (1 << 32) - 1},
        {"present": [0]},
        {"present": [1, 0]},
        {"mesh": {"pp": 1 << 20, "dp_replicate": 2, "dp_shard": 2, "tp": 1}},
        {"groups": []},
        {"groups": [pb.GroupRanks(ranks=[0, 0], hosts=["", ""], shadow_nodes=[0])]},
        {"groups": [pb.GroupRanks(ranks=[0, 1], hosts=["", ""], shadow_nodes=[0, 0])]},
    ],
    ids=str,
)
def test_nothing_is_made_of_ranks_that_no_job_has(nonsense: dict[str, Any]) -> None:
    job = grouped([0, 2], [1, 3])
    ranks = job_ranks(job)
    assert job_of(job, ranks).rank_count == 4
    for name in nonsense:
        ranks.ClearField(name)  # type: ignore[arg-type]
    ranks.MergeFrom(pb.JobRanks(**nonsense))
    with pytest.raises(OtherRanks, match="that no job has"):
        job_of(job, ranks)
