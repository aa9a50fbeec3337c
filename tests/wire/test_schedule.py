"""The ring's schedule: every byte is gathered, and tagged exactly once; and the shadow side's inverse."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.schedule import (
    FIRST,
    LAST,
    Bucket,
    channel_slice,
    chunk_received,
    chunk_sent,
    chunk_slice,
    equal_part,
    nic_of,
    side_of,
    stream_layout,
    tagged_chunks,
    tags,
)
from tests.support.streams import spans

RANKS = st.integers(2, 64)
CHANNELS = st.integers(1, 8)
ELEMENTS = st.one_of(st.integers(0, 70), st.integers(0, 5000))


def buckets_of(elements: st.SearchStrategy[int]) -> st.SearchStrategy[list[Bucket]]:
    sizes, shadow_ids = st.sampled_from([1, 2, 4, 8]), st.integers(0, 3)
    return st.lists(st.builds(Bucket, elements=elements, itemsize=sizes, shadow_id=shadow_ids), max_size=6)


BUCKETS = buckets_of(ELEMENTS)


@given(length=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_parts_follow_one_another_and_differ_by_one_at_most(length: int, parts: int) -> None:
    pieces = [equal_part(range(length), parts, index) for index in range(parts)]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == length
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(elements=ELEMENTS, channels=CHANNELS, ranks=RANKS)
def test_chunks_cover_the_bucket_in_order(elements: int, channels: int, ranks: int) -> None:
    end = 0
    for channel in range(channels):
        assert channel_slice(elements, channels, channel).start == end
        for chunk in range(ranks):
            where = chunk_slice(elements, channels, channel, ranks, chunk)
            assert where.start == end
            end = where.stop
    assert end == elements


@given(ranks=RANKS)
def test_the_ring_gathers_every_chunk_everywhere(ranks: int) -> None:
    has = [{(rank + 1) % ranks} for rank in range(ranks)]
    for round_ in range(ranks - 1):
        for rank in range(ranks):
            assert chunk_sent(ranks, rank, round_) in has[rank]
            assert chunk_received(ranks, rank, round_) == chunk_sent(ranks, (rank - 1) % ranks, round_)
        for rank in range(ranks):
            has[rank].add(chunk_received(ranks, rank, round_))
    assert has == [set(range(ranks))] * ranks


@given(ranks=RANKS)
def test_each_chunk_is_tagged_once_and_only_round_0_has_two_taggers(ranks: int) -> None:
    tagged = [
        (round_, chunk_sent(ranks, rank, round_))
        for round_ in range(ranks - 1)
        for rank in range(ranks)
        if tags(ranks, rank, round_)
    ]
    assert sorted(chunk for _, chunk in tagged) == list(range(ranks))
    assert Counter(round_ for round_, _ in tagged) == {r: 1 + (r == 0) for r in range(ranks - 1)}


def test_the_papers_example() -> None:
    """Paper, section "Heartbeat-based Tagging": C1 and C0, then C3, then C2."""
    chunks = {side: [(c.round, c.index) for c in tagged_chunks(8, 1, 0, 4, side)] for side in (FIRST, LAST)}
    assert chunks == {FIRST: [(0, 1)], LAST: [(0, 0), (1, 3), (2, 2)]}


@given(ranks=RANKS)
def test_only_the_first_and_the_last_rank_are_boundaries(ranks: int) -> None:
    sides = [side_of(ranks, rank) for rank in range(ranks)]
    assert sides == [FIRST, *[None] * (ranks - 2), LAST]
    for rank, side in enumerate(sides):
        assert any(tags(ranks, rank, round_) for round_ in range(ranks - 1)) == (side is not None)


@given(buckets=BUCKETS, channels=CHANNELS, ranks=RANKS)
def test_every_byte_is_tagged_exactly_once(buckets: list[Bucket], channels: int, ranks: int) -> None:
    marks = [bytearray(bucket.nbytes) for bucket in buckets]
    for side in (FIRST, LAST):
        for channel in range(channels):
            for shadow_id in range(4):
                layout = stream_layout(buckets, channels, channel, ranks, side=side, shadow_id=shadow_id)
                tagged = [tagged_chunks(b.elements, channels, channel, ranks, side) for b in buckets]
                assert layout.nbytes == sum(
                    len(chunk.where) * bucket.itemsize
                    for chunks, bucket in zip(tagged, buckets, strict=True)
                    for chunk in chunks
                    if bucket.shadow_id == shadow_id
                )
                for piece in layout.pieces:
                    assert buckets[piece.bucket].shadow_id == shadow_id
                    assert len(piece.where) > 0
                for span in spans(layout, 0, layout.nbytes):
                    for byte in range(span.start, span.stop):
                        marks[span.bucket][byte] += 1
    assert marks == [bytearray(b"\1" * bucket.nbytes) for bucket in buckets]


@given(
    buckets=buckets_of(st.integers(0, 70)),
    channels=st.integers(1, 3),
    ranks=st.integers(2, 9),
    side=st.sampled_from([FIRST, LAST]),
)
def test_the_inverse_finds_each_byte_that_the_sender_tags(
    buckets: list[Bucket], channels: int, ranks: int, side: int
) -> None:
    """Follow the sender round by round, and look up each byte in the inverse."""
    rank = 0 if side == FIRST else ranks - 1
    layouts = [
        stream_layout(buckets, channels, 0, ranks, side=side, shadow_id=shadow_id) for shadow_id in range(4)
    ]
    positions = [0, 0, 0, 0]
    for iteration in range(2):
        for index, bucket in enumerate(buckets):
            layout = layouts[bucket.shadow_id]
            for round_ in range(ranks - 1):
                if not tags(ranks, rank, round_):
                    continue
                chunk = chunk_slice(bucket.elements, channels, 0, ranks, chunk_sent(ranks, rank, round_))
                for byte in range(chunk.start * bucket.itemsize, chunk.stop * bucket.itemsize):
                    at = positions[bucket.shadow_id]
                    (span,) = spans(layout, at, at + 1)
                    assert (span.iteration, span.bucket, span.start) == (iteration, index, byte)
                    positions[bucket.shadow_id] += 1
    assert positions == [2 * layout.nbytes for layout in layouts]


@given(buckets=BUCKETS, data=st.data())
def test_any_range_is_found_as_its_bytes_are(buckets: list[Bucket], data: st.DataObject) -> None:
    layout = stream_layout(buckets, 2, 1, 5, side=LAST, shadow_id=0)
    end = 3 * layout.nbytes
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, min(end, start + 300)))
    whole = [(s.iteration, s.bucket, b) for s in spans(layout, start, stop) for b in range(s.start, s.stop)]
    single = [
        (s.iteration, s.bucket, s.start) for at in range(start, stop) for s in spans(layout, at, at + 1)
    ]
    assert whole == single and len(whole) == stop - start


def test_an_empty_stream_has_no_byte() -> None:
    layout = stream_layout([Bucket(0, 4, 0), Bucket(100, 4, 1)], 1, 0, 4, side=FIRST, shadow_id=0)
    assert (layout.nbytes, layout.pieces) == (0, ())


@given(ranks=RANKS, channels=CHANNELS, elements=st.integers(0, 10**6))
def test_fewer_elements_than_chunks_leave_no_empty_chunk(ranks: int, channels: int, elements: int) -> None:
    for side in (FIRST, LAST):
        for channel in range(channels):
            assert all(len(chunk.where) for chunk in tagged_chunks(elements, channels, channel, ranks, side))


def test_both_nics_are_full_in_round_0() -> None:
    assert {nic_of(0, FIRST, 2), nic_of(0, LAST, 2)} == {0, 1}
    assert Counter(nic_of(channel, LAST, 2) for channel in range(8)) == {0: 4, 1: 4}
