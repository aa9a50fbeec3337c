"""Packets per second of a program in the embedded target, without ports, on one core.

    python -m benchmarks.switch.softswitch_pps [--seconds 2] [--profile]

Three kinds of packets through Checkmate's own program: plain TCP (known destination), tagged with one shadow
copy, and tagged with none; at 1,500 bytes and as 64 KB segments.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from pathlib import Path

from finsy.proto import p4i
from google.protobuf import text_format
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from softswitch.codegen.program import Program, load
from softswitch.program.state import Entry, GroupReplica

BUILD = Path(__file__).parents[2] / "p4src" / "build" / "bmv2"
SOURCE, DESTINATION = 0x0A000001, 0x0A000002
MACS = ("02:00:00:00:00:01", "02:00:00:00:00:02")


def program() -> Program:
    """Load Checkmate's program with one boundary, one shadow node and two hosts."""
    p4info = p4i.P4Info()
    text_format.Parse((BUILD / "checkmate_v1model.p4info.txtpb").read_text(), p4info)
    loaded = load((BUILD / "checkmate_v1model.json").read_bytes(), p4info)
    actions = {a.preamble.name: a.preamble.id for a in loaded.p4info.actions}
    tables = {t.name: t for t in loaded.state.tables.values()}
    tables["forwarding"].insert(Entry((0x020000000002,), actions["forward"], (2,)))
    tables["forwarding"].insert(Entry((0x020000000001,), actions["forward"], (1,)))
    tables["marks"].insert(Entry(((0x20, 0x20),), actions["mark"], (), priority=1))
    tables["sources"].insert(Entry((1, SOURCE), actions["permit"], ()))
    tables["boundaries"].insert(Entry((1, SOURCE, DESTINATION), actions["enter"], (5,)))
    for channel, group in ((1, 10), (2, 11)):
        tables["replication"].insert(Entry((5, 3, channel), actions["replicate"], (group,)))
    rewrite = (0x02000000000A, 0x0200000000FE, 0x0A0000FE, 0x0A0000FD, 4000, 5000, 77, 0)
    tables["streams"].insert(Entry((5, 1, 3, 7, 1), actions["rewrite"], rewrite))
    loaded.state.groups[10] = (GroupReplica(2, 0), GroupReplica(3, 1))
    loaded.state.groups[11] = (GroupReplica(2, 0),)
    return loaded


def frame(size: int, channel: int | None) -> bytes:
    """Return a TCP segment of `size` bytes in total, with a tag if a channel is specified."""
    headers = Ether(src=MACS[0], dst=MACS[1]) / IP(
        src="10.0.0.1", dst="10.0.0.2", tos=0 if channel is None else 0x80
    )
    options = (
        [] if channel is None else [(253, bytes.fromhex(f"c4ec 00000000 00000000 0003 {channel:02x} 07"))]
    )
    segment = headers / TCP(sport=1000, dport=2000, flags="A", options=options)
    return bytes(segment / bytes(size - len(segment)))


def rate(loaded: Program, packet: bytes, seconds: float) -> float:
    """Return packets per second for one repeated packet."""
    process = loaded.process
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(500):
            process(1, packet)
        count += 500
    return count / elapsed


def main() -> None:
    """Print a line for each kind of packet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each kind of packet")
    parser.add_argument("--profile", action="store_true", help="print a profile")
    arguments = parser.parse_args()
    loaded = program()
    kinds = {"plain": (None, 1), "tagged, one shadow copy": (1, 2), "tagged, no shadow copy": (2, 1)}
    for size in (1514, 65000):
        for name, (channel, expected) in kinds.items():
            packet = frame(size, channel)
            outputs = len(loaded.process(1, packet))
            if outputs != expected:
                raise RuntimeError(f"{name}: {outputs} frames instead of {expected}")
            pps = rate(loaded, packet, arguments.seconds)
            print(f"{size:6} bytes  {name:24} {outputs} out  {pps:10,.0f} packets/s")
    if arguments.profile:
        packet = frame(1514, 1)
        with cProfile.Profile() as profile:
            rate(loaded, packet, arguments.seconds)
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()
