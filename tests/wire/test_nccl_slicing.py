"""NCCL's slicing, against calls that were recorded from NCCL's own host code."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.nccl_slicing import NcclSend, NcclSlicing
from checkmate.wire.schedule import FIRST, LAST
from tests.support.nccl.traces import ITEMSIZES, NAMES, Trace, TracedCollective

SLICING = NcclSlicing()


def sends(trace: Trace, rank: int, collective: TracedCollective) -> list[list[NcclSend]]:
    slicing, itemsize = trace.slicing, ITEMSIZES[collective.datatype]
    parts = [
        slicing.part(collective.count, itemsize, trace.channels, channel, collective.channels)
        for channel in range(trace.channels)
    ]
    return [list(slicing.sends(part, itemsize, trace.ranks, rank)) for part in parts]


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_send_is_foreseen(name: str) -> None:
    trace = Trace.read(name)
    count = 0
    for rank in range(trace.ranks):
        alone = trace.alone(rank)
        for number, collective in alone.items():
            itemsize = ITEMSIZES[collective.datatype]
            foreseen = sends(trace, rank, collective)
            recorded = trace.sends(rank, number)
            if trace.whole:
                expected = {
                    (channel, recorded_send.step)
                    for channel, channel_sends in enumerate(foreseen)
                    for recorded_send in channel_sends
                }
                assert {(recorded_send.channel, recorded_send.step) for recorded_send in recorded} == expected
            for recorded_send in recorded:
                send = foreseen[recorded_send.channel][recorded_send.step]
                assert len(send.where) * itemsize == recorded_send.nbytes
                if recorded_send.first_word is not None and collective.datatype == "ncclUint32":
                    first, ranks = trace.decode(recorded_send.first_word)
                    assert first == send.where.start
                    assert (len(ranks) == trace.ranks) == (send.round >= 0)
                count += 1
    assert count > 20


@given(
    elements=st.integers(1, 1_000_000),
    itemsize=st.sampled_from([2, 4, 8]),
    ranks=st.integers(2, 6),
    used_channels=st.integers(1, 8),
    buffer=st.sampled_from([1 << 16, 1 << 18, 4 << 20]),
)
def test_the_tagged_sends_of_both_sides_carry_each_element_once(
    elements: int, itemsize: int, ranks: int, used_channels: int, buffer: int
) -> None:
    slicing = NcclSlicing(buffer=buffer)
    carried: Counter[int] = Counter()
    total = 0
    for channel in range(used_channels):
        part = slicing.part(elements, itemsize, used_channels, channel)
        for side in (FIRST, LAST):
            for send in slicing.tagged(part, itemsize, ranks, side):
                carried[send.where.start] += 1
                total += len(send.where)
    assert total == elements
    assert set(carried.values()) == {1}


def test_a_channel_without_a_part_sends_nothing() -> None:
    assert not SLICING.part(100, 4, 2, 2)
    assert not list(SLICING.sends(range(0), 4, 2, 0))


@pytest.mark.parametrize(
    ("cell", "buffer", "message"),
    [
        (0, 4 << 20, "cell 0: must be a multiple of 16 bytes, at least 16"),
        (100, 4 << 20, "cell 100: must be a multiple of 16 bytes"),
        (16384, 100_001, "buffer 100001: must be a multiple of 16 bytes"),
        (16384, 32768, "buffer 32768: must be at least 65536, for chunks of 32768 bytes"),
    ],
)
def test_sizes_that_nccl_does_not_have(cell: int, buffer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NcclSlicing(cell, buffer)
