"""Gradients are averaged by a double of NCCL that sends through the plugin, in real processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import Version
from checkmate.ring.place import RingError
from checkmate.training.errors import SessionError
from checkmate.training.gradients import nccl_setup
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.ddp_hook import GradientHook
from checkmate.training.gradients.nccl_reducer import NcclReducer
from checkmate.training.model.ddp import DdpModel
from checkmate.training.start import nccl_runtime, places
from tests.support.nccl.calls import RELEASES, Caller
from tests.support.nccl.double import DoubleNccl
from tests.support.training.nccl_ranks import OTHER_CELLS, TAGGING, check_reduced, place_of, prepare, reduce
from tests.support.training.rank_processes import RankProcesses


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


class Loaded:
    """A library of NCCL."""

    def __init__(self, number: int) -> None:
        self.number = number

    def ncclGetVersion(self, pointer: Any) -> int:
        """Return the version through the pointer."""
        pointer._obj.value = self.number
        return 0


@pytest.mark.parametrize(("number", "version"), [(22605, (2, 26, 5)), (23007, (2, 30, 7))])
def test_the_version_is_that_of_the_library(number: int, version: Version) -> None:
    library: Any = Loaded(number)
    assert nccl_runtime.loaded_version(library) == version


@TAGGING
@pytest.mark.parametrize(
    ("count", "channels", "release"),
    [
        (2, 1, "2.30"),
        (3, 2, "2.29"),
        pytest.param(4, 4, "2.28", marks=pytest.mark.slow),
        pytest.param(3, 8, "2.27", marks=pytest.mark.slow),
        pytest.param(2, 2, "2.26", marks=pytest.mark.slow),
    ],
)
def test_averages_are_exact_and_every_byte_is_tagged_once(
    ranks: RankProcesses, count: int, channels: int, release: str
) -> None:
    double = DoubleNccl(release)
    check_reduced(ranks.run(count, reduce, channels, double), double)


def reduce_after_another(rank: int, count: int, double: DoubleNccl) -> dict[str, Any]:
    """Have the plugin refuse a communicator before there is a job, as DDP's, and reduce then."""
    caller = Caller(shared_object(), RELEASES[double.release])
    assert caller.init(1, count, count, rank) != 0
    reduced = reduce(rank, count, 1, double)
    assert caller.init(2, count, count, rank) != 0
    return reduced


@TAGGING
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_plugin_that_refused_a_communicator_first_is_used_later(release: str) -> None:
    double = DoubleNccl(release)
    with RankProcesses() as fresh:
        check_reduced(fresh.run(2, reduce_after_another, double), double)


def untagged(
    rank: int, count: int, doubles: list[DoubleNccl], environ: list[dict[str, str]], required: bool
) -> list[str]:
    """Return the troubles because of which nothing is tagged, or the error; check that averages are right."""
    with ExitStack() as undo:
        maker = prepare(rank, count, 2, doubles[rank], undo, required=required)
        os.environ |= environ[rank]
        try:
            reducer = maker.make()
        except SessionError as error:
            return [f"{type(error).__name__}: {error}"]
        reducer.open(lambda index: None, lambda error: None)
        for index, tensor in enumerate(reducer.tensors):
            tensor.fill_(count * (rank + 1))
            reducer.submit(index)
            assert (tensor == sum(range(1, count + 1))).all()
        assert reducer.ends() == {}
        assert reducer.is_acknowledged({})
        if maker.library is not None:
            assert not any(maker.library.count(channel, shard)[0] for channel in (0, 1) for shard in (0, 1))
        dist.barrier()
        return maker.troubles


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(
    ("doubles", "environ", "words"),
    [
        ([OTHER_CELLS] * 2, [{}, {}], "NCCL sends"),
        ([DoubleNccl("2.25")] * 2, [{}, {}], "NCCL 2.25.5 is not supported, but 2.26 to 2.30 are"),
        ([DoubleNccl("2.29"), DoubleNccl("2.30")], [{}, {}], "versions of NCCL differ: rank 0 (192.168.0.0)"),
        ([DoubleNccl()] * 2, [{}, {"NCCL_ALGO": "Tree"}], "rank 1 (192.168.0.1): NCCL_ALGO is Tree, which"),
    ],
    ids=["calibration", "version", "versions", "environment"],
)
@TAGGING
def test_what_cannot_be_tagged_is_reduced_nevertheless(
    ranks: RankProcesses,
    doubles: list[DoubleNccl],
    environ: list[dict[str, str]],
    words: str,
    required: bool,
) -> None:
    troubles = ranks.run(2, untagged, doubles, environ, required)
    assert troubles[0] == troubles[1]
    assert words in troubles[0][0]
    assert troubles[0][0].startswith("SessionError: gradients can't be tagged: rank ") == required


def with_another_plugin(rank: int, count: int, library: Path) -> list[str]:
    """Return the troubles if rank 1's plugin was compiled from other sources."""
    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        maker = prepare(rank, count, 2, DoubleNccl(), undo)
        if rank == 1:
            patch.setattr(nccl_setup, "shared_object", lambda: library)
        maker.make()
        return maker.troubles


@TAGGING
def test_ranks_with_different_plugins_do_not_tag(ranks: RankProcesses, tmp_path: Path) -> None:
    """Their connections would not understand each other."""
    first, second = ranks.run(2, with_another_plugin, tmp_path / "libnccl-net-checkmate-0.so")
    assert first == second
    assert first[0].endswith(
        "rank 1 (192.168.0.1) has another Checkmate: install the same version on all hosts"
    )


def lose(rank: int, count: int) -> str:
    """Reduce until rank 1 closes its connections; return rank 0's error."""
    with ExitStack() as undo:
        reducer = prepare(rank, count, 2, DoubleNccl(), undo).make()
        reducer.open(lambda index: None, lambda error: None)
        reducer.submit(0)
        if rank:
            return ""
        with pytest.raises(RingError) as excinfo:
            for index in range(1, len(reducer.tensors)):
                reducer.submit(index)
        with pytest.raises(RingError):  # for good
            reducer.submit(0)
        assert reducer.failed
        return str(excinfo.value)


@TAGGING
def test_a_rank_that_ends_is_an_error_on_the_other(ranks: RankProcesses) -> None:
    error, _ = ranks.run(2, lose)
    assert error.startswith("rank 0 (192.168.0.0): ")


def reduce_on_a_cpu(rank: int, count: int) -> str:
    """Return why a job with `collective: nccl` has no slicing on this machine's CPU."""
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    with pytest.raises(SessionError) as excinfo:
        nccl_runtime.runtime = nccl_runtime.TorchNccl()
        nccl_runtime.slicing_of(place_of(rank, count, 1), DdpModel(ddp))
    return str(excinfo.value)


def test_models_on_a_cpu_are_refused(ranks: RankProcesses) -> None:
    errors = ranks.run(2, reduce_on_a_cpu)
    for rank in range(2):
        assert errors[rank] == (
            f"rank {rank} (192.168.0.{rank}): the model is on cpu, and collective: nccl needs it on a GPU: "
            "move it there before DDP, or set collective: ring or tree in the job file"
        )


class Doubling:
    """A communicator that doubles tensors on a GPU, on a stream of its own."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Double a tensor."""
        assert average
        with torch.cuda.stream(self.stream):
            tensor *= 2

    def synchronize(self) -> None:
        """Wait for the stream."""
        assert self.stream is not None
        self.stream.synchronize()

    def abort(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def double_gradients(rank: int, count: int) -> None:
    """Check that gradients go through the reducer's buckets in the order of the streams."""
    torch.manual_seed(1)
    alone = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 3)).cuda()
    ddp = DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=1)
    layout = places.lay_out(DdpModel(ddp), 2)
    reducer = NcclReducer(layout, Doubling(), None, {}, "rank 0")
    hook = GradientHook(ddp, GradientBuckets(layout, list(DdpModel(ddp).trained().values()), reducer, 0))
    hook.register()
    for _ in range(4):
        batch = torch.randn(64, 2000, device="cuda")
        for model in (alone, ddp):
            model.zero_grad()
            model(batch).square().sum().backward()
        for single, replicated in zip(alone.parameters(), ddp.parameters(), strict=True):
            assert single.grad is not None
            assert replicated.grad is not None
            assert torch.equal(single.grad * 2, replicated.grad)
    hook.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reducing on a GPU's stream needs a CUDA device")
def test_gradients_are_reduced_on_the_stream_of_a_gpu(ranks: RankProcesses) -> None:
    ranks.run(1, double_gradients)
