"""A Tofino, or its model, that a file describes: the same entries and frames as for the embedded target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from controlplane.entities import Entity, Holdings
from controlplane.p4runtime.codec import Codec
from ptf_tests.stage.config import read_config
from ptf_tests.switch import CounterValue, PtfSwitch
from softswitch.program.state import State
from tests.softswitch.support import cables
from tests.softswitch.support.bmv2_entities import updates
from tests.softswitch.support.scenarios import CPU_PORT

SHORTEST = 60
"""Bytes of a frame on the wire at least, without its check sequence."""
CHECK_SEQUENCE = 4
ANSWER_S = 120.0
TAG_PREFIX, TIMESTAMPS_PREFIX = bytes.fromhex("fd10c4ec"), bytes.fromhex("0101080a")


def parsed_bytes(frame: bytes) -> int:
    """Return the number of bytes that the program's parser extracts or compares, from Ethernet on."""
    kind = frame[12:14]
    if kind == b"\x08\x06":
        return 42
    if kind in (b"\x81\x00", b"\x88\xa8"):
        return 16
    if kind != b"\x08\x00":
        return 14
    fragment = int.from_bytes(frame[20:22], "big") & 0x3FFF
    if frame[14] != 0x45 or fragment or frame[23] != 6:
        return 34
    words = frame[46] >> 4
    if words not in (9, 12):
        return 54
    option = 54
    if words == 12:
        if frame[54:58] != TIMESTAMPS_PREFIX:
            return 66
        option = 66
    return option + (16 if frame[option : option + 4] == TAG_PREFIX else 4)


def on_the_wire(frame: bytes) -> bytes:
    """Return a frame as long as Ethernet's shortest, whose headers do not end inside the check sequence."""
    frame = frame.ljust(SHORTEST, b"\0")
    least = parsed_bytes(frame)
    return frame.ljust(least, b"\0") if len(frame) + CHECK_SEQUENCE >= least else frame


def ends_in_header(frame: bytes) -> bool:
    """Return whether a chip's parser drops the frame."""
    return len(frame) < parsed_bytes(frame)


def entities(state: State) -> list[Entity]:
    """Return a state of the embedded target by names."""
    codec = Codec.for_target("bmv2")
    decoded = [codec.decode(update.entity) for update in updates(state)]
    return [entity for entity in decoded if entity is not None]


class Chip:
    """A running switch with entries; ports are the packet suites' numbers."""

    def __init__(self, switch: PtfSwitch, interfaces: dict[int, str]) -> None:
        self.switch = switch
        self._sockets = {port: cables.open_cable(interface) for port, interface in interfaces.items()}

    def exchange(
        self, port: int, frames: Sequence[bytes], last: dict[int, list[bytes]]
    ) -> dict[int, list[bytes]]:
        """Send frames into a port; return each port's output, up to the `last` frames expected there.

        Raises `TimeoutError` if one of these does not arrive.
        """
        for frame in frames:
            self._sockets[port].send(frame)
        came: dict[int, list[bytes]] = {where: [] for where in (*self._sockets, CPU_PORT)}
        deadline = time.monotonic() + ANSWER_S
        for where, expected in last.items():
            waiting = Counter(expected)
            while waiting.total():
                observed = self._next(where, deadline - time.monotonic())
                if observed is None:
                    raise TimeoutError(f"port {where}: {len(came[where])} frames came, without {waiting}")
                came[where].append(observed)
                waiting -= Counter([observed])
        for where in set(came) - set(last):
            while (more := self._next(where, 0)) is not None:
                came[where].append(more)
        return came

    def _next(self, port: int, timeout: float) -> bytes | None:
        if port != CPU_PORT:
            return cables.receive(self._sockets[port], timeout)
        punted = self.switch.next_punted(max(timeout, 0.001))
        return None if punted is None else punted.ingress_port.to_bytes(2, "big") + punted.frame

    def counts(self, names: Sequence[str]) -> dict[str, list[CounterValue]]:
        """Return the cells of indexed counters."""
        return {name: self.switch.counts(name) for name in names}

    def close(self) -> None:
        """Leave the switch without entries."""
        self.switch.reconcile(Holdings())
        self.switch.close()
        for cable in self._sockets.values():
            cable.close()


@contextmanager
def running(file: Path, entities_held: Sequence[Entity], ports: Sequence[int]) -> Iterator[Chip]:
    """Yield the switch that a file describes, with these entries."""
    config = read_config(file)
    codec = Codec.for_target(config.target, config.p4runtime, config.cpu_port)
    switch = PtfSwitch(config.address, config.device_id, codec, config.device_ports)
    switch.connect(lambda: False)
    switch.take_over()
    switch.reconcile(Holdings.from_entities(entities_held))
    chip = Chip(switch, {port: config.ports[port].interface for port in ports})
    try:
        yield chip
    finally:
        chip.close()
