"""Programs with entries in their tables, and frames that reach all of their code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finsy.proto import p4i
from google.protobuf import text_format
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from softswitch.codegen.program import Program, load
from softswitch.program.match import Key
from softswitch.program.meters import Clock
from softswitch.program.state import Entry, GroupReplica

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "softswitch" / "examples"
CHECKMATE = ROOT / "p4src" / "build" / "bmv2" / "checkmate_v1model"
OPERATORS = Path(__file__).parents[1] / "programs" / "operators"
CPU_PORT = 510

A, B, C = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"
STUB_IP = "10.0.0.250"


def number(address: str) -> int:
    """Return a MAC or IPv4 address as a number."""
    if ":" in address:
        return int(address.replace(":", ""), 16)
    return int.from_bytes(bytes(map(int, address.split("."))), "big")


def files(base: Path) -> tuple[bytes, p4i.P4Info]:
    """Return a program's JSON and P4Info."""
    p4info = p4i.P4Info()
    text_format.Parse(base.with_name(base.name + ".p4info.txtpb").read_text(), p4info)
    return base.with_name(base.name + ".json").read_bytes(), p4info


@dataclass
class FrameScenario:
    """A program with entries; `last` returns frames that reach every port from a given port."""

    name: str
    base: Path
    program: Program
    ports: list[int]
    sources: list[int]
    frames: list[bytes]
    last: Callable[[int, int], list[bytes]]

    def insert(
        self, table: str, match: tuple[Key, ...], action: str, *params: int, priority: int = 0
    ) -> None:
        """Add an entry by names."""
        add(self.program, table, match, action, *params, priority=priority)


def add(
    program: Program, table: str, match: tuple[Key, ...], action: str, *params: int, priority: int = 0
) -> None:
    """Add an entry by names."""
    actions = {a.preamble.name: a.preamble.id for a in program.p4info.actions}
    tables = {t.name: t for t in program.state.tables.values()}
    tables[table].insert(Entry(match, actions[action], params, priority))


def load_program(base: Path, clock: Clock | None = None) -> Program:
    """Return a program with empty tables, and the time of its meters."""
    return load(*files(base), clock or time.monotonic_ns)


# Checkmate


def tag(
    seq: int = 0, anchor: int = 0, shadow: int = 3, channel: int = 1, incarnation: int = 7
) -> tuple[int, bytes]:
    """Return the tag as a TCP option for scapy."""
    body = bytes.fromhex("c4ec") + seq.to_bytes(4, "big") + anchor.to_bytes(4, "big")
    return 253, body + shadow.to_bytes(2, "big") + bytes([channel, incarnation])


def segment(
    options: list[tuple[object, object]] | None = None,
    payload: bytes = b"reduced gradients",
    source: str = "10.0.0.1",
    destination: str = "10.0.0.2",
    **fields: object,
) -> bytes:
    """Return a TCP segment from host A to host B, with the tag's DSCP bit unless `tos` says otherwise."""
    tos = fields.pop("tos", 0x80)
    tcp = TCP(sport=1000, dport=2000, seq=1000, options=options or [], **{"flags": "A", **fields})
    return bytes(Ether(src=A, dst=B) / IP(src=source, dst=destination, tos=tos) / tcp / Raw(payload))


TIMESTAMPS: list[tuple[object, object]] = [("NOP", None), ("NOP", None), ("Timestamp", (12345, 54321))]
LAST_SOURCE = "10.9.9.9"


def checkmate_program(clock: Clock | None = None) -> Program:
    """Return a program with three hosts on ports 1 to 3, a stub, and streams of two boundaries.

    They have two channels; one stream has an old incarnation.
    """
    program = load_program(CHECKMATE, clock)
    for port, mac in enumerate((A, B, C), 1):
        add(program, "forwarding", (number(mac),), "forward", port)
    add(program, "forwarding", (number("02:00:00:00:00:0d"),), "discard")
    add(program, "marks", ((0x20, 0x20),), "mark", priority=1)
    add(program, "stub", (number(STUB_IP),), "punt_segment")
    add(program, "stub_arp", (number(STUB_IP),), "punt_arp")
    pair = (number("10.0.0.1"), number("10.0.0.2"))
    for port in (1, 2, 3):
        add(program, "boundaries", (port, *pair), "enter", 5)
        add(program, "boundaries", (port, number(LAST_SOURCE), pair[1]), "enter", 9)
    for boundary, shadow, channel, group in (
        (5, 3, 1, 10),
        (5, 3, 2, 11),
        (5, 4, 1, 10),
        (5, 9, 1, 99),
        (9, 3, 1, 12),
    ):
        add(program, "replication", (boundary, shadow, channel), "replicate", group)
    rewrite = (number(C), number("02:00:00:00:00:fe"), number("10.1.0.3"), number(STUB_IP), 4000, 5000)
    add(program, "streams", (5, 1, 3, 7, 1), "rewrite", *rewrite, 0xFFFFFFF0, 0)
    add(program, "streams", (5, 1, 3, 8, 1), "rewrite", *rewrite, 5, 0xFFFFFF00)
    add(program, "streams", (5, 2, 3, 7, 2), "rewrite", *rewrite, 77, 1)
    add(program, "streams", (5, 1, 4, 7, 1), "rewrite", *rewrite, 78, 2)
    add(program, "incarnations", (5,), "expect", 7)
    add(program, "lost", (5, 1, 3, 1), "lose")
    add(program, "lost", (5, 2, 3, 1), "lose")
    groups = program.state.groups
    groups[1] = (GroupReplica(1, 0), GroupReplica(2, 0), GroupReplica(3, 0))
    groups[10] = (GroupReplica(2, 0), GroupReplica(3, 1))
    groups[11] = (GroupReplica(1, 1), GroupReplica(2, 0), GroupReplica(3, 2))
    groups[12] = (GroupReplica(1, 0), GroupReplica(2, 0), GroupReplica(3, 0))
    return program


def checkmate_frames() -> list[bytes]:
    """Return one frame of each kind that the program distinguishes."""
    return [
        segment(tos=0),
        segment(),
        segment([tag()]),
        segment([tag(seq=0xFFFFFFFF, anchor=0x12345678)]),
        segment([*TIMESTAMPS, tag(seq=9)]),
        segment([tag(channel=2)]),
        segment([tag(incarnation=8)]),
        segment([tag(incarnation=9)]),
        segment([tag(shadow=4)]),
        segment([tag(shadow=9)]),
        segment([tag(shadow=5)]),
        segment([tag()], payload=b""),
        segment([tag()], payload=bytes(range(251))),
        segment([tag()], flags="PAUECF"),
        segment([tag()], tos=0),
        segment([tag()], source="10.0.0.7"),
        segment(TIMESTAMPS),
        segment(destination=STUB_IP, flags="S", tos=0),
        segment(destination=STUB_IP, payload=b"", tos=0),
        segment(destination=STUB_IP, payload=b"hello", tos=0),
        bytes(Ether(src=A, dst="ff:ff:ff:ff:ff:ff") / ARP(pdst=STUB_IP)),
        bytes(Ether(src=A, dst="ff:ff:ff:ff:ff:ff") / ARP(pdst="10.0.0.2")),
        bytes(Ether(src=A, dst=B) / ARP(op=2, pdst=STUB_IP)),
        bytes(Ether(src=A, dst=A) / IP() / UDP() / b"back"),
        bytes(Ether(src=A, dst="02:00:00:00:00:0d") / IP() / b"discarded"),
        bytes(Ether(src=A, dst=B) / IPv6(dst="fe80::1") / UDP() / b"six"),
        bytes(
            Ether(src=A, dst=B) / IP(src="10.0.0.1", dst="10.0.0.2", options=[b"\x07\x04\x00\x00"]) / TCP()
        ),
        bytes(Ether(src=A, dst=B) / IP(src="10.0.0.1", dst="10.0.0.2", flags="MF") / TCP(options=[tag()])),
    ]


def checkmate_last(port: int, count: int) -> list[bytes]:
    """Return a frame for every port."""
    mark = b"last %d" % count
    punted = segment(source=LAST_SOURCE, destination=STUB_IP, flags="S", tos=0, payload=mark)
    if port != CPU_PORT:
        return [segment([tag()], source=LAST_SOURCE, payload=mark), punted]
    frame = bytes(Ether(src=A, dst=B) / Raw(mark))
    return [(out & 511).to_bytes(2, "big") + frame for out in (1, 2, 3, CPU_PORT)]


def checkmate() -> FrameScenario:
    """Return Checkmate's own program."""
    ports = [1, 2, 3]
    frames = checkmate_frames()
    return FrameScenario(
        "checkmate", CHECKMATE, checkmate_program(), ports, [*ports, CPU_PORT], frames, checkmate_last
    )


# Examples


def _udp(destination: str, mac: str = B, **fields: object) -> Packet:
    return Ether(src=A, dst=mac) / IP(src="10.0.0.1", dst=destination, **fields) / UDP(sport=1111, dport=2222)


def l3_forward() -> FrameScenario:
    """Return routes of several lengths, stations, and an access list with priorities."""
    program = load_program(EXAMPLES / "l3_forward")
    routes, stations, access = "ingress.routes", "ingress.stations", "ingress.access"
    for prefix, length, port in (
        ("10.0.0.0", 8, 1),
        ("10.1.0.0", 16, 2),
        ("10.1.2.0", 24, 3),
        ("10.1.2.3", 32, 1),
    ):
        add(program, routes, ((number(prefix), length),), "ingress.route", port, number(C) + length)
    for port, mac in enumerate((A, B, C), 1):
        add(program, stations, (number(mac),), "ingress.forward", port)
    outside = (number("192.168.0.0"), 0xFFFF0000)
    add(program, access, (outside, None, None), "ingress.drop", priority=10)
    add(program, access, (outside, 17, (1000, 3000)), "NoAction", priority=20)
    add(program, access, (None, 6, (0, 1023)), "ingress.drop", priority=5)
    add(program, access, (None, 6, (80, 80)), "NoAction", priority=6)
    targets = ("10.9.9.9", "10.1.9.9", "10.1.2.9", "10.1.2.3", "11.0.0.1")
    frames = [bytes(_udp(target) / b"routed") for target in targets]
    frames += [
        bytes(Ether(dst=B) / IP(src="192.168.1.1", dst="10.1.2.3") / UDP(dport=p) / b"x") for p in (999, 1000)
    ]
    frames += [
        bytes(Ether(dst=B) / IP(dst="10.1.2.3", ttl=t) / TCP(dport=p))
        for t, p in ((9, 22), (9, 80), (1, 2000))
    ]
    frames += [
        bytes(_udp("10.1.2.3", chksum=0x1234) / b"bad sum"),
        bytes(_udp("10.1.2.3", version=5) / b"bad version"),
    ]
    frames += [
        bytes(_udp("10.1.2.3", flags="MF") / b"x"),
        bytes(_udp("10.1.2.3", options=[b"\x07\x04\x00\x00"]) / b"x"),
    ]
    frames += [bytes(Ether(src=A, dst=mac) / ARP()) for mac in (A, B, C, "02:00:00:00:00:99")]

    def last(_: int, count: int) -> list[bytes]:
        return [bytes(Ether(src=A, dst=mac, type=0x88B6) / Raw(b"last %d" % count)) for mac in (A, B, C)]

    ports = [1, 2, 3]
    return FrameScenario("l3", EXAMPLES / "l3_forward", program, ports, ports, frames, last)


def ecmp() -> FrameScenario:
    """Return a group of three members, an empty one, and direct routes."""
    program = load_program(EXAMPLES / "ecmp")
    groups, members = "ingress.groups", "ingress.members"
    add(program, groups, ((number("10.0.0.0"), 8),), "ingress.balance", 1, 3)
    add(program, groups, ((number("10.5.0.0"), 16),), "ingress.balance", 2, 0)
    add(program, groups, ((number("10.6.0.0"), 16),), "ingress.drop")
    for port in (1, 2, 3):
        add(program, groups, ((number(f"11.0.0.{port}"), 32),), "ingress.direct", port)
        add(program, members, (1, port - 1), "ingress.next_hop", port, number(C) + port)
    add(program, members, (2, 0), "ingress.next_hop", 3, number(B))
    targets = ("10.0.0.1", "10.0.0.2", "10.0.7.1", "10.5.0.1", "10.6.0.1", "11.0.0.2", "12.0.0.1")
    frames = [bytes(_udp(target, tos=3) / b"balanced") for target in targets]
    frames += [
        bytes(Ether(dst=B) / IP(src=f"9.9.9.{n}", dst="10.0.0.9") / UDP(sport=n) / b"odd") for n in range(9)
    ]
    frames += [bytes(Ether(dst=B) / IP(dst="10.0.0.9") / TCP() / b"no UDP"), bytes(Ether() / ARP())]

    def last(_: int, count: int) -> list[bytes]:
        return [bytes(_udp(f"11.0.0.{port}") / (b"last %d" % count)) for port in (1, 2, 3)]

    ports = [1, 2, 3]
    return FrameScenario("ecmp", EXAMPLES / "ecmp", program, ports, ports, frames, last)


def counter() -> FrameScenario:
    """Return constant entries on ports 7 and 8, and copies with several instances."""
    program = load_program(EXAMPLES / "counter")
    program.state.groups[3] = (
        GroupReplica(7, 1),
        GroupReplica(8, 0),
        GroupReplica(9, 0x1234),
        GroupReplica(9, 2),
    )
    header = Ether(src=A, dst=B, type=0x88B5)
    inner = bytes.fromhex("0800 0400 00000005 8001 00000000")
    frames = [
        bytes(Ether(src=A, dst=mac) / IP() / b"x") for mac in (B, "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01")
    ]
    frames += [bytes(header / Raw(inner + b"payload")), bytes(header / Raw(inner[:9])), bytes(header)]
    frames += [bytes(header / Raw(bytes.fromhex("ff") + bytes(9))), bytes(header / Raw(b"\x80\x01\x02"))]

    def last(port: int, count: int) -> list[bytes]:
        mark = Raw(b"last %d" % count)
        if port == 7:
            return [bytes(Ether(src=A, dst=mac) / mark) for mac in ("01:00:00:00:00:01", B)]
        if port == 8:
            return [bytes(header / Raw(inner) / mark)]
        return []

    return FrameScenario("counter", EXAMPLES / "counter", program, [7, 8, 9], [7, 8], frames, last)


# Every operator


def operators() -> FrameScenario:
    """Return a table whose actions branch on operands at the limits of their types."""
    program = load_program(OPERATORS)
    ways = "ingress.ways"
    add(program, ways, ((10, 20), None, 0), "ingress.branches", 15, 0x80, priority=3)
    add(program, ways, ((0, 9), (0x10, 0x10), 0), "ingress.nothing", priority=2)
    add(program, ways, ((200, 255), (0, 0x10), 0), "ingress.invalidate", priority=2)
    add(program, "ingress.notes", (0,), "ingress.note", 5)
    add(program, "ingress.notes", (0xC8,), "ingress.note", 6)
    edges = ("00000000", "01018080", "7f7f7f7f", "80ff80ff", "ffff0180", "0f02fb05", "0aff7f81", "c8c8fe01")
    wide = ("00000000", "ffffffff", "80000001", "12345678")
    rest = ("00000000000000000000", "ffffffffffffffffffff", "8000000000018421d003", "123456789abc5aa5f000")
    operands = [bytes.fromhex(a + w + r) for a in edges for w in wide for r in rest]
    heads = [
        bytes.fromhex(text)
        for text in ("0200", "01000200", "0100010001000205", "0300", "0308", "0309", "0400")
    ]
    start = [bytes.fromhex(f"0200000000020200000000010{port:03x}") for port in (1, 2, 3, 0x1FF)]
    frames = [
        s + heads[n % len(heads)] + o + bytes(n % 5)
        for n, o in enumerate(operands)
        for s in start[n % 4 :][:1]
    ]
    frames += [start[0] + bytes.fromhex("05") + bytes(n) for n in range(6)] + [start[1] + b"\1\0" * 30]

    def last(_: int, count: int) -> list[bytes]:
        return [s + b"\0\0last %d" % count for s in start[:3]]

    ports = [1, 2, 3]
    return FrameScenario("operators", OPERATORS, program, ports, ports[:1], frames, last)


SCENARIOS: dict[str, Callable[[], FrameScenario]] = {
    "checkmate": checkmate,
    "l3_forward": l3_forward,
    "ecmp": ecmp,
    "counter": counter,
    "operators": operators,
}
