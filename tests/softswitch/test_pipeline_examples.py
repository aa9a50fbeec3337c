"""The example programs in the embedded target: a frame in, frames out."""

from __future__ import annotations

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from softswitch.codegen import control, parsing
from softswitch.codegen.hashes import crc16
from softswitch.codegen.program import Output
from softswitch.program.state import Entry
from tests.softswitch.support.scenarios import (
    SCENARIOS,
    A,
    B,
    C,
    counter,
    ecmp,
    l3_forward,
    number,
    operators,
)


def test_l3_takes_the_longest_prefix_and_mends_the_checksum() -> None:
    program = l3_forward().program
    for target, port, length in (
        ("10.9.9.9", 1, 8),
        ("10.1.9.9", 2, 16),
        ("10.1.2.9", 3, 24),
        ("10.1.2.3", 1, 32),
    ):
        frame = bytes(Ether(src=A, dst=B) / IP(dst=target, ttl=9) / UDP() / b"x")
        (output,) = program.process(2, frame)
        packet = Ether(output.frame)
        assert (output.port, packet[IP].ttl, packet.src) == (port, 8, B)
        assert number(packet.dst) == number(C) + length
        checksum = packet[IP].chksum
        del packet[IP].chksum
        assert Ether(bytes(packet))[IP].chksum == checksum
        assert output.frame[34:] == frame[34:]


def test_l3_drops_what_it_should() -> None:
    program = l3_forward().program

    def out(packet: Ether) -> list[int]:
        return [output.port for output in program.process(2, bytes(packet))]

    good = Ether(dst=B) / IP(dst="10.1.2.3", src="1.1.1.1") / UDP(dport=9)
    assert out(good) == [1]
    assert out(Ether(dst=B) / IP(dst="10.1.2.3", ttl=1) / UDP()) == []
    assert out(Ether(dst=B) / IP(dst="10.1.2.3", chksum=1) / UDP()) == []
    assert out(Ether(dst=B) / IP(dst="10.1.2.3", version=5) / UDP()) == []
    assert out(Ether(dst=B) / IP(dst="99.1.2.3") / UDP()) == []
    # The access list: the higher priority wins, over a ternary, an optional and a range field.
    assert out(Ether(dst=B) / IP(dst="10.1.2.3", src="192.168.0.1") / UDP(dport=999)) == []
    assert out(Ether(dst=B) / IP(dst="10.1.2.3", src="192.168.0.1") / UDP(dport=1000)) == [1]
    assert out(Ether(dst=B) / IP(dst="10.1.2.3") / TCP(dport=22)) == []
    assert out(Ether(dst=B) / IP(dst="10.1.2.3") / TCP(dport=80)) == [1]


def test_ecmp_chooses_by_hash_and_spreads() -> None:
    program = ecmp().program
    ports = set()
    for source in range(1000, 1060):
        frame = bytes(
            Ether(dst=B) / IP(src="10.0.0.1", dst="10.0.7.7", id=0xABC0) / UDP(sport=source, dport=7) / b"odd"
        )
        (output,) = program.process(1, frame)
        flow = bytes([10, 0, 0, 1, 10, 0, 7, 7, 17]) + source.to_bytes(2, "big") + (7).to_bytes(2, "big")
        member = crc16(flow) % 3
        packet = Ether(output.frame)
        assert (output.port, packet[IP].id) == (member + 1, 0xABC0 + member)
        checksum = packet[UDP].chksum
        del packet[UDP].chksum
        assert Ether(bytes(packet))[UDP].chksum == checksum
        ports.add(output.port)
    assert ports == {1, 2, 3}


def test_counter_counts_in_a_register_and_grows_the_packet() -> None:
    program = counter().program
    (packets,) = program.state.registers.values()
    (totals,) = program.state.counters.values()
    frame = bytes(Ether(src=A, dst=B, type=0x0800) / Raw(b"payload"))
    for count in (1, 2, 3):
        (pushed,) = program.process(7, frame)
        assert pushed.port == 8
        assert pushed.frame[:14] == frame[:12] + b"\x88\xb5"
        header = pushed.frame[14:28]
        assert header[:2] == frame[12:14]
        assert int.from_bytes(header[4:8], "big") == count
        assert int.from_bytes(header[8:10], "big") == 100
        assert int.from_bytes(header[10:14], "big") == len(frame) + 14 == len(pushed.frame)
    assert packets[7] == totals[7].packets == 3
    assert totals[7].bytes == 3 * len(frame)
    assert program.process(8, pushed.frame) == [Output(7, frame, 0, 0)]
    packets[7] = 0xFFFFFFFF
    assert program.process(7, frame)[0].frame[18:22] == b"\xff\xff\xff\xff"


def test_counter_copies_have_headers_of_their_own() -> None:
    program = counter().program
    frame = bytes(Ether(src=A, dst="01:00:00:00:00:01", type=0x9000) / Raw(b"payload"))
    outputs = program.process(7, frame)
    # The copy to port 7 is dropped by egress; instance 0 comes last, and unchanged.
    assert [(o.port, o.instance) for o in outputs] == [(9, 0x1234), (9, 2), (8, 0)]
    assert [o.frame[10:12] for o in outputs] == [b"\x12\x34", b"\x00\x02", frame[10:12]]
    assert outputs[2].frame is frame


def test_defaults_can_be_changed_and_put_back() -> None:
    program = operators().program
    table = next(t for t in program.state.tables.values() if t.name == "ingress.ways")
    actions = {a.preamble.name: a.preamble.id for a in program.p4info.actions}
    frame = bytes.fromhex("02000000000202000000000100010200640000000000000000000000000000000000")
    branches = program.process(1, frame)
    table.set_default(Entry((), actions["ingress.invalidate"], (), is_default=True))
    invalidated = program.process(1, frame)
    assert len(invalidated[0].frame) == len(branches[0].frame) - 18
    table.set_default(None)
    assert program.process(1, frame) == branches


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("limits", [(parsing, "MAX_NESTED_STATES"), (control, "MAX_DUPLICATION")])
def test_loops_do_what_nested_code_does(
    monkeypatch: pytest.MonkeyPatch, name: str, limits: tuple[object, str]
) -> None:
    nested = SCENARIOS[name]()
    monkeypatch.setattr(*limits, 0)
    looped = SCENARIOS[name]()
    assert looped.program.source != nested.program.source or name == "operators"
    for frame in nested.frames:
        for length in (len(frame), len(frame) - 3, len(frame) // 2):
            for port in nested.ports:
                assert looped.program.process(port, frame[:length]) == nested.program.process(
                    port, frame[:length]
                )


def test_a_parser_that_never_ends_is_stopped() -> None:
    """An option repeats more often than the parser's limit."""
    program = operators().program
    frame = bytes.fromhex("0200000000020200000000010001") + b"\x01\x00" * 5000
    (output,) = program.process(1, frame)
    assert output.frame[9:11] == (5).to_bytes(2, "big"), "neither NoError nor the program's own error"
    assert len(output.frame) == len(frame) - 2 * 4095 + 2
