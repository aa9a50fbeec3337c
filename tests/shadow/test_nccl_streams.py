"""A shadow node assembles what NCCL's ring AllReduce sends, by the slicing that the layout has."""

from __future__ import annotations

import json
import random
import re
import socket
from collections import defaultdict, deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import state
from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.receive.hold_plans import hold_plans
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.replica.replica import Replica
from checkmate.shadow.resources import HoldResources
from checkmate.wire.layout import Layout, from_json, make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.parameter import LayoutError, Parameter
from checkmate.wire.schedule import RING_SLICING, side_of, stream_layout, tags
from testbed.jobs import job
from tests.support.nccl.ring import RingChannel

Streams = dict[tuple[int, int, int], bytearray]
"""Tagged bytes, by side, channel and shadow id."""
SMALL = NcclSlicing(buffer=64 << 10)
OTHER_SLICING = NcclSlicing(4096, 128 << 10, alignment=64, grain=256, steps=16, chunk_steps=6, slice_steps=2)
"""With sizes and steps of no version yet."""
"""Several loops over the ring for buckets of some 100 KB."""


def reduce_bucket(
    slicing: NcclSlicing, channels: int, own_tensors: list[torch.Tensor]
) -> dict[tuple[int, int], bytearray]:
    """Sum a bucket over all ranks, in place. Return what boundary ranks tag, by side and channel."""
    ranks, itemsize = len(own_tensors), own_tensors[0].element_size()
    tagged: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
    for channel in range(channels):
        part = slicing.part(len(own_tensors[0]), itemsize, channels, channel)
        wires: list[deque[torch.Tensor]] = [deque() for _ in own_tensors]
        runs = [
            RingChannel(slicing, part, ranks, rank).run(
                tensor,
                lambda _, wire=wires[rank]: wire.popleft(),  # type: ignore[misc]
            )
            for rank, tensor in enumerate(own_tensors)
        ]
        for step in zip(*runs, strict=True):
            for rank, (send, contents) in enumerate(step):
                wires[(rank + 1) % ranks].append(contents.clone())
                side = side_of(ranks, rank)
                if side is not None and send.round >= 0 and tags(ranks, rank, send.round):
                    tagged[side, channel] += bytes(state.bytes_of(contents))
        assert not any(wires)
    return tagged


def reduce_layout(layout: Layout, local: Job, seed: int) -> tuple[list[torch.Tensor], Streams]:
    """Reduce random gradients. Return the reduced buckets, which all ranks have, and the streams."""
    assert isinstance(layout.slicing, NcclSlicing)
    ranks, generator = len(local.dp_groups[0].ranks), torch.Generator().manual_seed(seed)
    reduced: list[torch.Tensor] = []
    streams: Streams = defaultdict(bytearray)
    for bucket in layout.buckets:
        dtype = getattr(torch, bucket.dtype)
        tensors = [torch.randn(bucket.elements, generator=generator).to(dtype) for _ in range(ranks)]
        for (side, channel), data in reduce_bucket(layout.slicing, local.channels, tensors).items():
            streams[side, channel, bucket.shard] += data
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        reduced.append(tensors[0])
    return reduced, streams


def drain(inlet: Inlet, data: bytes, pick: random.Random) -> None:
    """Feed an inlet with bytes in odd pieces."""
    near, far = socket.socketpair()
    with near, far:
        assert inlet.attach(near)
        while data:
            count = far.send(data[: pick.randint(1, 50_000)])
            data = data[count:]
            inlet.take()


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=4),
    ranks=st.integers(2, 5),
    channels=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    slicing=st.sampled_from([NcclSlicing(), SMALL, OTHER_SLICING, NcclSlicing(cell=8192, buffer=128 << 10)]),
    seed=st.integers(0, 1 << 32),
)
def test_a_node_assembles_what_nccl_sends(
    sizes: list[int], ranks: int, channels: int, dtype: str, slicing: NcclSlicing, seed: int
) -> None:
    sender_job = job(ranks=ranks, nodes=2, channels=channels)
    parameters = [Parameter(f"p{i}", (n,), dtype) for i, n in enumerate(sizes)]
    layout = from_json(make_layout(parameters, 2, 100_000, slicing).to_json())
    pick = random.Random(seed)
    reduced = [reduce_layout(layout, sender_job, seed + t) for t in range(2)]
    for node in (0, 1):
        for plan in hold_plans(sender_job, node):
            replica = Replica(layout, plan.shard, pb.OptimizerSpec(name="SGD"), exact=True)
            resources = HoldResources(
                plan, layout, replica, channels=channels, ranks=ranks, first=0, joined=0
            )
            for inlet in resources.inlets:
                key = int(inlet.plan.sender > 0), inlet.plan.channel, plan.shard
                blobs = [streams[key] for _, streams in reduced]
                assert all(len(data) == inlet.layout.nbytes for data in blobs)
                drain(inlet, b"".join(blobs), pick)
            for iteration, (buckets, _) in enumerate(reduced):
                for index, bucket in resources.sets.gradients(iteration).items():
                    assert torch.equal(bucket, buckets[index])
            resources.close()


def test_a_chunk_that_is_sent_in_slices_has_one_place() -> None:
    layout = make_layout([Parameter("w", (1_000_000,), "float32")], 1, slicing=NcclSlicing())
    of_last = stream_layout(layout.schedule, 1, 0, 3, side=1, shadow_id=0, slicing=layout.slicing)
    assert len(of_last.pieces) == 2  # rounds 0 and 1
    assert of_last.nbytes > 2_000_000


def test_the_ring_s_layout_has_no_name_for_its_slicing() -> None:
    """So layouts and checkpoints from before there was another one are read as they were written."""
    parameters = [Parameter("w", (4,), "float32")]
    ring, nccl = make_layout(parameters, 1), make_layout(parameters, 1, slicing=SMALL)
    assert "slicing" not in ring.to_json()
    assert from_json(ring.to_json()).slicing == RING_SLICING
    assert from_json(nccl.to_json()) == nccl
    assert len({ring.fingerprint, nccl.fingerprint, replace(nccl, slicing=NcclSlicing()).fingerprint}) == 3


@pytest.mark.parametrize(
    ("slicing", "message"),
    [
        (
            {"kind": "butterfly"},
            "its slicing is none that this version of Checkmate knows: {'kind': 'butterfly'}",
        ),
        ([1], "its slicing is none that this version"),
        ({"kind": "nccl"}, "the parameters of its slicing must be cell, "),
        ({**SMALL.describe(), "cell": 16384.0}, "the parameters of its slicing must be cell, "),
        ({**SMALL.describe(), "more": 1}, "the parameters of its slicing must be cell, "),
        (
            {"kind": "nccl", "cell": 8192, "buffer": 65536},
            "the parameters of its slicing must be cell, buffer, a",
        ),
        (
            {**SMALL.describe(), "buffer": 4096},
            "buffer 4096: must be at least 65536, for chunks of 32768 bytes",
        ),
        (
            {**SMALL.describe(), "grain": 1 << 31},
            "grain 2147483648: must be a multiple of 16 bytes, at least 16",
        ),
        ({**SMALL.describe(), "alignment": 8}, "alignment 8: must be a multiple of 16 bytes"),
        ({**SMALL.describe(), "slice_steps": 0}, "steps 0, 4 and 8 of slice, chunk and buffer: must ascend"),
        (
            {**SMALL.describe(), "steps": 65},
            "steps 2, 4 and 65 of slice, chunk and buffer: must ascend, from 1 to",
        ),
        ({**SMALL.describe(), "slice_steps": 3}, "chunk_steps 4: must be a multiple of 3"),
        ({**SMALL.describe(), "cell": 0}, "cell 0: must be a multiple of 16 bytes"),
    ],
)
def test_another_slicing_is_refused(slicing: object, message: str) -> None:
    document = json.loads(make_layout([Parameter("w", (4,), "float32")], 1).to_json())
    with pytest.raises(LayoutError, match=re.escape(message)):
        from_json(json.dumps({**document, "slicing": slicing}))
