"""The digests of tagged bytes: pure."""

from __future__ import annotations

import hashlib
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from topologies.traffic.digests import Digests, Tail


@given(
    iterations=st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=6),
    tails=st.lists(st.builds(Tail, iteration=st.integers(0, 7), offset=st.integers(0, 300)), max_size=5),
)
def test_a_tail_is_the_rest_of_its_stream(iterations: list[list[bytes]], tails: list[Tail]) -> None:
    digests = Digests(side=1, hashing=True, tails=tails)
    digests.expect(5, 0, 3)
    for number, pieces in enumerate(iterations):
        digests.begin(number)
        for piece in pieces:
            digests.take(0, 3, memoryview(piece))
        digests.hash_taken()
    whole = b"".join(piece for pieces in iterations for piece in pieces)
    starts = [0, *accumulate(sum(map(len, pieces)) for pieces in iterations)]
    (result,) = digests.results()
    assert (result.boundary, result.channel, result.shadow_id) == (5, 0, 3)
    assert (result.bytes, result.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    in_order = sorted((tail for tail in tails if tail.iteration < len(iterations)), key=lambda t: t.iteration)
    expected = [starts[tail.iteration] + tail.offset for tail in in_order]
    assert sorted(tail.base for tail in result.tails) == sorted(expected)
    for tail in result.tails:
        assert tail.bytes == len(whole[tail.base :])
        assert tail.sha256 == hashlib.sha256(whole[tail.base :]).hexdigest()


def test_without_hashing_bytes_are_counted() -> None:
    digests = Digests(side=0, hashing=False, tails=[Tail(iteration=0)])
    digests.expect(0, 0, 0)
    digests.begin(0)
    digests.take(0, 0, memoryview(b"abc"))
    digests.hash_taken()
    (result,) = digests.results()
    assert (result.bytes, result.sha256, result.tails) == (3, "", ())
