"""Addresses in traces: the fields that are assumed to be addresses, and their text."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softswitch.program.notation import Notation, ipv4, ipv6, mac, notation
from softswitch.program.trace import Trace
from tests.softswitch.support.scenarios import SCENARIOS, number


@pytest.mark.parametrize(
    ("width", "name", "header", "header_type", "expected"),
    [
        (48, "destination", "ethernet", "ethernet_t", mac),
        (48, "anything", "h", "h_t", mac),
        (48, "ingress_global_timestamp", "", "", hex),
        (48, "next_hop_mac", "", "", mac),
        (48, "smack", "", "", hex),
        (48, "dstAddr", "", "", mac),
        (32, "source", "ipv4", "headers_t", ipv4),
        (32, "source", "hdr.inner", "ipv4_t", ipv4),
        (32, "source", "hdr.ipv4_inner", "h_t", ipv4),
        (32, "target_ip", "arp", "arp_t", ipv4),
        (32, "srcAddr", "", "", ipv4),
        (32, "nexthop_ipv4", "", "", ipv4),
        (32, "sequence", "tcp", "tcp_t", hex),
        (32, "tipping", "", "", hex),
        (32, "enq_timestamp", "", "", hex),
        (16, "src_addr", "ipv4", "ipv4_t", hex),
        (8, "ttl", "ipv4", "ipv4_t", hex),
        (128, "source", "ipv6", "ipv6_t", ipv6),
        (128, "digest", "", "", hex),
    ],
)
def test_width_and_names_decide(
    width: int, name: str, header: str, header_type: str, expected: Notation
) -> None:
    assert notation(width, name, header, header_type) is expected


@given(st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 128) - 1))
def test_the_text_is_the_number(m: int, four: int, six: int) -> None:
    assert int(mac(m).replace(":", ""), 16) == m
    assert len(mac(m)) == 17
    assert int(IPv4Address(ipv4(four))) == four
    assert int(IPv6Address(ipv6(six))) == six


def traced(scenario_name: str, port: int, frame: int) -> list[str]:
    scenario = SCENARIOS[scenario_name]()
    trace = Trace(scenario.program.notations)
    scenario.program.process(port, scenario.frames[frame], trace)
    return trace.text().splitlines()


def test_a_key_with_a_name_of_its_own() -> None:
    assert "  table forwarding(mac=02:00:00:00:00:02): hit" in traced("checkmate", 1, 0)


def test_a_program_of_another_kind() -> None:
    """Keys have the names of their fields here, and a parameter the notation of its target field."""
    lines = traced("l3_forward", 1, 3)
    assert "  table ingress.routes(hdr.ipv4.destination=10.1.2.3): hit" in lines
    assert "  action ingress.route(port=0x1, next_hop=02:00:00:00:00:23)" in lines
    keys = "hdr.ipv4.source=10.0.0.1, hdr.ipv4.protocol=0x11, hdr.ports.destination=0x8ae"
    assert any(keys in line for line in lines)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_scenario_can_be_written(name: str) -> None:
    scenario = SCENARIOS[name]()
    for port in scenario.sources:
        for frame in scenario.frames:
            trace = Trace(scenario.program.notations)
            scenario.program.process(port, frame, trace)
            assert trace.text().startswith(f"packet: port {port}, ")


def test_data_stays_numbers() -> None:
    scenario = SCENARIOS["l3_forward"]()
    trace = Trace(scenario.program.notations)
    scenario.program.process(1, scenario.frames[3], trace)
    keys = [event["key"] for event in trace.data() if event["event"] == "hit"]
    assert {"hdr.ipv4.destination": number("10.1.2.3")} in keys


def test_one_copy_is_singular() -> None:
    trace = Trace()
    trace.add("multicast", group=1, copies=1)
    trace.add("multicast", group=2, copies=2)
    assert trace.text().splitlines() == ["multicast: group 1, 1 copy", "  multicast: group 2, 2 copies"]
