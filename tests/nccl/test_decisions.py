"""Which sends the plugin tags, when it is called as NCCL was recorded to call it; and what makes it stop."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl.calls import RELEASES
from tests.support.nccl.sender import LOOPBACK, SendingRank, address, buckets_of
from tests.support.nccl.traces import ITEMSIZES, NAMES, Trace, TracedCollective

SHADOW_IDS = 3

Make = Callable[..., SendingRank]


QUICK = (
    *("full_n2_c1", "loops_n3_c2", "null_n3_c2", "sends_n3_c3"),
    *("2.26.2/null_n3_c2", "2.28.9/full_n2_c1", "2.29.7/null_n3_c2"),
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.parametrize("side", [0, 1])
def test_the_boundary_ranks_tag_each_reduced_send_once(make: Make, name: str, side: int) -> None:
    trace = Trace.read(name)
    rank, slicing = 0 if side == 0 else trace.ranks - 1, trace.slicing
    sender = make(trace.release, rank, trace.ranks, trace.channels, slicing)
    alone = trace.alone(rank)
    sender.library.set_buckets(buckets_of(alone, SHADOW_IDS))
    for number, traced in alone.items():
        itemsize, shadow_id = ITEMSIZES[traced.datatype], number % SHADOW_IDS
        with sender.library.expected():
            ops = sender.collective(number, traced)
        parts = [
            slicing.part(traced.count, itemsize, trace.channels, channel, traced.channels)
            for channel in range(trace.channels)
        ]
        expected = {
            (channel, send.step): len(send.where) * itemsize
            for channel, part in enumerate(parts)
            for send in slicing.tagged(part, itemsize, trace.ranks, side)
        }
        for send in trace.sends(rank, number):
            before = sender.library.count(send.channel, shadow_id)[0]
            step = sender.caller.proxy_step(ops[send.channel], send.step)
            sender.send(send.channel, send.nbytes, step)
            tagged = sender.library.count(send.channel, shadow_id)[0] - before
            assert tagged == expected.get((send.channel, send.step), 0)
    assert sender.library.trouble == ""


def test_a_rank_inside_the_ring_tags_nothing(make: Make) -> None:
    sender = make("2.30", 1, 3, 1)
    traced = TracedCollective(10_000, "ncclFloat32", 1)
    sender.library.set_buckets([NcclBucket(address(0), 10_000, 4, 0)])
    (op,) = sender.collective(0, traced)
    slicing = NcclSlicing()
    for send in slicing.sends(range(10_000), 4, 3, 1):
        sender.send(0, 4 * len(send.where), sender.caller.proxy_step(op, send.step))
    assert sender.library.trouble == ""
    assert sender.library.used_channels(0) == 1
    assert sender.library.count(0, 0) == (0, 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"algorithm": b"TREE"}, "uses algorithm TREE and protocol SIMPLE"),
        ({"protocol": b"LL128"}, "uses algorithm RING and protocol LL128"),
    ],
)
def test_another_algorithm_stops_tagging(make: Make, more: dict[str, Any], words: str) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([NcclBucket(address(0), 100, 4, 0)])
    sender.collective(0, TracedCollective(100, "ncclFloat32", 1), **more)
    assert words in sender.library.trouble


def test_what_does_not_fit_stops_tagging_with_a_reason(make: Make) -> None:
    single_channel, two = (TracedCollective(10_000, "ncclFloat32", channels) for channels in (1, 2))
    cases = [
        ([NcclBucket(address(1), 10_000, 4, 0)], single_channel, "is not that of a bucket"),
        ([NcclBucket(address(0), 10_000, 2, 0)], single_channel, "bucket 0 has elements of 2 bytes"),
        ([NcclBucket(address(0), 10_000, 4, 0)], two, "bucket 0 has 2 channels, and not 1"),
    ]
    for buckets, collective, words in cases:
        sender = make("2.30", 0, 2, 1)
        sender.library.set_buckets(buckets)
        sender.collective(0, collective)
        assert words in sender.library.trouble


def test_sends_of_another_size_or_order_stop_tagging(make: Make) -> None:
    slicing = NcclSlicing()
    sends = list(slicing.sends(range(10_000), 4, 2, 0))
    for order, sizes, words in (
        ([0], {0: 8}, "step 0: NCCL sends 8 bytes, and not"),
        ([0, 2], {}, "step 2 follows step 0"),
        ([1], {}, "step 1 follows step 0"),
        ([0, 1, 2, 3, 4], {}, "bucket 0, channel 0 has no step 4"),
    ):
        sender = make("2.30", 0, 2, 1)
        sender.library.set_buckets([NcclBucket(address(0), 10_000, 4, 0)])
        (op,) = sender.collective(0, TracedCollective(10_000, "ncclFloat32", 1))
        for step in order:
            size = sizes.get(step, 4 * len(sends[step].where) if step < len(sends) else 4)
            sender.send(0, size, sender.caller.proxy_step(op, step))
        assert words in sender.library.trouble, (order, sender.library.trouble)


def test_a_send_of_a_collective_whose_record_is_reused_stops_tagging(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([NcclBucket(address(0), 10_000, 4, 0)])
    collective = TracedCollective(10_000, "ncclFloat32", 1)
    (op,) = sender.collective(0, collective)
    for _ in range(4096):
        sender.collective(0, collective)
    assert sender.library.trouble == ""
    size = 4 * len(next(NcclSlicing().sends(range(10_000), 4, 2, 0)).where)
    sender.send(0, size, sender.caller.proxy_step(op, 0))
    assert "NCCL sends for collective 0, and has begun 4096 since" in sender.library.trouble


def test_buckets_have_a_limit(tmp_path: Path) -> None:
    shutil.copy(shared_object(), tmp_path / "plugin.so")
    library = NcclLibrary(tmp_path / "plugin.so")
    library.set_buckets([NcclBucket(1, 1, 4, 15)] * 4096)
    for buckets in ([NcclBucket(1, 1, 4, 0)] * 4097, [NcclBucket(1, 1, 4, 16)]):
        with pytest.raises(ValueError, match=f"refuses {len(buckets)} buckets: it takes 4096 at most"):
            library.set_buckets(buckets)


@pytest.mark.parametrize("channels", [0, 9])
def test_channels_have_a_limit(tmp_path: Path, channels: int) -> None:
    shutil.copy(shared_object(), tmp_path / "plugin.so")
    library, place = NcclLibrary(tmp_path / "plugin.so"), NcclPlace(0, 2, LOOPBACK, "lo")
    with pytest.raises(ValueError, match=f"{channels} channels are more than the 8 of a job, or none"):
        library.begin(place, channels=channels, slicing=NcclSlicing(), incarnation=1)


def test_the_structures_of_python_are_those_of_c(tmp_path: Path) -> None:
    from checkmate.nccl import library  # noqa: PLC0415

    assert ctypes.sizeof(library._Job) == 92
    assert ctypes.sizeof(library._Bucket) == 32


def test_collectives_of_one_group_stop_tagging(make: Make) -> None:
    for release in RELEASES:
        sender = make(release, 0, 2, 1)
        sender.library.set_buckets([NcclBucket(address(0), 100, 4, 0), NcclBucket(address(1), 100, 4, 0)])
        traced = TracedCollective(100, "ncclFloat32", 1)
        with sender.library.expected():
            for number, group in ((0, sender.caller.group()), (1, sender.caller.group())):
                sender.collective(number, traced, group=group)
            assert sender.library.trouble == ""
            group = sender.caller.group()
            for number in range(2):
                sender.collective(number, traced, group=group)
        assert "bucket 1 is reduced in a group with another one" in sender.library.trouble


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_captured_graphs_stop_tagging(make: Make, release: str) -> None:
    sender = make(release, 0, 2, 1)
    sender.caller.api(captured=False)
    assert sender.library.trouble == ""
    sender.caller.api(captured=True)
    assert "captured in a CUDA graph" in sender.library.trouble
