"""Ranks that need the same state read a part each; together they have all, bit for bit."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from checkmate.nodes.reader import Asked, States
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import restore
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.capture import Watched
from checkmate.training.start import exchange, from_nodes, membership, sharing
from checkmate.training.start.exchange import ExchangeError
from checkmate.training.start.fetch import Fetched, FetchError
from checkmate.training.start.membership import Membership, Start
from checkmate.training.start.plans import RestartPlan
from checkmate.training.start.sharing import Readers, divide, share
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.training.rank_processes import RankProcesses


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    shards=st.integers(1, 4),
    readers=st.integers(1, 9),
)
def test_readers_read_everything_and_each_some_of_each_shard(
    sizes: list[int], shards: int, readers: int
) -> None:
    parameters = [Parameter.of(f"p{at}", (size,), (1,), "float32") for at, size in enumerate(sizes)]
    layout = make_layout(parameters, shards, 1000)
    asked = [Asked("job", "run", 3, 0, shard) for shard in range(shards)]
    parts = divide(asked, {0: layout}, readers)
    for at, one in enumerate(asked):
        numbers = layout.of_shard(one.shard)
        assert set(chain.from_iterable(part.get(at, ()) for part in parts)) == set(numbers)
        assert all(part.get(at) for part in parts) or not numbers
    loads = [sum(sizes[number] for numbers in part.values() for number in set(numbers)) for part in parts]
    assert max(loads) <= sum(sizes) / readers + max(sizes) + sum(
        min((sizes[number] for number in layout.of_shard(shard)), default=0) for shard in range(shards)
    )


def _state(number: int) -> tuple[torch.Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(number)
    tensor = torch.randn(number, 3, generator=generator).to(torch.bfloat16)
    moments = torch.randn(number, 3, generator=generator)
    numbers: dict[str, object] = {"lr": 0.1 + number, "nan": float("nan"), "whole": 1 << 40, "yes": True}
    return tensor, {"exp_avg": moments, "step": torch.tensor(3.0), "none": None, **numbers}


PARTS = [[4, 0, 1], [1, 2], []]
"""Rank 2 has nothing to read; parameter 1 is read twice, parameter 0 has no elements."""


def _shared(rank: int, _: int, chunk: int) -> States:
    ranks = [2, 0, 1]  # the order of the group, not of the global ranks
    readers = Readers(ranks, ranks.index(rank), dist.new_group(ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "CHUNK_BYTES", chunk)
        return share({number: _state(number) for number in PARTS[rank]}, readers, "rank {}".format)


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_all_readers_have_what_each_has_read(ranks: RankProcesses, chunk: int) -> None:
    for found in ranks.run(3, _shared, chunk):
        assert sorted(found) == [0, 1, 2, 4]
        for number, (tensor, values) in found.items():
            own, expected = _state(number)
            assert tensor.dtype == own.dtype
            assert torch.equal(tensor, own)
            assert list(values) == list(expected)
            assert torch.equal(values["exp_avg"], expected["exp_avg"])  # type: ignore[arg-type]
            assert values["step"].shape == ()
            rest = ["lr", "nan", "whole", "yes", "none"]
            assert repr([values[one] for one in rest]) == repr([expected[one] for one in rest])


def _apart(rank: int, _: int) -> States:
    """Rank 0 is alone; ranks 1 and 2 share."""
    together = dist.new_group([1, 2])
    readers = Readers([1, 2], rank - 1, together) if rank else None
    return share({rank: _state(rank)}, readers, "rank {}".format)


def test_ranks_without_others_keep_what_they_have_read(ranks: RankProcesses) -> None:
    assert [sorted(found) for found in ranks.run(3, _apart)] == [[0], [1, 2], [1, 2]]


def _malformed(rank: int, _: int, table: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(sharing, "_table", lambda _: table)
        try:
            share({rank: _state(2)}, Readers([0, 1], rank, dist.new_group([0, 1])), "rank {}".format)
        except ExchangeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "table",
    [None, 3, [3], [[1, "", "float32"]], [[1, "", "object", [2], None]], [[1, "step", "float32", [2], None]]],
    ids=["none", "number", "no-list", "short", "type", "no-tensor"],
)
def test_a_table_that_is_not_one_ends_all_readers(ranks: RankProcesses, table: object) -> None:
    said = "rank 1 does not say what it has read from the shadow nodes"
    assert ranks.run(2, _malformed, table) == [said, said]


def _restored(rank: int, ranks: int, bad: int) -> tuple[list[bool], list[int], str]:
    """Restore three parameters; on rank `bad`, a node refuses this rank's part. Return what was asked."""
    asked: list[bool] = []

    def read(place: Membership, *arguments: Any) -> Fetched:
        readers = arguments[-1]
        asked.append(readers is not None)
        if readers and rank == bad:
            raise FetchError("parameter 2 is not of shard 0")
        states = {number: _state(number) for number in ([rank] if readers else range(3))}
        return Fetched([], states, pb.IterationRecord(), pb.OptimizerSpec(), True)

    watched = Watched(DdpModel(model := DistributedDataParallel(nn.Linear(2, 2))), SGD(model.parameters()))
    place = membership.place(job(ranks=ranks), rank, ranks, list(range(ranks)))
    start = Start(RestartPlan("nodes", 1, "run", 2, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_nodes, "read", read)
        patch.setattr(from_nodes, "install", lambda *arguments: sorted(arguments[-1].states))
        found, trouble = restore._from_nodes(place, watched, Stubs(place.job, None), start, 1.0)
    return asked, found, trouble


@pytest.mark.parametrize(("bad", "asked"), [(9, [True]), (1, [True, False])], ids=["parts", "refused"])
def test_each_rank_reads_all_if_the_part_of_one_is_refused(
    ranks: RankProcesses, bad: int, asked: list[bool]
) -> None:
    assert ranks.run(3, _restored, bad) == [(asked, [0, 1, 2], "")] * 3


def _placed(_: int, __: int) -> str:
    return str(exchange.device(dist.new_group([0, 1])))


def test_bytes_go_by_way_of_the_cpu_if_the_backend_can(ranks: RankProcesses) -> None:
    assert ranks.run(2, _placed) == ["cpu", "cpu"]
