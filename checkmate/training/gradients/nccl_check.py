"""The calibration alone, for `checkmate nccl check`: what each rank's plugin saw, without a model."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch.distributed as dist

from checkmate.job.schema import Job
from checkmate.training.errors import SessionError
from checkmate.training.gradients.nccl_setup import NcclMaker
from checkmate.training.start import exchange, nccl_runtime
from checkmate.training.start.places import Start, place_of
from checkmate.training.start.plans import NewRun
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import Slicing

SIZES: Final = (1, 1000, 65_537, 1_000_003, 5_000_000)
"""Elements of a bucket: below a cell, beyond cells of all channels, and several loops over the ring."""
_TYPES: Final = ("float32", "bfloat16", "float16", "float64")
_MEETING: Final = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class ComparedChannel:
    """A rank's comparisons on a channel: fully reduced sends, and those that differed."""

    channel: int
    sends: int
    nbytes: int
    mismatches: int


@dataclass(frozen=True)
class RankVerdict:
    """Whether a rank could tag gradients."""

    rank: str
    version: str
    """Version of NCCL."""
    trouble: str
    """The reason why it can't, or ""."""
    channels: tuple[ComparedChannel, ...]


@contextmanager
def meeting() -> Iterator[int]:
    """Make the default process group, over gloo; yield the rank. Raise `SessionError` outside torchrun."""
    if "MASTER_ADDR" not in os.environ:
        raise SessionError(
            "MASTER_ADDR is not set: start `torchrun ... --no-python checkmate nccl check JOB` on the hosts "
            "of the ranks"
        )
    dist.init_process_group("gloo", timeout=_MEETING)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def examine(job: Job, gpu: int, sizes: Sequence[int] = SIZES) -> list[RankVerdict]:
    """Calibrate buckets of all types and several sizes. Return the verdicts of all ranks; all ranks call it.

    Raises:
        SessionError: The job and the process group contradict one another, or NCCL can't use the device.
        RingError: NCCL can't connect the ranks.
    """
    rank = dist.get_rank()
    group = next((group for group in job.dp_groups if rank in [member.rank for member in group.ranks]), None)
    together = [member.rank for member in group.ranks] if group is not None else []
    place = place_of(job, rank, dist.get_world_size(), together)
    if job.collective != "nccl":
        raise SessionError(f"the job {job.job} has collective: {job.collective}: set it to nccl")
    device = nccl_runtime.runtime.device(gpu)
    layout = sample_layout(place.shards, nccl_runtime.slicing_for(place, {device}), sizes)
    with ExitStack() as undo:
        start = Start(NewRun(incarnation=0, run="check"))
        maker = NcclMaker(place, layout, start, device, undo, required=False)
        maker.make()
        channels = () if maker.library is None else tuple(_compared_channels(maker, layout))
        version = ".".join(map(str, nccl_runtime.runtime.version()))
        trouble = next((trouble for trouble in maker.troubles if trouble.startswith(f"{place.name}: ")), "")
        verdict = RankVerdict(place.name, version, trouble.removeprefix(f"{place.name}: "), channels)
        verdicts = exchange.gather(asdict(verdict), name_of=place.name_of)
    return [_read(verdict) for verdict in verdicts]


def sample_layout(shards: int, slicing: Slicing, sizes: Sequence[int]) -> Layout:
    """Return a layout with a bucket for each type and size."""
    parameters = [Parameter(f"{dtype} {size}", (size,), dtype) for dtype in _TYPES for size in sizes]
    return make_layout(parameters, shards, bucket_bytes=1, slicing=slicing)


def _compared_channels(maker: NcclMaker, layout: Layout) -> Sequence[ComparedChannel]:
    library = maker.library
    assert library is not None
    ids = {maker.place.first_id + bucket.shard for bucket in layout.buckets}
    channels = []
    for channel in range(maker.place.job.channels):
        parts = [library.calibrated(channel, shadow_id) for shadow_id in ids]
        sends, nbytes, wrong = (
            sum(getattr(part, name) for part in parts) for name in ("sends", "nbytes", "mismatches")
        )
        channels.append(ComparedChannel(channel, sends, nbytes, wrong))
    return channels


def _read(message: Any) -> RankVerdict:
    channels = tuple(ComparedChannel(**channel) for channel in message["channels"])
    return RankVerdict(**{**message, "channels": channels})
