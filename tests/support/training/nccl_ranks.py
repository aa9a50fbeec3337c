"""Ranks of a job with `collective: nccl` on this machine's loopback, with a double of NCCL."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack

import pytest
import torch

from checkmate.job.schema import Job
from checkmate.nccl.environment import slicing_of
from checkmate.training.gradients.nccl_wiring import NcclMaker
from checkmate.training.start import membership, nccl_runtime
from checkmate.training.start.membership import Membership, Start
from checkmate.training.start.plans import RestartPlan
from checkmate.wire.layout import Layout, Parameter, make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from testbed.jobs import job_data
from tests.support.nccl.double import DoubleNccl

TAGGING = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("clang") is None, reason="the tagger needs root and clang"
)
OTHER_CELLS = DoubleNccl("2.29", NcclSlicing(cell=8192))
"""Its sends differ from what the layout foresees."""


def place_of(rank: int, count: int, channels: int) -> Membership:
    """Return the place of a rank of a job with one DP group."""
    data = job_data(ranks=count, nodes=2, channels=channels)
    for number, one in enumerate(data["dp_groups"][0]["ranks"]):
        one["ip"] = f"127.0.0.{number + 1}"
    made = Job.model_validate({**data, "collective": "nccl"})
    return membership.place(made, rank, count, range(count))


def layout_of(double: DoubleNccl) -> Layout:
    """Return a layout of several types and two shards, with the slicing of the double's release."""
    sizes = [(70_001, "float32"), (33_333, "bfloat16"), (5, "float32"), (40_000, "float64"), (1, "bfloat16")]
    known = [Parameter(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)]
    return make_layout(known, 2, 200_000, slicing_of(double.version(), {}))


def prepare(
    rank: int, count: int, channels: int, double: DoubleNccl, undo: ExitStack, *, required: bool = False
) -> NcclMaker:
    """Return what makes a rank's reducer over the double. The environment names nothing to NCCL."""
    nccl_runtime.runtime = double
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        del os.environ[name]
    start = Start(RestartPlan("nothing", 7, "run"))
    place = place_of(rank, count, channels)
    return NcclMaker(place, layout_of(double), start, torch.device("cpu"), undo, required)
