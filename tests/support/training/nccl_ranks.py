"""Ranks of a job with `collective: nccl` on this machine's loopback, with a double of NCCL."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.nccl.environment import slicing_of
from checkmate.training.gradients.nccl_setup import NcclMaker
from checkmate.training.start import nccl_runtime, places
from checkmate.training.start.nccl_runtime import NcclRuntime
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import NewRun
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.parameter import Parameter
from testbed.jobs import job_data
from tests.support.nccl.double import DoubleNccl
from tests.support.training.rank_processes import be_a_host

TAGGING = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("clang") is None, reason="the tagger needs root and clang"
)
ITERATIONS = 3
OTHER_CELLS = DoubleNccl("2.29", NcclSlicing(cell=8192))
"""Its sends differ from what the layout foresees."""


def place_of(rank: int, count: int, channels: int) -> Place:
    """Return the place of a rank of a job with one DP group."""
    data = job_data(ranks=count, nodes=2, channels=channels)
    for number, rank_data in enumerate(data["dp_groups"][0]["ranks"]):
        rank_data["ip"] = f"127.0.0.{number + 1}"
    job = of_data(Job, {**data, "collective": "nccl"})
    return places.place_of(job, rank, count, range(count))


def layout_of(runtime: NcclRuntime) -> Layout:
    """Return a layout of several types and two shards, with the slicing of this release of NCCL."""
    sizes = [(70_001, "float32"), (33_333, "bfloat16"), (5, "float32"), (40_000, "float64"), (1, "bfloat16")]
    parameters = [Parameter(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)]
    return make_layout(parameters, 2, 200_000, slicing_of(runtime.version(), {}))


def prepare(
    rank: int, count: int, channels: int, runtime: NcclRuntime, undo: ExitStack, *, required: bool = False
) -> NcclMaker:
    """Return what makes a rank's reducer over NCCL or its double. The environment names no plugin to NCCL.

    Each rank is a host of its own for NCCL, so that ranks may share a GPU.
    """
    nccl_runtime.runtime = runtime
    for name in [name for name in os.environ if name.startswith("NCCL_") and "DEBUG" not in name]:
        del os.environ[name]
    be_a_host(rank)
    start = Start(NewRun(incarnation=7, run="run"))
    place = place_of(rank, count, channels)
    return NcclMaker(place, layout_of(runtime), start, runtime.device(0), undo, required)


def reduce(rank: int, count: int, channels: int, runtime: NcclRuntime) -> dict[str, Any]:
    """Reduce the layout some times; check the averages, and return the streams' ends and counts."""
    with ExitStack() as undo:
        maker = prepare(rank, count, channels, runtime, undo)
        reducer = maker.make()
        reduced: list[int] = []
        reducer.open(reduced.append, lambda error: None)
        undo.callback(reducer.close)
        for iteration in range(ITERATIONS):
            for index, tensor in enumerate(reducer.tensors):
                torch.manual_seed(100 * index + iteration)
                averaged = torch.randint(-16, 16, (count, len(tensor)))  # small numbers, so sums are exact
                tensor.copy_(averaged[rank] * count)
                reducer.submit(index)
                reducer.communicator.synchronize()
                expected = averaged.sum(0).to(tensor)  # NCCL multiplies by 1/3, which is not exact
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0.2 if tensor.is_cuda else 0)
        assert reduced == [*range(len(reducer.tensors))] * ITERATIONS
        ends = reducer.ends()
        deadline = time.monotonic() + 10
        while not (is_acknowledged := reducer.is_acknowledged(ends)) and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.barrier()
        library = maker.library
        assert library is not None, maker.troubles
        counts = {stream: library.count(*stream) for stream in ends}
        return {"troubles": maker.troubles, "ends": ends, "counts": counts, "passed": is_acknowledged}


def check_reduced(reports: Sequence[dict[str, Any]], runtime: NcclRuntime) -> None:
    """Check what `reduce` returned on all ranks: every byte was tagged once, and acknowledged."""
    assert [report["troubles"] for report in reports] == [[]] * len(reports)
    assert all(report["passed"] for report in reports)
    total = 0
    for report in reports:
        assert {stream: tagged for stream, (tagged, _) in report["counts"].items()} == report["ends"]
        assert {stream: counted_bytes for stream, (_, counted_bytes) in report["counts"].items()} == report[
            "ends"
        ]
        total += sum(report["ends"].values())
    assert total == ITERATIONS * sum(bucket.nbytes for bucket in layout_of(runtime).schedule)
