"""A rank of a lab whose hosts have several NICs, which only connects its ring with the double of NCCL."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from checkmate.job.files import read_job
from checkmate.nccl.building import shared_object
from checkmate.nccl.interfaces import interface_of
from checkmate.nccl.library import NcclBucket, NcclLibrary
from checkmate.training.start.places import Place
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl.double import DoubleNccl, nccl_place
from topologies.kernel.links import MGMT_INTERFACE


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--group", type=int, required=True, help="the DP group that reduces")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = read_job(options.job)
    ranks = {
        member.rank: (group, position, member)
        for group in job.groups
        for position, member in enumerate(job.dp_groups[group].ranks)
    }
    group, position, rank = ranks[options.rank]
    os.environ["GLOO_SOCKET_IFNAME"] = MGMT_INTERFACE
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ranks[0][2].mgmt}:46201",
        rank=options.rank,
        world_size=len(ranks),
        timeout=timedelta(seconds=40),
    )
    place = Place(job, rank.rank, group, position)
    library, slicing = NcclLibrary(shared_object()), NcclSlicing(buffer=64 << 10)
    interface = interface_of(rank.ip)
    library.begin(
        nccl_place(place, interface),
        channels=job.channels,
        slicing=slicing,
        incarnation=1,
        sockets_map=-1,
    )
    tensor = torch.full((5000,), position + 1.0)
    library.set_buckets([NcclBucket(tensor.data_ptr(), len(tensor), 4, 0)])
    with library.expected():
        communicator = DoubleNccl("2.29", slicing).open(place, torch.device("cpu"))
        if group == options.group:
            communicator.all_reduce(tensor, average=False)
            assert torch.equal(tensor, torch.full((5000,), 3.0))
            print(f"reduced over {interface}", flush=True)
    dist.barrier()
    communicator.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
