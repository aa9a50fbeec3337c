"""Inverses of a stream's arithmetic: the place of each byte in buckets, and of each copy in its stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from checkmate.wire.schedule import StreamLayout
from checkmate.wire.tag import MODULUS, Tag


class Span(NamedTuple):
    """Bytes [start, stop) of a bucket, in an iteration of a stream, counted from its byte 0."""

    iteration: int
    bucket: int
    start: int
    stop: int


def spans(layout: StreamLayout, start: int, stop: int) -> Iterator[Span]:
    """Yield the places in buckets of bytes [start, stop) of a stream, in order and without gaps."""
    while start < stop:
        iteration, within = divmod(start, layout.nbytes)
        at = bisect_right(layout.pieces, within, key=lambda piece: piece.offset) - 1
        piece = layout.pieces[at]
        size = layout.itemsizes[piece.bucket]
        first = piece.where.start * size + within - piece.offset
        last = min(piece.where.stop * size, first + stop - start)
        yield Span(iteration, piece.bucket, first, last)
        start += last - first


def copy_sequence(tag: Tag, tcp_sequence: int, base: int = 0) -> int:
    """Return the TCP sequence number of a shadow copy, mod 2^32 (design, section 2)."""
    return (tag.sequence + tcp_sequence - tag.anchor - base) % MODULUS
