"""Hosts with several ranks under DDP, in real processes: `.grad` is the defined average, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.ddp_hook import GradientHook
from checkmate.training.gradients.host_reducer import HostReducer, HostRings, MergedLayout, merge
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.training.model.ddp import DdpModel
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.shares import Share
from testbed.ports import free_port
from tests.support.rings import averaged, same_bits
from tests.support.training.rank_processes import RankProcesses, failing_backward
from tests.support.waiting import wait_until

CHANNELS = 2
BROKEN = re.compile("channel|on the same host, has ended")


@given(st.lists(st.integers(1, 50), min_size=8, max_size=30), st.integers(1, 8), st.integers(1, 3))
def test_merged_buckets_follow_backward(sizes: list[int], count: int, shards: int) -> None:
    parameters = [Parameter(f"p{i}", (size,), "float32") for i, size in enumerate(sizes)]
    shares = [make_layout(parameters, shards, 100, share=Share(i, count)) for i in range(count)]
    merged = merge(shares)
    for share, layout in enumerate(shares):
        buckets = [b for b, owner in zip(merged.layout.buckets, merged.owners, strict=True) if owner == share]
        assert tuple(buckets) == layout.buckets
    assert sorted(merged.layout.where) == [*range(len(sizes))]
    last = [min(place.parameter for place in bucket.places) for bucket in merged.layout.buckets]
    assert last == sorted(last, reverse=True)


class HostNet(nn.Module):
    """Parameters of several sizes and types, a frozen one, and one that only some iterations use."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(17, 31), nn.Linear(31, 17), nn.Linear(17, 60), nn.Linear(60, 3)]
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.short = nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.sometimes = nn.Linear(17, 17)

    def forward(self, x: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
            if more and x.shape[-1] == 17:
                x = x + self.sometimes(x)
        out: torch.Tensor = (self.layers[-1](x) * self.frozen).sum() * self.short.float().mean()
        return out * self.scale.sum()


@dataclass(frozen=True)
class HostRank:
    """A rank's place: hosts with `local` ranks each, numbered host by host."""

    rank: int
    count: int
    local: int
    port: int

    @property
    def host(self) -> int:
        return self.rank // self.local

    @property
    def share(self) -> int:
        return self.rank % self.local

    def inner(self) -> RingPlace:
        ips = [f"127.0.{self.share + 1}.{host + 1}" for host in range(self.count // self.local)]
        return RingPlace(self.host, ips, CHANNELS, port=self.port)

    def within(self) -> RingPlace:
        ips = [f"127.1.{self.host + 1}.{share + 1}" for share in range(self.local)]
        return RingPlace(self.share, ips, 1, ports=[self.port] * self.local)


@contextlib.contextmanager
def hooked(
    ddp: DistributedDataParallel, at: HostRank
) -> Iterator[tuple[GradientHook, list[Ring], MergedLayout]]:
    """Have a model reduced over all ranks."""
    model = DdpModel(ddp)
    shares = [make_layout(model.describe(), 2, 3000, share=Share(i, at.local)) for i in range(at.local)]
    merged = merge(shares)
    with connect_ring(at.inner(), timeout=20) as ring, HostRings(at.within(), timeout=20) as rings:
        inner = RingReducer(ring, shares[at.share], divisor=at.count)
        reducer = HostReducer(merged, at.share, inner, rings)
        buckets = GradientBuckets(reducer.layout, list(model.trained().values()), reducer, 0)
        hook = GradientHook(ddp, buckets)
        hook.register()
        try:
            yield hook, [ring, rings.inward, rings.outward], merged
        finally:
            hook.close()


def rows(rank: int, iteration: int, part: int) -> torch.Tensor:
    return torch.randn(4, 17, generator=torch.Generator().manual_seed(1000 * rank + 10 * iteration + part))


def expected(alone: nn.Module, merged: MergedLayout, at: HostRank) -> list[torch.Tensor]:
    """Return the average of each bucket: hosts' sums begin with the rank after the owner."""
    trained = [parameter for parameter in alone.parameters() if parameter.requires_grad]
    averages = []
    for bucket, owner in zip(merged.layout.buckets, merged.owners, strict=True):
        gradients = [trained[place.parameter].grad for place in bucket.places]
        local = torch.cat(
            [
                torch.zeros_like(trained[place.parameter]).view(-1) if gradient is None else gradient.view(-1)
                for place, gradient in zip(bucket.places, gradients, strict=True)
            ]
        )
        gathered = [torch.empty_like(local) for _ in range(at.count)]
        dist.all_gather(gathered, local)
        sums = []
        for first in range(0, at.count, at.local):
            order = [first + (owner + 1 + i) % at.local for i in range(at.local)]
            total = gathered[order[0]]
            for rank in order[1:]:
                total = gathered[rank] + total
            sums.append(total)
        averages.append(averaged(sums, CHANNELS, at.count))
    return averages


def train(rank: int, count: int, local: int, port: int) -> int:
    """Train, accumulating, with parameters that some iterations don't use; compare each gradient."""
    at = HostRank(rank, count, local, port)
    torch.manual_seed(1)
    model = HostNet()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003, find_unused_parameters=True)
    compared = 0
    with hooked(ddp, at) as (hook, _, merged):
        for iteration in range(4):
            for part in range(2):
                more = iteration % 2 == 1
                with contextlib.nullcontext() if part else ddp.no_sync():
                    ddp(rows(rank, iteration, part), more=more).backward()
                alone(rows(rank, iteration, part), more=more).backward()
            for index, flat in enumerate(expected(alone, merged, at)):
                assert same_bits(hook.buckets._reducer.tensors[index], flat), (iteration, index)
                for place in merged.layout.buckets[index].places:
                    gradient = hook.buckets.parameters[place.parameter].grad
                    if gradient is not None:
                        assert same_bits(gradient.view(-1), flat[place.start : place.stop])
                        compared += 1
            ddp.zero_grad()
            alone.zero_grad()
    return compared


@pytest.mark.parametrize(
    ("count", "local"),
    [(4, 2), (6, 2), (8, 4)],
)
def test_gradients_are_the_defined_average_of_all_ranks(ranks: RankProcesses, count: int, local: int) -> None:
    compared = ranks.run(count, train, local, free_port())
    assert min(compared) == max(compared) > 4 * 8


def follow_ddp(rank: int, count: int, port: int) -> bool:
    """Train two models of float32, one with DDP's own reduction; return whether all gradients are equal."""
    torch.manual_seed(1)
    hooked_model, native_model = (
        nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)
    )
    native_model.load_state_dict(hooked_model.state_dict())
    native = DistributedDataParallel(native_model)
    ddp = DistributedDataParallel(hooked_model)
    with hooked(ddp, HostRank(rank, count, 2, port)):
        for model in (ddp, native):
            model(rows(rank, 0, 0)[:, :9]).square().mean().backward()
    close = [
        torch.allclose(parameter.grad, native_parameter.grad, rtol=1e-6, atol=1e-7)
        for parameter, native_parameter in zip(
            hooked_model.parameters(), native_model.parameters(), strict=True
        )
        if parameter.grad is not None and native_parameter.grad is not None
    ]
    return len(close) == 4 and all(close)


def test_gradients_are_those_of_ddp_but_for_the_order_of_additions(ranks: RankProcesses) -> None:
    assert all(ranks.run(4, follow_ddp, free_port()))


def lose_a_rank(rank: int, count: int, port: int) -> str:
    """Rank 3 breaks its connections instead of its second backward; return the error of the others'."""
    ddp = DistributedDataParallel(HostNet(), bucket_cap_mb=0.003)
    with hooked(ddp, HostRank(rank, count, 2, port)) as (hook, rings, _):
        ddp(rows(rank, 0, 0), more=True).backward()
        loss = ddp(rows(rank, 1, 0), more=True)
        dist.barrier()
        if rank == 3:
            for ring in rings:
                ring.abort()
            dist.barrier()
            return ""
        words = failing_backward(loss)
        assert str(hook.buckets.error) == words
        return words


def test_backward_ends_on_all_hosts_when_a_rank_is_gone(ranks: RankProcesses) -> None:
    """Rank 3 shares a host with rank 2, and a DP group with rank 1; rank 0 has nothing to do with it."""
    errors = ranks.run(4, lose_a_rank, free_port())
    assert all(BROKEN.search(error) for error in errors[:3])


def lose_a_rank_while_idle(rank: int, count: int, port: int) -> str:
    """Rank 1 ends between two iterations; return the error of rank 0, which is in no backward."""
    ddp = DistributedDataParallel(HostNet(), bucket_cap_mb=0.003)
    with hooked(ddp, HostRank(rank, count, 2, port)) as (hook, rings, _):
        ddp(rows(rank, 0, 0), more=True).backward()
        dist.barrier()
        if rank == 1:
            for ring in rings:
                ring.abort()
        if rank == 0:
            wait_until(lambda: hook.buckets.error is not None, "an error", 10)
        dist.barrier()
        return str(hook.buckets.error)


def test_a_rank_that_ends_is_noticed_by_an_idle_rank_of_its_host(ranks: RankProcesses) -> None:
    """Others of the host may wait for that one, and it breaks their connections in turn."""
    errors = ranks.run(4, lose_a_rank_while_idle, free_port())
    assert "rank 1" in errors[0] and "on the same host, has ended" in errors[0]


def leave_by_an_error(rank: int, count: int, port: int) -> str:
    """Rank 1's script fails between two iterations; return the error of rank 0, which is in no backward."""
    ddp = DistributedDataParallel(HostNet(), bucket_cap_mb=0.003)
    with hooked(ddp, HostRank(rank, count, 2, port)) as (hook, rings, _):
        ddp(rows(rank, 0, 0), more=True).backward()
        dist.barrier()
        if rank == 1:
            hook.buckets.give_up()
            hook.close()
            for ring in rings:
                ring.close()
        if rank == 0:
            wait_until(lambda: hook.buckets.error is not None, "an error", 10)
        dist.barrier()
        return str(hook.buckets.error)


def test_a_script_that_fails_is_noticed_by_an_idle_rank_of_its_host(ranks: RankProcesses) -> None:
    errors = ranks.run(4, leave_by_an_error, free_port())
    assert "rank 1" in errors[0] and "on the same host, has ended" in errors[0]


def leave_early(rank: int, count: int, port: int) -> str:
    """Rank 1 closes its hook and its rings while the others wait in backward; return their errors."""
    error_text = ""
    ddp = DistributedDataParallel(HostNet(), bucket_cap_mb=0.003)
    with hooked(ddp, HostRank(rank, count, 2, port)):
        if rank != 1:
            with pytest.raises(RingError) as excinfo:
                ddp(rows(rank, 0, 0), more=True).backward()
            error_text = str(excinfo.value)
    dist.barrier()
    return error_text


def test_a_rank_that_leaves_ends_the_others(ranks: RankProcesses) -> None:
    errors = ranks.run(4, leave_early, free_port())
    assert all(BROKEN.search(error) for rank, error in enumerate(errors) if rank != 1)
