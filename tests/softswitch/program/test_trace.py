"""Traces: their contents, the text of addresses in them, and that they change nothing."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softswitch.program.trace import Notation, Trace, ipv4, ipv6, mac, notation
from tests.softswitch.support.scenarios import (
    CPU_PORT,
    SCENARIOS,
    checkmate_program,
    counter,
    l3_forward,
    number,
    segment,
    tag,
)

TAGGED = """\
packet: port 1, 87 bytes
  parser: start
  parser: frame
  parser: frame_parser_ipv4
  parser: frame_parser_tcp
  parser: frame_parser_first_option
  parser: frame_parser_tag
  parser: frame_0"""


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_traced_packet_fares_as_an_untraced_one(name: str) -> None:
    plain, traced = SCENARIOS[name](), SCENARIOS[name]()
    for port in plain.sources:
        for frame in plain.frames:
            packet = b"\x00\x02" + frame if port == CPU_PORT else frame
            trace = Trace()
            outputs = traced.program.process(port, packet, trace)
            assert outputs == plain.program.process(port, packet)
            events = trace.data()
            assert events[0] == {"event": "packet", "port": port, "bytes": len(packet)}
            traced_outputs = [
                (e["port"], e["bytes"], e["instance"]) for e in events if e["event"] == "output"
            ]
            assert traced_outputs == [(o.port, len(o.frame), o.instance) for o in outputs]
            assert outputs or any(e["event"] in ("drop", "multicast") for e in events)
    plain_counts = [c for cells in plain.program.state.counters.values() for c in cells]
    assert plain_counts == [c for cells in traced.program.state.counters.values() for c in cells]


def test_the_plain_code_has_no_trace_of_it() -> None:
    program = checkmate_program()
    program.process(1, segment([tag()]), Trace())
    assert "trace." not in program.source


def test_a_tagged_segment_as_data() -> None:
    program = checkmate_program()
    trace = Trace()
    program.process(1, segment([tag()]), trace)
    events = trace.data()
    states = [e["name"] for e in events if e["event"] == "state"]
    inner = [f"frame_parser_{name}" for name in ("ipv4", "tcp", "first_option", "tag")]
    assert states == ["start", "frame", *inner, "frame_0"]
    hits = [e for e in events if e["event"] == "hit"]
    assert [e["table"] for e in hits] == ["forwarding", "marks", "boundaries", "replication", "streams"]
    assert hits[2]["key"] == {"port": 1, "source": 0x0A000001, "destination": 0x0A000002}
    assert hits[3]["key"] == {"boundary": 5, "shadow_id": 3, "channel": 1}
    misses = [e["table"] for e in events if e["event"] == "miss"]
    assert misses == ["sources", "guarded_ports", "guarded_addresses", "stub"]
    replicate = next(e for e in events if e["event"] == "action" and e["action"] == "replicate")
    assert replicate == {
        "event": "action",
        "action": "replicate",
        "params": {"group": 10},
        "default": False,
    }
    assert {"event": "multicast", "group": 10, "copies": 2} in events
    assert [(e["port"], e["instance"]) for e in events if e["event"] == "copy"] == [(3, 1), (2, 0)]


def test_a_tagged_segment_as_text() -> None:
    program = checkmate_program()
    trace = Trace(program.notations)
    program.process(1, segment([tag()]), trace)
    text = trace.text()
    assert text.startswith(TAGGED)
    for line in (
        "  table stub(address=10.0.0.2): miss",
        "  table boundaries(port=0x1, source=10.0.0.1, destination=10.0.0.2): hit",
        "  table replication(boundary=0x5, shadow_id=0x3, channel=0x1): hit",
        "  action rewrite(shadow_mac=02:00:00:00:00:03, stub_mac=02:00:00:00:00:fe, shadow_ip=10.1.0.3, "
        "stub_ip=10.0.0.250, shadow_port=0xfa0, stub_port=0x1388, "
        "acknowledgement=0xfffffff0, minus_base=0x0)",
        "  action enter(boundary=0x5)",
        "  action replicate(group=0xa)",
        "  action NoAction() (default)",
        "  multicast: group 10, 2 copies",
        "  copy: port 3, instance 1",
        "  output: port 2, 87 bytes",
    ):
        assert line in text.splitlines()
    assert re.search(r"^  if hdr\.tcp\.isValid\(\) \(include/ingress\.p4:\d+\): True$", text, re.MULTILINE)


def test_drops_and_parser_errors_say_why() -> None:
    trace = Trace()
    checkmate_program().process(2, segment(tos=0)[:20], trace)
    assert {"event": "parser_error", "error": "PacketTooShort"} in trace.data()
    last = trace.data()[-1]
    assert (last["event"], last["where"]) == ("drop", "egress")
    assert (
        trace.text().splitlines()[-1] == "  drop in egress: egress_spec is the drop port at the end of egress"
    )
    trace = Trace()
    scenario = counter()
    scenario.program.process(7, scenario.frames[2], trace)
    assert [e["where"] for e in trace.data() if e["event"] == "drop"] == ["egress"]
    trace = Trace()
    frame = bytearray(l3_forward().frames[0])
    frame[24] ^= 1
    l3_forward().program.process(1, bytes(frame), trace)
    assert {"event": "checksum_error", "field": "ipv4.checksum"} in trace.data()


def test_others_can_add_events() -> None:
    trace = Trace()
    trace.add("refused", port=3)
    assert trace.data() == [{"event": "refused", "port": 3}]
    assert trace.text() == "refused: port 3"


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
