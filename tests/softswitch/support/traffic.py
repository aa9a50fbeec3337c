"""Random traffic of every kind that Checkmate's program distinguishes, for a switch with all features."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from softswitch.codegen.program import Output
from softswitch.program.meters import Clock, MeterCell, MeterRates
from tests.softswitch.support.bmv2_target import SHORTEST, VLAN_TYPES, carried
from tests.softswitch.support.scenarios import (
    CHECKMATE,
    CPU_PORT,
    LAST_SOURCE,
    STUB_IP,
    FrameScenario,
    add,
    checkmate_last,
    checkmate_program,
    number,
)
from tests.support.p4.frames import ADDRESSES, MACS, TAG, TIMESTAMPS, Frame

HOST_PORT, LINK_PORT, OTHER_PORT = 1, 2, 3
"""A port of a job's host, one to another switch, and one of no job."""
RANK_IP, OTHER_STUB_IP = "10.0.0.1", "10.0.0.251"
CLIENTS: Final = {HOST_PORT: "10.1.0.3", LINK_PORT: "10.1.0.4"}
STUB_FLAGS: Final = (0x02, 0x12, 0x10, 0x10, 0x18, 0x11, 0x04, 0x14)


def guarded(tokens: int, clock: Clock | None = None) -> FrameScenario:
    """Return Checkmate's program with guard and limits beside everything else.

    Meters are not refilled, so that their colors do not depend on time: strangers at two ports have half of
    `tokens`, clients a third and a quarter. Marks of the end of a batch are not limited.
    """
    program = checkmate_program(clock)
    for port in (HOST_PORT, LINK_PORT, OTHER_PORT):
        add(program, "sources", (port, number(LAST_SOURCE)), "permit")
        add(program, "clients", (port, number(LAST_SOURCE)), "meter_client")
    for port, address in ((HOST_PORT, RANK_IP), (LINK_PORT, OTHER_STUB_IP)):
        add(program, "sources", (port, number(address)), "permit")
    add(program, "guarded_ports", (HOST_PORT,), "host_port")
    add(program, "guarded_ports", (LINK_PORT,), "link_port")
    for address, from_link in (
        (RANK_IP, 0),
        (STUB_IP, 0),
        (STUB_IP, 1),
        (OTHER_STUB_IP, 0),
        (OTHER_STUB_IP, 1),
    ):
        add(program, "guarded_addresses", (number(address), from_link), "refuse")
    for share, (port, address) in enumerate(CLIENTS.items(), 3):
        if port == HOST_PORT:
            add(program, "sources", (port, number(address)), "permit")
        add(program, "clients", (port, number(address)), "meter_client")
        (clients,) = (table for table in program.state.tables.values() if table.name == "clients")
        clients.entries[(port, number(address)), 0].meter = filled(tokens // share)
    (rates,) = program.state.meters.values()
    rates[HOST_PORT], rates[LINK_PORT] = filled(tokens // 2), filled(tokens // 2)
    ports = [HOST_PORT, LINK_PORT, OTHER_PORT]
    return FrameScenario("guarded", CHECKMATE, program, ports, [*ports, CPU_PORT], [], checkmate_last)


def filled(tokens: int) -> MeterCell:
    """Return a meter that passes this many packets, half of them yellow, and is never refilled."""
    return MeterCell(MeterRates(0, tokens // 2, 0, tokens))


def verdict(outputs: list[Output]) -> str:
    """Return what a program has done with a frame."""
    if not outputs:
        return "dropped"
    if any(output.port == CPU_PORT for output in outputs):
        return "punted"
    if any(output.instance for output in outputs):
        return "replicated, rewritten"
    if outputs[0].group:
        return "flooded" if outputs[0].group == 1 else "replicated, without a stream"
    return "forwarded"


class Traffic:
    """An endless stream of frames by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: dict[str, tuple[int, Callable[[], bytes]]] = {
            "tagged": (24, lambda: self._tagged().encode()),
            "not quite tagged": (8, self._not_quite_tagged),
            "to the stub": (16, self._to_stub),
            "ARP": (6, self._arp),
            "another's source": (8, self._foreign),
            "VLAN": (6, self._vlan),
            "forwarded, broadcast, unknown": (8, self._untagged),
            "wrong checksum": (5, lambda: replace(self._tagged(), damage=1 + self._below(0xFFFE)).encode()),
            "some bits changed": (10, self._with_flipped_bits),
            "cut": (5, self._truncated),
            "random bytes": (4, lambda: self._bytes(SHORTEST + self._below(150))),
        }
        self._names = list(self._kinds)
        self._weights = [weight for weight, _ in self._kinds.values()]

    def frames(self, count: int) -> Iterator[tuple[str, bytes]]:
        """Yield frames with their kinds."""
        for name in self._random.choices(self._names, self._weights, k=count):
            yield name, carried(self._kinds[name][1]())

    def port(self) -> int:
        """Return the port of the next frames; few are from the controller."""
        return self._pick((HOST_PORT, LINK_PORT, OTHER_PORT) * 6 + (CPU_PORT,))

    def packet_out(self, frame: bytes) -> bytes:
        """Return a frame with the header of a packet from the controller, to any port."""
        out = self._pick((HOST_PORT, LINK_PORT, OTHER_PORT, CPU_PORT, 0, 300, 511))
        return int(out).to_bytes(2, "big") + frame

    def _below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def _pick(self, choices: tuple[int, ...]) -> int:
        return choices[self._below(len(choices))]

    def _text(self, choices: list[str]) -> str:
        return choices[self._below(len(choices))]

    def _bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def _tag(self) -> bytes:
        words = self._random.getrandbits(32), self._random.getrandbits(32)
        shadow, channel = self._pick((3, 3, 3, 4, 5, 9)), self._pick((1, 1, 1, 2, 3))
        return TAG + struct.pack("!IIHBB", *words, shadow, channel, self._pick((7, 7, 7, 8, 9)))

    def _tagged(self) -> Frame:
        bits = self._random.getrandbits
        size = self._pick((1, 5, 17, 64, 64, 301, 1400, 1400, 8900 if bits(4) == 0 else 40))
        return Frame(
            destination=self._text(MACS),
            tos=self._pick((0x80, 0x80, 0x83, 0xFC)),
            options=(b"", b"", TIMESTAMPS)[self._below(3)] + self._tag(),
            flags=0x10 | bits(12) if bits(2) == 0 else 0x18,
            numbers=(bits(32), bits(32), bits(16), bits(16)),
            payload=self._bytes(size),
        )

    def _not_quite_tagged(self) -> bytes:
        frame, below = self._tagged(), self._below
        changes: list[dict[str, object]] = [
            {"tos": self._pick((0, 0x7C))},
            {"options": self._tag() + TIMESTAMPS},
            {"options": b"\1" * 4 * below(11)},
            {"payload": b""},
            {"addresses": (RANK_IP, self._text(ADDRESSES))},
            {"total_length": below(200)},
            {"fragment": self._pick((0x2000, 1, 0x8000, 0xFFFF))},
            {"version_words": self._pick((0x44, 0x46, 0x4F, 0x55, 0))},
            {"data_offset": below(16)},
            {"protocol": self._pick((17, 1, 255))},
        ]
        return replace(frame, **changes[below(len(changes))]).encode()  # type: ignore[arg-type]

    def _to_stub(self) -> bytes:
        source = self._text([*CLIENTS.values(), "10.1.0.9", RANK_IP, "10.3.0.1"])
        flags = self._pick(STUB_FLAGS)
        return Frame(
            tos=self._pick((0, 0, 0, 0x80)),
            addresses=(source, STUB_IP),
            options=(b"", TIMESTAMPS, self._tag())[self._below(3)],
            flags=flags,
            numbers=(self._random.getrandbits(32), 0, 65535, 0),
            payload=b"" if self._below(2) else self._bytes(40),
        ).encode()

    def _arp(self) -> bytes:
        frame = bytearray(
            Frame(
                destination=self._text(MACS),
                ether_type=0x0806,
                arp=(self._pick((1, 1, 1, 2, 0)), self._text([STUB_IP, STUB_IP, "10.0.0.2"])),
            ).encode()
        )
        frame[28:32] = number(self._text([*CLIENTS.values(), "10.3.0.1", *ADDRESSES, "0.0.0.0"])).to_bytes(
            4, "big"
        )
        frame[-4:] = self._bytes(4)
        return bytes(frame)

    def _foreign(self) -> bytes:
        source = self._text([STUB_IP, OTHER_STUB_IP, RANK_IP, "10.0.0.7", "0.0.0.0", "255.255.255.255"])
        return replace(self._tagged(), addresses=(source, self._text(ADDRESSES))).encode()

    def _vlan(self) -> bytes:
        frame = (self._to_stub, self._arp, self._foreign, lambda: self._tagged().encode())[self._below(4)]()
        control = self._pick((0, 0, 0xE000, 1, 100, 0x6064, 0xFFFF))
        tag = struct.pack("!HH", VLAN_TYPES[self._below(2)], control)
        return frame[:12] + tag * (1 + (self._below(8) == 0)) + frame[12:]

    def _untagged(self) -> bytes:
        destination = number(self._text(MACS)).to_bytes(6, "big")
        kind = self._pick((0x86DD, 0x88B5, 0x88CC, 0x0800, 0x0806, 0x0042))
        return destination + self._bytes(6) + kind.to_bytes(2, "big") + self._bytes(self._below(200))

    def _with_flipped_bits(self) -> bytes:
        frame = bytearray(self._any())
        for _ in range(self._pick((1, 1, 2, 5))):
            frame[self._below(min(len(frame), 90))] ^= 1 << self._below(8)
        return bytes(frame)

    def _truncated(self) -> bytes:
        frame = self._any()
        return frame[: SHORTEST + self._below(min(len(frame), 120) - SHORTEST)]

    def _any(self) -> bytes:
        return (self._to_stub, self._arp, lambda: self._tagged().encode())[self._pick((0, 1, 2, 2))]()
