"""Stock NCCL sends through the plugin. The ranks share a GPU, each as a host of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import variables
from checkmate.ring.place import RingError
from checkmate.training.gradients import nccl_check
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.ddp_hook import GradientHook
from checkmate.training.gradients.nccl_check import RankVerdict
from checkmate.training.model.ddp import DdpModel
from checkmate.training.start import places
from checkmate.training.start.nccl_runtime import TorchNccl
from tests.support.training.nccl_ranks import TAGGING, check_reduced, prepare, reduce
from tests.support.training.rank_processes import RankProcesses, join_nccl

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="stock NCCL needs a GPU"),
    TAGGING,
]


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    """Return new processes, because a process loads NCCL's plugins once."""
    with RankProcesses() as processes:
        yield processes


@pytest.mark.parametrize(("count", "channels"), [(2, 1), (3, 2), (4, 4), (2, 8)])
def test_averages_are_exact_and_every_byte_is_tagged_once(
    ranks: RankProcesses, count: int, channels: int
) -> None:
    check_reduced(ranks.run(count, reduce, channels, TorchNccl()), TorchNccl())


def after_another(
    rank: int, count: int, folder: str, backend: str, is_bound: bool, is_named: bool
) -> dict[str, Any]:
    """Reduce as above, in a script that has a communicator already, bound to its GPU if `is_bound`.

    NCCL is told of the plugin before that if `is_named`.
    """
    if is_named:
        os.environ |= variables(shared_object())
    join_nccl(rank, count, f"{folder}/store", backend, torch.device("cuda", 0) if is_bound else None)
    values = torch.full((1000,), float(rank), device="cuda")
    dist.all_reduce(values)
    assert (values == sum(range(count))).all()
    reduced = reduce(rank, count, 2, TorchNccl())
    dist.all_reduce(values)
    assert (values == count * sum(range(count))).all()
    return reduced


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_script_may_have_a_communicator_of_its_own(
    ranks: RankProcesses, tmp_path: Path, backend: str, is_bound: bool
) -> None:
    reduced = ranks.run(2, after_another, str(tmp_path), backend, is_bound, True)
    check_reduced(reduced, TorchNccl())


def test_a_communicator_made_without_the_plugin_is_named_as_the_trouble(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    first, second = ranks.run(2, after_another, str(tmp_path), "nccl", False, False)
    assert first["troubles"] == second["troubles"]
    assert "because it made its first communicator without it" in first["troubles"][0]


def examined(rank: int, count: int) -> list[RankVerdict]:
    """Return the verdicts of `checkmate nccl check`."""
    maker = prepare(rank, count, 2, TorchNccl(), ExitStack())
    return nccl_check.examine(maker.place.job, 0)


def test_the_check_compares_every_byte(ranks: RankProcesses) -> None:
    both = ranks.run(2, examined)
    assert both[0] == both[1]
    assert [verdict.trouble for verdict in both[0]] == ["", ""]
    slicing = prepare(0, 2, 2, TorchNccl(), ExitStack()).layout.slicing
    layout = nccl_check.sample_layout(2, slicing, nccl_check.SIZES)
    compared = sum(channel.nbytes for verdict in both[0] for channel in verdict.channels)
    assert compared == sum(bucket.nbytes for bucket in layout.schedule)
    assert all(channel.mismatches == 0 for verdict in both[0] for channel in verdict.channels)


def backward_of(rank: int, count: int) -> list[float]:
    """Train on a GPU that is busy for a second; return how long each backward took. PyTorch must not wait."""
    torch.cuda.set_device(0)
    torch.manual_seed(1)
    layers = [nn.Linear(1000, 1000) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=2)
    with ExitStack() as undo:
        maker = prepare(rank, count, 2, TorchNccl(), undo)
        maker.layout = places.lay_out(DdpModel(ddp), 2, maker.layout.slicing)
        reducer = maker.make()
        assert maker.troubles == []
        parameters = list(DdpModel(ddp).trained().values())
        hook = GradientHook(ddp, GradientBuckets(maker.layout, parameters, reducer, 0))
        undo.callback(hook.close)
        hook.register()
        took = []
        for iteration in range(4):
            ddp.zero_grad()
            loss = ddp(torch.full((8, 1000), float(rank), device="cuda")).square().mean()
            if iteration:  # the first backward checks formats, and waits
                torch.cuda._sleep(2 * 10**9)  # type: ignore[no-untyped-call]
                torch.cuda.set_sync_debug_mode("error")
            began = time.monotonic()
            loss.backward()
            took.append(time.monotonic() - began)
            torch.cuda.set_sync_debug_mode("default")
            assert not iteration or not torch.cuda.current_stream().query()
            torch.cuda.synchronize()
        gradients = torch.cat(
            [parameter.grad.flatten().cpu() for parameter in ddp.parameters() if parameter.grad is not None]
        )
        everyone = [torch.empty_like(gradients) for _ in range(count)]
        dist.all_gather(everyone, gradients)
        assert all(torch.equal(gradients, gathered) for gathered in everyone)
        return took


def test_backward_does_not_wait_for_the_gpu(ranks: RankProcesses) -> None:
    for took in ranks.run(2, backward_of):
        assert max(took[1:]) < 0.5


def captured(rank: int, count: int) -> str:
    """Return the error of an AllReduce within a CUDA graph."""
    torch.cuda.set_device(0)
    with ExitStack() as undo:
        reducer = prepare(rank, count, 2, TorchNccl(), undo).make()
        reducer.open(lambda index: None, lambda error: None)
        with pytest.raises(RingError) as excinfo, torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                reducer.submit(0)
            finally:
                assert reducer.communicator.stream is not None
                torch.cuda.current_stream().wait_stream(reducer.communicator.stream)
        return str(excinfo.value)


def test_a_cuda_graph_is_refused(ranks: RankProcesses) -> None:
    first, _ = ranks.run(2, captured)
    assert "leave backward out of CUDA graphs" in first
