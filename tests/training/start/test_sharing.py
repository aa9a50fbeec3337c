"""Ranks that need the same state read a part each; together they have all, bit for bit."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from checkmate.nodes.reader import ShardRequest, States
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import restore
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.capture import Watched
from checkmate.training.start import exchange, from_nodes, places, sharing
from checkmate.training.start.all_ranks import run_on_all_ranks
from checkmate.training.start.exchange import ExchangeError
from checkmate.training.start.from_nodes import Fetched, FetchError
from checkmate.training.start.install import InstallError
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import FromNodes
from checkmate.training.start.sharing import Readers, divide, prepare, share, table
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.training.rank_processes import RankProcesses


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    shards=st.integers(1, 4),
    readers=st.integers(1, 9),
)
def test_readers_read_everything_once_and_about_as_much_each(
    sizes: list[int], shards: int, readers: int
) -> None:
    parameters = [Parameter.of(f"p{at}", (size,), (1,), "float32") for at, size in enumerate(sizes)]
    layout = make_layout(parameters, shards, 1000)
    requests = [ShardRequest("job", "run", 3, 0, shard) for shard in range(shards)]
    parts = divide(requests, {0: layout}, readers)
    for at, request in enumerate(requests):
        read = chain.from_iterable(part.get(at, ()) for part in parts)
        assert sorted(read) == sorted(layout.of_shard(request.shard))
    loads = [sum(sizes[number] for numbers in part.values() for number in numbers) for part in parts]
    assert max(loads) <= sum(sizes) / readers + max(sizes)


CPU = torch.device("cpu")


def _state(number: int) -> tuple[torch.Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(number)
    tensor = torch.randn(number, 3, generator=generator).to(torch.bfloat16)
    moments = torch.randn(number, 3, generator=generator)
    numbers: dict[str, object] = {"lr": 0.1 + number, "nan": float("nan"), "whole": 1 << 40, "yes": True}
    return tensor, {"exp_avg": moments, "step": torch.tensor(3.0), "none": None, **numbers}


PARTS = [[4, 0, 1], [3, 2], []]
"""Rank 2 has nothing to read; parameter 0 has no elements."""


rank_name = "rank {}".format


def _table_of(states: States) -> Any:
    return json.loads(json.dumps(table(states)))


def _share(states: States, readers: Readers | None) -> States:
    tables = exchange.gather(table(states) if readers else None)
    return share(states, prepare(states, tables, readers, rank_name), rank_name)


def _shared(rank: int, _: int, piece: int, packed_below: int) -> States:
    group = dist.new_group([2, 0, 1])
    ranks = dist.get_process_group_ranks(group)
    readers = Readers(ranks, ranks.index(rank), group, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "PIECE_BYTES", piece)
        patch.setattr(sharing, "PACKED_BELOW", packed_below)
        return _share({number: _state(number) for number in PARTS[rank]}, readers)


@pytest.mark.parametrize("piece", [16, 37, 1 << 20])
@pytest.mark.parametrize("packed_below", [0, 10, 1 << 20])
def test_all_readers_have_what_each_has_read(ranks: RankProcesses, piece: int, packed_below: int) -> None:
    for received in ranks.run(3, _shared, piece, packed_below):
        assert sorted(received) == [0, 1, 2, 3, 4]
        for number, (tensor, values) in received.items():
            written_tensor, expected = _state(number)
            assert tensor.dtype == written_tensor.dtype
            assert torch.equal(tensor, written_tensor)
            assert list(values) == list(expected)
            assert torch.equal(values["exp_avg"], expected["exp_avg"])  # type: ignore[arg-type]
            assert values["step"].shape == ()
            rest = ["lr", "nan", "whole", "yes", "none"]
            assert repr([values[index] for index in rest]) == repr([expected[index] for index in rest])


def _apart(rank: int, _: int) -> States:
    """Rank 0 is alone; ranks 1 and 2 share."""
    together = dist.new_group([1, 2])
    readers = Readers([1, 2], rank - 1, together, CPU) if rank else None
    return _share({rank: _state(rank)}, readers)


def test_ranks_without_others_keep_what_they_have_read(ranks: RankProcesses) -> None:
    assert [sorted(received) for received in ranks.run(3, _apart)] == [[0], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    "table",
    [None, 3, [3], [[1, "", "float32"]], [[1, "", "object", [2], None]], [[1, "step", "float32", [2], None]]],
    ids=["none", "number", "no-list", "short", "type", "no-tensor"],
)
def test_a_table_that_is_not_one_is_refused(table: object) -> None:
    readers = Readers([0, 1], 0, cast("dist.ProcessGroup", None), CPU)
    message = "rank 1 does not say what it has read from the shadow nodes"
    with pytest.raises(ExchangeError, match=message):
        prepare({0: _state(2)}, [_table_of({0: _state(2)}), table], readers, rank_name)


def test_what_two_ranks_have_read_is_refused() -> None:
    """Each of many ranks would send and keep a large embedding."""
    readers = Readers([0, 1], 0, cast("dist.ProcessGroup", None), CPU)
    with pytest.raises(ExchangeError, match="rank 1 has read parameter 7, as another rank has"):
        prepare({7: _state(2)}, [_table_of({7: _state(2)})] * 2, readers, rank_name)


def _damaged(rank: int, _: int, damaged: int) -> str:
    readers = Readers([0, 1], rank, dist.new_group([0, 1]), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", torch.zeros)
        if rank == damaged:
            patch.setattr(sharing.SentPiece, "take", lambda _: None)
        try:
            _share({rank: _state(2)}, readers)
        except ExchangeError as error:
            return str(error)
    return ""


def test_all_ranks_learn_that_one_has_received_something_else(ranks: RankProcesses) -> None:
    message = (
        "rank 1 has received other state than rank 0 has read from the shadow nodes: the network or the "
        "memory of one of them is at fault"
    )
    assert ranks.run(2, _damaged, 1) == [message, message]


def _fails(rank: int, ranks: int) -> tuple[str, bool]:
    def do() -> None:
        if rank == 1:
            raise MemoryError("4 GiB")

    outcome = run_on_all_ranks(places.place_of(job(ranks=ranks), rank, ranks, list(range(ranks))), do)
    return outcome.trouble, outcome.unread


def test_no_rank_waits_for_one_without_memory(ranks: RankProcesses) -> None:
    (trouble, unread), peer_result = ranks.run(2, _fails)
    assert (trouble, unread) == peer_result
    assert "MemoryError: 4 GiB" in trouble
    assert not unread


def test_all_memory_of_an_exchange_is_there_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without memory for it would keep the others waiting."""
    states = {0: _state(2)}, {1: _state(3)}
    readers = Readers([0, 1], 0, cast("dist.ProcessGroup", None), CPU)
    parts = prepare(states[0], [_table_of(rank_states) for rank_states in states], readers, rank_name)
    assert parts is not None

    def fail_allocation(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    class Work:
        def wait(self) -> None:
            """Return at once."""

    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, fail_allocation)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: Work())
    parts.exchange()


def test_what_no_rank_has_read_is_an_error() -> None:
    """The script's own initial values would stay."""
    place = places.place_of(job(ranks=2), 0, 2, [0, 1])
    plan = FromNodes(incarnation=1, run="run", iteration=2, holders={})
    start = Start(plan)
    parameters = [Parameter.of(f"p{number}", (3,), (1,), "float32") for number in range(3)]
    states = {number: _state(number) for number in (0, 1)}
    fetched = Fetched(parameters, states, pb.IterationRecord(), pb.OptimizerSpec(), True, frozenset(range(3)))
    watched = cast("Watched", None)  # nothing of it is touched
    with pytest.raises(FetchError, match="the ranks have read 2 of 3 parameters, and not p2"):
        from_nodes.install(place, watched, start, fetched)


def _restored(
    rank: int, ranks: int, bad: int, error: type[Exception]
) -> tuple[list[bool], list[int] | None, str]:
    """Restore three parameters; on rank `bad`, reading this rank's part fails. Return what was asked."""
    with_readers: list[bool] = []

    def read(place: Place, *arguments: Any) -> Fetched:
        seconds, readers, _ = arguments[-3:]
        assert seconds == 1.0, "each attempt has the whole timeout"
        with_readers.append(readers is not None)
        if readers and rank == bad:
            raise error("parameter 2 is not of shard 0")
        states = {number: _state(number) for number in ([rank] if readers else range(3))}
        return Fetched([], states, pb.IterationRecord(), pb.OptimizerSpec(), True)

    watched = Watched(DdpModel(model := DistributedDataParallel(nn.Linear(2, 2))), SGD(model.parameters()))
    place = places.place_of(job(ranks=ranks), rank, ranks, list(range(ranks)))
    plan = FromNodes(incarnation=1, run="run", iteration=2, holders={})
    start = Start(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_nodes, "read", read)
        patch.setattr(from_nodes, "install", lambda *arguments: sorted(arguments[-1].states))
        result, trouble = restore._from_nodes(place, watched, Stubs(place.job, None), plan, start, 1.0)
    return with_readers, result, trouble


@pytest.mark.parametrize(("bad", "requests"), [(9, [True]), (1, [True, False])], ids=["parts", "refused"])
def test_each_rank_reads_all_if_the_part_of_one_is_refused(
    ranks: RankProcesses, bad: int, requests: list[bool]
) -> None:
    assert ranks.run(3, _restored, bad, FetchError) == [(requests, [0, 1, 2], "")] * 3


def test_state_that_does_not_fit_is_not_read_again(ranks: RankProcesses) -> None:
    for requests, extra, trouble in ranks.run(3, _restored, 1, InstallError):
        assert requests == [True]
        assert extra is None
        assert "parameter 2 is not of shard 0" in trouble


def _placed(_: int, __: int) -> str:
    return str(exchange.device(dist.new_group([0, 1])))


def test_bytes_go_by_way_of_the_cpu_if_the_backend_can(ranks: RankProcesses) -> None:
    assert ranks.run(2, _placed) == ["cpu", "cpu"]


def _misfits(rank: int, ranks: int) -> str:
    """Return the errors of all ranks, of which all but rank 2 have the same one."""

    def do() -> None:
        raise FetchError("its shard is lost" if rank == 2 else "the shadow nodes hold another model")

    place = places.place_of(job(ranks=ranks), rank, ranks, list(range(ranks)))
    return run_on_all_ranks(place, do).trouble


def test_equal_errors_of_ranks_are_one(ranks: RankProcesses) -> None:
    words = "ranks 0, 1, 3: the shadow nodes hold another model; rank 2 (192.168.0.2): its shard is lost"
    assert ranks.run(4, _misfits) == [words] * 4
