"""Clocks of other hosts: ICMP timestamps as kernels answer them, and what a difference means."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.doctor.clocks import MAX_DIFFERENCE, ahead, compare, differences, reply, request
from checkmate.doctor.findings import Outcome
from checkmate.keys.roles import Role
from controlplane.endpoint.endpoint import CLOCK_WINDOW
from tests.support.labs.live import needs_root

HOSTS = ["192.168.0.1", "192.168.0.2"]


def test_the_window_is_the_controllers() -> None:
    assert MAX_DIFFERENCE * 1e6 == CLOCK_WINDOW


@needs_root
def test_kernels_answer_with_their_time() -> None:
    seconds_ahead = differences(["127.0.0.1", "127.0.0.2", "no-such-host.invalid"])
    assert seconds_ahead is not None
    assert seconds_ahead.keys() == {"127.0.0.1", "127.0.0.2"}
    assert all(abs(seconds) < 0.5 for seconds in seconds_ahead.values())


@needs_root
def test_who_does_not_answer_is_absent() -> None:
    assert differences(["192.0.2.77"], seconds=0.05) == {}


@pytest.mark.parametrize(
    ("other_time", "own_time", "seconds"),
    [(61_000, 0, 61.0), (0, 61_000, -61.0), (500, 86_399_500, 1.0), (86_399_500, 500, -1.0)],
)
def test_a_day_wraps(other_time: int, own_time: int, seconds: float) -> None:
    assert ahead(other_time, own_time) == seconds


def test_the_checksum_of_a_request_is_right() -> None:
    for now in (0, 1, 0x7FFF, 86_399_999):
        total = sum(struct.unpack("!10H", request(0xFFFF, 0xFFFE, now)))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        assert total == 0xFFFF


@given(st.binary(max_size=60))
def test_anything_else_is_not_an_answer(packet: bytes) -> None:
    host_time = reply(packet, 0x1234)
    assert host_time is None or (b"\x12\x34" in packet and host_time < 86_400_000)


@pytest.mark.parametrize(
    ("role", "seconds_ahead", "outcome", "words"),
    [
        (Role.CONTROLLER, {HOSTS[0]: 0.01, HOSTS[1]: -0.2}, Outcome.OK, "192.168.0.2 is 0.2 s behind"),
        (Role.CONTROLLER, {HOSTS[0]: 61.0}, Outcome.FAILED, "192.168.0.1 is 61.0 s ahead"),
        (Role.CONTROLLER, {HOSTS[0]: -31.0}, Outcome.WARNING, "behind"),
        (Role.SHADOW, {HOSTS[0]: 61.0}, Outcome.WARNING, "ahead"),
        (Role.SHADOW, {}, Outcome.SKIPPED, "none has answered"),
        (Role.SHADOW, None, Outcome.SKIPPED, "CAP_NET_RAW"),
    ],
)
def test_what_a_difference_means(
    role: Role, seconds_ahead: dict[str, float] | None, outcome: Outcome, words: str
) -> None:
    finding = compare(role, HOSTS, seconds_ahead)
    assert (finding.outcome, words in finding.detail) == (outcome, True), finding
    assert compare(role, [], seconds_ahead).outcome is Outcome.SKIPPED
