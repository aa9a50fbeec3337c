"""A rank of a lab that reduces a layout's buckets with the double of NCCL, and what shadow nodes get of it.

python -m tests.support.nccl.lab_ring --job job.yaml --rank 0 --interface data0 --release 2.29
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from checkmate import state
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclBucket, NcclLibrary
from checkmate.tagger import Tagger
from checkmate.training.start.places import Place
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import FIRST, LAST, stream_layout
from tests.support.nccl.double import DoubleNccl, nccl_place

ITERATIONS: Final = 2
SLICING: Final = NcclSlicing(buffer=64 << 10)
"""With small buffers, so that channels go around the ring in several loops."""
_PORT: Final = 46200
_SECONDS: Final = 60.0
_SIZES: Final = {
    "float32": (150_001, 33, 1),
    "bfloat16": (100_003,),
    "float64": (4099, 7),
    "float16": (20_000,),
}

StreamKey = tuple[int, int, int]
"""Side, channel and shadow id."""


def layout_of(job: Job) -> Layout:
    """Return the layout of a model with parameters of all types, in many buckets."""
    sizes = [(dtype, count) for dtype, counts in _SIZES.items() for count in counts]
    parameters = [Parameter(f"p{i}", (count,), dtype) for i, (dtype, count) in enumerate(sizes)]
    return make_layout(parameters, job.shards(0), 200_000, SLICING)


def gradients(layout: Layout, iteration: int, rank: int) -> list[torch.Tensor]:
    """Return a rank's buckets: small whole numbers, whose sums are exact in all types."""
    generator = torch.Generator().manual_seed(iteration * 1000 + rank)
    return [
        torch.randint(-8, 9, (bucket.elements,), generator=generator).to(getattr(torch, bucket.dtype))
        for bucket in layout.buckets
    ]


def reduced(layout: Layout, iteration: int, ranks: int) -> list[torch.Tensor]:
    """Return the sums of all ranks' buckets."""
    by_rank = [gradients(layout, iteration, rank) for rank in range(ranks)]
    return [torch.stack(same).sum(0) for same in zip(*by_rank, strict=True)]


def expected_streams(job: Job) -> dict[StreamKey, bytes]:
    """Return each stream's bytes: the reduced buckets, at the places that the layout has for them."""
    layout, ranks = layout_of(job), len(job.dp_groups[0].ranks)
    streams = {}
    for side, channel, shard in product((FIRST, LAST), range(job.channels), range(job.shards(0))):
        places = stream_layout(
            layout.schedule, job.channels, channel, ranks, side=side, shadow_id=shard, slicing=layout.slicing
        )
        streams[side, channel, shard] = b"".join(
            bytes(state.bytes_of(buckets[piece.bucket][piece.where.start : piece.where.stop]))
            for buckets in (reduced(layout, iteration, ranks) for iteration in range(ITERATIONS))
            for piece in places.pieces
        )
    return streams


def run(place: Place, interface: str, release: str, tagger: Tagger) -> None:
    """Reduce all buckets in all iterations, and check the results and the plugin's own counts."""
    layout = layout_of(place.job)
    tensors = gradients(layout, 0, place.position)
    library = NcclLibrary(shared_object())
    library.begin(
        nccl_place(place, interface),
        channels=place.job.channels,
        slicing=SLICING,
        incarnation=1,
        sockets_map=-1 if place.side is None else tagger.sockets_map,
    )
    library.set_buckets(
        [
            NcclBucket(tensor.data_ptr(), len(tensor), tensor.element_size(), bucket.shard)
            for tensor, bucket in zip(tensors, layout.buckets, strict=True)
        ]
    )
    with library.expected():
        communicator = DoubleNccl(release, SLICING).open(place, torch.device("cpu"))
        for iteration in range(ITERATIONS):
            for tensor, gradient in zip(tensors, gradients(layout, iteration, place.position), strict=True):
                tensor.copy_(gradient)
                communicator.all_reduce(tensor, average=False)
            for tensor, right in zip(tensors, reduced(layout, iteration, place.ranks), strict=True):
                assert torch.equal(tensor, right)
    tagged = {key[1:]: len(data) for key, data in expected_streams(place.job).items() if key[0] == place.side}
    deadline = time.monotonic() + _SECONDS
    while any(library.count(*stream) != (size, size) for stream, size in tagged.items()):
        assert time.monotonic() < deadline, "not all is acknowledged"
        assert library.trouble == ""
        time.sleep(0.01)
    dist.barrier()
    communicator.close()
    assert library.broken == ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--interface", required=True, help="interface with this rank's address")
    parser.add_argument("--release", required=True, help="of NCCL, such as 2.29")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share one machine
    job, rank = read_job(arguments.job), arguments.rank
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    members = job.dp_groups[0].ranks
    dist.init_process_group(
        "gloo", init_method=f"tcp://{members[0].ip}:{_PORT}", rank=rank, world_size=len(members)
    )
    with ExitStack() as stack:
        tagger = stack.enter_context(Tagger.attach())
        run(Place(job, rank, 0, rank), arguments.interface, arguments.release, tagger)
        assert not any(tagger.faults().values())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
