"""Checkmate's own program in the embedded target: a frame in, frames out."""

from __future__ import annotations

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from softswitch.codegen.program import Output, Program
from softswitch.program.state import GroupReplica
from tests.softswitch.support.scenarios import (
    CPU_PORT,
    STUB_IP,
    TIMESTAMPS,
    A,
    B,
    C,
    add,
    checkmate_program,
    segment,
    tag,
)

REWRITTEN = {"shadow_mac": C, "stub_mac": "02:00:00:00:00:fe", "shadow_ip": "10.1.0.3", "stub_ip": STUB_IP}


@pytest.fixture
def program() -> Program:
    """Return a fresh program with hosts, a stub and streams."""
    return checkmate_program()


def sums_are_right(frame: bytes) -> bool:
    """Return whether both checksums equal scapy's."""
    packet = Ether(frame)
    sums = packet[IP].chksum, packet[TCP].chksum
    del packet[IP].chksum, packet[TCP].chksum
    rebuilt = Ether(bytes(packet))
    return bool(sums == (rebuilt[IP].chksum, rebuilt[TCP].chksum))


def test_known_unicast_leaves_as_the_very_bytes_that_came(program: Program) -> None:
    frame = segment(tos=0)
    (output,) = program.process(1, frame)
    assert output == Output(2, frame, 0, 0)
    assert output.frame is frame


def test_nothing_goes_back_or_to_a_discarded_address(program: Program) -> None:
    assert program.process(2, segment(tos=0)) == []
    assert program.process(1, bytes(Ether(dst="02:00:00:00:00:0d") / Raw(b"x"))) == []


def test_unknown_is_flooded_but_never_back(program: Program) -> None:
    frame = bytes(Ether(src=A, dst="ff:ff:ff:ff:ff:ff", type=0x86DD) / Raw(b"x" * 9000))
    assert program.process(2, frame) == [Output(1, frame, 0, 1), Output(3, frame, 0, 1)]


@pytest.mark.parametrize("payload", [b"x", b"reduced", bytes(range(256)) * 5, bytes(65000)])
@pytest.mark.parametrize("options", [[], TIMESTAMPS])
def test_a_shadow_copy_is_a_segment_of_the_shadow_stream(
    program: Program, options: list[tuple[object, object]], payload: bytes
) -> None:
    frame = segment([*options, tag(seq=100, anchor=900)], payload, flags="PA")
    shadow, training = program.process(1, frame)
    assert (training.port, training.instance, training.group) == (2, 0, 10)
    assert training.frame is frame
    assert (shadow.port, shadow.instance, shadow.group) == (3, 1, 10)
    copy, original = Ether(shadow.frame), Ether(frame)
    assert (copy.dst, copy.src) == (REWRITTEN["shadow_mac"], REWRITTEN["stub_mac"])
    assert (copy[IP].dst, copy[IP].src) == (REWRITTEN["shadow_ip"], REWRITTEN["stub_ip"])
    assert (copy[TCP].dport, copy[TCP].sport) == (4000, 5000)
    assert (copy[TCP].seq, copy[TCP].ack) == (100 + (1000 - 900), 0xFFFFFFF0)
    assert (copy[TCP].options, copy[TCP].flags, copy[TCP].window) == ([], "PA", 65535)
    assert (copy[IP].tos, copy[IP].id, copy[IP].ttl) == (original[IP].tos, original[IP].id, original[IP].ttl)
    assert copy[IP].len == 40 + len(payload)
    assert bytes(copy[TCP].payload) == payload
    assert sums_are_right(shadow.frame)


def test_a_damaged_segment_gives_a_damaged_copy(program: Program) -> None:
    frame = bytearray(segment([tag()]))
    frame[-1] ^= 1
    assert not sums_are_right(program.process(1, bytes(frame))[0].frame)


@pytest.mark.parametrize(("seq", "anchor"), [(0xFFFFFFFF, 999), (0, 0xFFFFFFFF), (0x80000000, 0x80000001)])
def test_sequence_numbers_wrap(program: Program, seq: int, anchor: int) -> None:
    shadow, _ = program.process(1, segment([tag(seq=seq, anchor=anchor)]))
    assert Ether(shadow.frame)[TCP].seq == (seq + 1000 - anchor) % 2**32


def test_base_and_incarnation_choose_the_stream(program: Program) -> None:
    shadow, _ = program.process(1, segment([tag(seq=0x200, anchor=1000, incarnation=8)]))
    assert (Ether(shadow.frame)[TCP].seq, Ether(shadow.frame)[TCP].ack) == (0x100, 5)


def test_copies_come_in_the_groups_order_with_the_training_copy_last(program: Program) -> None:
    add(program, "streams", (5, 2, 3, 7, 1), "rewrite", *[1] * 8)
    program.state.groups[11] = (GroupReplica(2, 0), GroupReplica(3, 2), GroupReplica(1, 1))
    outputs = program.process(1, segment([tag(channel=2)]))
    assert [(o.port, o.instance) for o in outputs] == [(3, 2), (1, 1), (2, 0)]


def test_losses_are_counted_by_reason_and_training_goes_on(program: Program) -> None:
    cells = {
        c.preamble.name.split(".")[-1]: program.state.counters[c.preamble.id] for c in program.p4info.counters
    }
    tables = {table.name: table for table in program.state.tables.values()}
    unconnected = segment([tag(channel=2)])
    old = segment([tag(incarnation=6)])
    # Channel 2 has a stream for holder 2, and none for holder 1.
    assert [o.instance for o in program.process(1, unconnected)] == [2, 0]
    assert [o.instance for o in program.process(1, old)] == [0]
    assert [(cell.packets, cell.bytes) for cell in cells["losses"]] == [(1, len(unconnected)), (1, len(old))]
    entry = tables["lost"].entries[(5, 2, 3, 1), 0]
    assert (entry.count.packets, entry.count.bytes) == (1, len(unconnected))
    program.process(1, segment())
    program.process(1, segment([tag(shadow=5)]))
    assert [cell.packets for cell in cells["passed"]] == [1, 1]


def test_entries_count_their_hits_only(program: Program) -> None:
    frame = segment([tag()])
    for _ in range(3):
        program.process(1, frame)
    tables = {table.name: table for table in program.state.tables.values()}
    key = (5, 3, 1), 0
    hit = tables["replication"].entries[key].count
    assert (hit.packets, hit.bytes) == (3, 3 * len(frame))
    assert sum(entry.count.packets for entry in tables["replication"].entries.values()) == 3


def test_writes_show_in_the_next_packet(program: Program) -> None:
    tables = {table.name: table for table in program.state.tables.values()}
    frame = segment([tag()])
    assert len(program.process(1, frame)) == 2
    tables["streams"].delete((5, 1, 3, 7, 1), 0)
    assert len(program.process(1, frame)) == 1
    tables["marks"].delete(((0x20, 0x20),), 1)
    assert program.process(1, frame) == [Output(2, frame, 0, 0)]


def test_the_stub_is_punted_with_the_ingress_port(program: Program) -> None:
    arp = bytes(Ether(src=A, dst="ff:ff:ff:ff:ff:ff") / ARP(pdst=STUB_IP))
    syn = segment(destination=STUB_IP, flags="S", tos=0, payload=b"")
    for port, frame in ((3, arp), (1, syn)):
        assert program.process(port, frame) == [Output(CPU_PORT, bytes([0, port]) + frame, 0, 0)]
    assert program.process(1, segment(destination=STUB_IP, tos=0, payload=b"")) == []


def test_packet_out_leaves_by_its_port(program: Program) -> None:
    frame = bytes(Ether(src=A, dst=B) / Raw(b"from the controller"))
    assert program.process(CPU_PORT, b"\x00\x02" + frame) == [Output(2, frame, 0, 0)]
    assert program.process(CPU_PORT, b"\x01\xff" + frame) == []


@pytest.mark.parametrize("options", [[tag()], [*TIMESTAMPS, tag()]])
def test_frames_cut_short_anywhere_pass_unchanged(
    program: Program, options: list[tuple[object, object]]
) -> None:
    frame = segment(options)
    headers = len(frame) - len(b"reduced gradients")
    for length in range(headers):
        outputs = program.process(1, frame[:length])
        assert {o.frame for o in outputs} == {frame[:length]}
        assert [o.port for o in outputs] == ([2] if length >= 14 else [2, 3])


def test_a_group_without_members_drops(program: Program) -> None:
    assert program.process(1, segment([tag(shadow=9)])) == []
