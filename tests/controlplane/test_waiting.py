"""Segments that wait for an answer: order, bounds, and the rate of strangers."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.endpoint.frames import Segment, SegmentKind
from controlplane.endpoint.waiting import KNOWN_DEPTH, WaitingSegments
from controlplane.entities import Rate
from controlplane.network import Network
from testbed.jobs import job
from tests.support.controlplane.endpoint import empty_view

JOB = job(channels=2, ranks=3, nodes=3, replicas=1)
NETWORK = Network([JOB])
NICS = [node.nics[0] for node in JOB.shadow_nodes]
VIEW = empty_view(JOB)
RATE = Rate(packets=10, burst=20)


def syn(nic: int | None, number: int = 0) -> Segment:
    """Return a SYN of a NIC, or of a stranger."""
    if nic is None:
        return Segment(SegmentKind.SYN, NICS[0].mac, IPv4Address(0x0A090000 + number), 5000, 7400)
    return Segment(SegmentKind.SYN, NICS[nic].mac, NICS[nic].ip, 5000 + number, 7400)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=30))
def test_a_flood_fills_only_its_own_queue(steps: list[tuple[bool, int]]) -> None:
    waiting = WaitingSegments(RATE)
    counts = Counter[bool]()
    for is_known, count in steps:
        for number in range(count):
            waiting.put(syn(0 if is_known else None, number), NICS[0].port, VIEW, 0.0)
        counts[is_known] += count
    order = [VIEW.knows(*arrival) for arrival in waiting.take(10_000)]
    known_count = min(counts[True], KNOWN_DEPTH)
    assert order == [True] * known_count + [False] * min(counts[False], RATE.burst)
    assert waiting.dropped == counts.total() - len(order)
    assert not waiting


@given(st.lists(st.integers(0, 40), min_size=3, max_size=3), st.lists(st.integers(1, 20), min_size=30))
def test_each_known_nic_has_its_turn(counts: list[int], sizes: list[int]) -> None:
    waiting = WaitingSegments(RATE)
    for nic, count in enumerate(counts):
        for number in range(count):
            waiting.put(syn(nic, number), NICS[nic].port, VIEW, 0.0)
    segments = [segment for size in sizes for segment, _ in waiting.take(size)]
    for nic, count in enumerate(counts):
        places = [at for at, segment in enumerate(segments) if segment.ip == NICS[nic].ip]
        for turn, at in enumerate(places):
            assert segments[at].port == 5000 + turn  # in order
            earlier = sum(min(turn + 1, queue_length) for queue_length in counts) - min(turn + 1, count)
            assert at <= turn + earlier


def test_each_port_has_a_rate_for_strangers() -> None:
    waiting = WaitingSegments(RATE)
    for number in range(1000):
        waiting.put(syn(None, number), 40, VIEW, 0.0)
    waiting.put(syn(None), 41, VIEW, 0.0)
    ports = Counter(port for _, port in waiting.take(1000))
    assert ports == {40: RATE.burst, 41: 1}
    waiting.put(syn(None), 40, VIEW, 0.05)
    assert not waiting
    waiting.put(syn(None), 40, VIEW, 0.11)
    assert waiting


@pytest.mark.parametrize("port", [NICS[0].port, 99])
def test_resets_of_no_connection_are_not_even_queued(port: int) -> None:
    waiting = WaitingSegments()
    reset = Segment(SegmentKind.RST, NICS[0].mac, NICS[0].ip, 5000, 7400)
    for _ in range(1000):
        waiting.put(reset, port, VIEW, 0.0)
    assert not waiting
    assert waiting.dropped == 0
