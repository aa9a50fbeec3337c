"""A rank's place in its job, and the errors of ranks without one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.job.schema import Job, Mesh
from checkmate.training.errors import SessionError
from checkmate.training.model.choosing import model_of
from checkmate.training.model.ddp import DdpModel, ShareModel
from checkmate.training.start import exchange, places
from checkmate.training.start.named_job import named_job
from checkmate.wire.parameter import LayoutError
from checkmate.wire.shares import Share
from testbed.jobs import job, job_data
from tests.support.training.alone import alone


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    with alone():
        yield DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=1)


@given(st.integers(1, 3), st.integers(2, 5), st.data())
def test_every_rank_finds_its_place(groups: int, ranks: int, data: st.DataObject) -> None:
    demo_job = job(groups=groups, ranks=ranks, nodes=2)
    group, position = data.draw(st.integers(0, groups - 1)), data.draw(st.integers(0, ranks - 1))
    together = data.draw(st.permutations([group * ranks + i for i in range(ranks)]))
    place = places.place_of(demo_job, group * ranks + position, groups * ranks, together)
    assert (place.group, place.position, place.ranks) == (group, position, ranks)
    assert place.first == (position == 0)
    assert place.spokesman == group * ranks
    assert place.side == {0: 0, ranks - 1: 1}.get(position)
    assert place.ips[position] == str(demo_job.dp_groups[group].ranks[position].ip)
    assert [node.id for node in place.nodes] == [0, 1]


def test_faults_are_told() -> None:
    demo_job = job(groups=2, ranks=2)
    with pytest.raises(SessionError, match=r"has 4 ranks, but the process group has 3 \(WORLD_SIZE\)"):
        places.place_of(demo_job, 0, 3, [0, 1])
    with pytest.raises(SessionError, match=r"rank 7 is not in the job demo; its dp_groups have 0, 1, 2, 3"):
        places.place_of(demo_job, 7, 4, [7])
    with pytest.raises(SessionError, match=r"DDP averages over ranks \[0, 1, 2\], but .*\[0\] has \[0, 1\]"):
        places.place_of(demo_job, 0, 4, [0, 1, 2])


def on_hosts(*groups: Sequence[int]) -> Job:
    """Return a job with these ranks in each DP group, in order of the hosts h0, h1 and so on."""
    demo_job = job(groups=len(groups), ranks=len(groups[0]), nodes=2)
    members = [
        [
            replace(rank, rank=number, host=f"h{at}")
            for at, (number, rank) in enumerate(zip(numbers, group.ranks, strict=True))
        ]
        for numbers, group in zip(groups, demo_job.dp_groups, strict=True)
    ]
    dp_groups = [
        replace(group, ranks=tuple(ranks)) for group, ranks in zip(demo_job.dp_groups, members, strict=True)
    ]
    return replace(demo_job, dp_groups=tuple(dp_groups))


def test_groups_on_the_same_hosts_train_one_model_if_ddp_spans_them() -> None:
    demo_job = on_hosts([0, 3, 6], [1, 4, 7], [2, 5, 8])
    place = places.place_of(demo_job, 7, 9, range(9))
    assert (place.group, place.position, place.together) == (1, 2, (0, 1, 2))
    assert (place.share, place.replicas) == (Share(1, 3), 9)
    assert [rank.rank for rank in place.host_ranks] == [6, 7, 8]
    alone = places.place_of(demo_job, 7, 9, [1, 4, 7])
    assert (alone.together, alone.share, alone.replicas) == ((), Share(0, 1), 3)
    assert [rank.rank for rank in alone.host_ranks] == [7]
    stage = places.place_of(demo_job, 7, 9, [1, 4, 7, 2, 5, 8])
    assert (stage.together, stage.share) == ((1, 2), Share(0, 2))
    with pytest.raises(
        SessionError, match=r"over ranks \[1, 2, 4, 7\], but .* dp_groups\[1\] has \[1, 4, 7\]"
    ):
        places.place_of(demo_job, 7, 9, [1, 4, 7, 2])


def test_groups_of_a_model_that_are_not_on_the_same_hosts_are_refused() -> None:
    elsewhere = on_hosts([0, 2], [1, 3])
    ranks = [replace(rank, host=f"x{rank.rank}") for rank in elsewhere.dp_groups[1].ranks]
    groups = (elsewhere.dp_groups[0], replace(elsewhere.dp_groups[1], ranks=tuple(ranks)))
    for demo_job in (job(groups=2, ranks=2), replace(elsewhere, dp_groups=groups)):
        with pytest.raises(
            SessionError, match=r"\[0\] and dp_groups\[1\], which are not on the same hosts: "
        ):
            places.place_of(demo_job, 0, 4, range(4))
    with pytest.raises(SessionError, match=r"several on each host, which collective: nccl can't do yet"):
        places.place_of(replace(on_hosts([0, 2], [1, 3]), collective="nccl"), 0, 4, range(4))


def test_a_mesh_determines_which_groups_train_a_model() -> None:
    demo_job = replace(on_hosts([0, 2], [1, 3]), mesh=Mesh(dp_replicate=4), gpus_per_host=2)
    assert places.place_of(demo_job, 3, 4, range(4)).together == (0, 1)
    with pytest.raises(SessionError, match=r"\[1, 3\], but the job's mesh has \[0, 1, 2, 3\]: give DDP a"):
        places.place_of(demo_job, 3, 4, [1, 3])
    sharded = replace(demo_job, mesh=Mesh(dp_replicate=2, dp_shard=2))
    with pytest.raises(
        SessionError, match=r"has \[1, 3\]: for plain DDP, write mesh: {dp_replicate: 4}; else"
    ):
        places.place_of(sharded, 3, 4, range(4))
    for variant, world in (
        (sharded, [2, 3]),
        (replace(sharded, collective="nccl"), range(4)),
        (replace(sharded, gpus_per_host=4), range(4)),
    ):
        with pytest.raises(SessionError, match=r"has \[1, 3\]: give DDP a process_group of these"):
            places.place_of(variant, 3, 4, world)
    with pytest.raises(SessionError, match="several replicas on a host, which only DDP can train"):
        places.place_of(demo_job, 3, 4, None)


def test_holders_and_shards() -> None:
    place = places.place_of(job(groups=1, ranks=2, nodes=3, replicas=2), 0, 2, [0, 1])
    assert place.shards == 3
    assert [[node.id for node in place.holders(shard)] for shard in range(3)] == [[0, 1], [1, 2], [2, 0]]


def test_join_needs_ddp_and_a_job(ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SessionError, match="a Linear is not a DistributedDataParallel"):
        model_of(ddp.module)
    monkeypatch.delenv("CHECKMATE_JOB", raising=False)
    with pytest.raises(SessionError, match="CHECKMATE_JOB is not set"):
        places.join(DdpModel(ddp), named_job())


def test_join_reads_the_job(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    monkeypatch.setenv("CHECKMATE_JOB", str(file))
    with pytest.raises(SessionError, match=r"job\.yaml: .*cannot be read"):
        places.join(DdpModel(ddp), named_job())
    file.write_text(yaml.safe_dump(job_data(ranks=2)))
    with pytest.raises(SessionError, match="has 2 ranks, but the process group has 1"):
        places.join(DdpModel(ddp), named_job())
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(SessionError, match="RANK is 5, but this process is rank 0"):
        places.join(DdpModel(ddp), named_job())


@pytest.fixture
def hosts_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], Job]:
    """Return a function that makes a job with copies by hosts."""

    def make(part: dict[str, Any]) -> Job:
        node = {"id": 0, "mgmt": "127.0.0.1:7000"}
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump({"job": "a", "copies": "host", "shadow_nodes": [node], **part}))
        monkeypatch.setenv("CHECKMATE_JOB", str(file))
        return named_job()

    return make


def test_a_process_without_a_process_group_is_alone(
    hosts_copy: Callable[[dict[str, Any]], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = model_of(nn.Linear(2, 2), "host")
    place = places.join(bare, hosts_copy({"ranks": 1}))
    assert (place.rank, place.position, place.ranks) == (0, 0, 1)
    with pytest.raises(SessionError, match="init_process_group"):
        places.join(bare, hosts_copy({"ranks": 2}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SessionError, match="init_process_group"):
        places.join(bare, hosts_copy({"ranks": 1}))
    with pytest.raises(SessionError, match="a str is not a DistributedDataParallel"):
        model_of("model", "host")


def test_a_zero_optimizer_needs_a_job_of_shards(
    ddp: DistributedDataParallel, hosts_copy: Callable[[dict[str, Any]], Job]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which its module imports
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam)
    assert places.join(model_of(ddp, "host", optimizer), hosts_copy({"mesh": {"dp_shard": 1}})).ranks == 1
    assert not isinstance(model_of(ddp, "switch", optimizer), ShareModel)
    crowded = hosts_copy({"ranks": 2})
    with (
        mock.patch.object(exchange, "rank_and_world", lambda: (0, 2)),
        pytest.raises(SessionError, match=r"write mesh: {dp_shard: 2} in place of ranks"),
    ):
        places.join(model_of(ddp, "host", optimizer), crowded)


def test_the_layout_has_what_ddp_averages() -> None:
    with alone():
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[0].bias.requires_grad_(False)
        ignored = ["1.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
        ddp = DistributedDataParallel(model, bucket_cap_mb=3)
        wrapped = DdpModel(ddp)
        assert list(wrapped.trained()) == ["0.weight", "1.weight", "2.weight", "2.bias"]
        layout = places.lay_out(wrapped, 2)
        assert [p.name for p in layout.parameters] == list(wrapped.trained())
        assert layout.bucket_bytes == 3 << 20
        assert layout.parameters[0].dtype == str(torch.get_default_dtype()).removeprefix("torch.")


def test_a_parameter_that_is_not_dense_is_refused_by_name() -> None:
    """DDP's buckets don't follow its strides, and optimizers do not create state with its format."""
    model = nn.Linear(5, 4)
    model.weight.data = torch.zeros(4, 6)[:, :5]
    with (
        alone(),
        pytest.raises(LayoutError, match=r"^weight cannot be protected: .* gaps .*: shape \(4, 5\)"),
    ):
        places.lay_out(DdpModel(DistributedDataParallel(model)), 2)
