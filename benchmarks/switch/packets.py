"""Packet rates: frames of 1,500 bytes through each target: plain, tagged and flooded, in turn.

A closed loop keeps a few dozen frames inside the switch, so that nothing is dropped and the switch sets the
pace. The same program forwards plain frames. A tagged frame leaves twice, once rewritten. A flooded frame
also leaves twice, but is only replicated, which shows the cost of the target's own replication.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.figures import Figure, Result, Skipped, ratios
from softswitch.frames.afpacket import ETH_P_ALL

TITLE = "Packet by packet: frames of 1,500 bytes, closed loop, one shadow copy of each tagged frame"
ROUNDS, SECONDS = 9, 0.8
WINDOW = 48
"""Frames inside the switch: fewer than the 64 of a BMv2 queue."""
COPIES = {"plain": 1, "tagged": 2, "flooded": 2}
"""Number of outputs per frame, by mode."""
_UNKNOWN_MAC = "02:00:00:00:00:99"


@dataclass
class Measurement:
    """One mode, round by round."""

    rates: list[float] = field(default_factory=list)
    """Received frames per second whose outputs all arrived."""
    costs: list[float] = field(default_factory=list)
    """The switch's processor time per such frame in microseconds, including the kernel's."""


def _packets_per_second(out: socket.socket, taps: list[socket.socket], frame: bytes, seconds: float) -> float:
    """Send `frame` repeatedly; it counts when it has arrived at every tap."""
    counts = [0] * len(taps)
    sent_count = 0
    buffer = bytearray(2048)
    poller = select.poll()
    for tap in taps:
        poller.register(tap, select.POLLIN)
    start = now = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        while sent_count - min(counts) < WINDOW:
            out.send(frame)
            sent_count += 1
        poller.poll(10)  # do not spin: the switch needs the processor
        for index, tap in enumerate(taps):
            counts[index] += _drain(tap, buffer)
    if min(counts) == 0:
        raise RuntimeError("the switch sends no frames")
    return min(counts) / (now - start)


def worker(target: str) -> None:
    """Measure in a separate process, which enters its own network namespace."""
    from controlplane import forwarding, replication, streams  # noqa: PLC0415
    from controlplane.entities import FLOOD_GROUP, Entity, MulticastGroup  # noqa: PLC0415
    from controlplane.p4runtime.codec import Codec  # noqa: PLC0415
    from ptf_tests import packets  # noqa: PLC0415
    from ptf_tests.stage import namespace  # noqa: PLC0415
    from ptf_tests.stage.targets import SwitchProcess  # noqa: PLC0415
    from ptf_tests.switch import PtfSwitch  # noqa: PLC0415

    namespace.enter()
    trainer, peer, shadow = packets.TRAINER_PORT, packets.PEER_PORT, packets.SHADOW_PORTS[0]
    ports = (trainer, peer, shadow)
    namespace.add_links([(f"sw{port}", f"host{port}") for port in ports])
    process = SwitchProcess(target, 0, {port: f"sw{port}" for port in ports})
    try:
        switch = PtfSwitch(process.address, process.device_id, Codec.for_target(target))
        key = (packets.BOUNDARY, 0, 0, 1)
        switch.connect(lambda: process.has_ended)
        switch.set_pipeline()
        entities: list[Entity] = [
            forwarding.forward(packets.PEER_MAC, peer),
            MulticastGroup(FLOOD_GROUP, frozenset({(peer, 0), (shadow, 0)})),
            replication.mark(packets.DSCP_BIT),
            MulticastGroup(2, frozenset({(peer, 0), (shadow, 1)})),
            replication.enter(trainer, packets.TRAINER_IP, packets.PEER_IP, boundary=packets.BOUNDARY),
            replication.replicate(packets.BOUNDARY, 0, 0, group=2),
            streams.rewrite(key, 1, packets.Shadow(0).connection(), packets.STUB),
        ]
        switch.put(entities)
        plain = packets.TaggedSegment(payload=bytes(1500 - 40), dscp=0)
        frames = {
            "plain": plain.frame(),
            "tagged": packets.TaggedSegment(options=packets.tag(), payload=bytes(1500 - 56)).frame(),
            "flooded": replace(plain, destination_mac=_UNKNOWN_MAC).frame(),
        }
        measurements = _measure([_raw(f"host{port}") for port in ports], process.pid, frames)
        json.dump({mode: asdict(measured) for mode, measured in measurements.items()}, sys.stdout)
    finally:
        process.stop()


def _measure(hosts: list[socket.socket], pid: int, frames: dict[str, bytes]) -> dict[str, Measurement]:
    """Measure all modes in turn, in reverse order in every other round."""
    out, *taps = hosts
    measurements = {mode: Measurement() for mode in frames}
    for turn in range(-1, ROUNDS):
        for mode in list(frames)[:: -1 if turn % 2 else 1]:
            processor_time, start = -_processor_time(pid), time.monotonic()
            rate = _packets_per_second(out, taps[: COPIES[mode]], frames[mode], SECONDS)
            processor_time += _processor_time(pid)
            elapsed = time.monotonic() - start
            if turn >= 0:  # round 0 is the warm-up
                measurements[mode].rates.append(rate)
                measurements[mode].costs.append(processor_time / (rate * elapsed) * 1e6)
            _settle(taps)
    return measurements


def _processor_time(pid: int) -> float:
    """Return the processor time of all threads of a process so far, in seconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")  # in nanoseconds; `stat` only has ticks
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _raw(interface: str) -> socket.socket:
    packet_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # receives nothing until bind
    packet_socket.bind((interface, ETH_P_ALL))
    packet_socket.setblocking(False)
    return packet_socket


def _drain(tap: socket.socket, buffer: bytearray) -> int:
    """Read all waiting frames; return their number."""
    count = 0
    while True:
        try:
            tap.recv_into(buffer)
        except BlockingIOError:
            return count
        count += 1


def _settle(taps: list[socket.socket]) -> None:
    """Discard the frames that are still inside the switch."""
    time.sleep(0.2)
    for tap in taps:
        _drain(tap, bytearray(2048))


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("packets", "needs root, for a network namespace")]
    measurements = {"softswitch": _run("softswitch")}
    results: list[Result] = []
    if shutil.which("simple_switch_grpc"):
        measurements["bmv2"] = _run("bmv2")
        results += _shares(measurements["bmv2"])
        results += [
            Figure(
                f"softswitch / BMv2, {mode}",
                ratios(measurements["softswitch"][mode].rates, measurements["bmv2"][mode].rates),
                "",
                floor=0.2,
            )
            for mode in ("plain", "tagged")
        ]
    else:
        results.append(Skipped("BMv2 beside it", "simple_switch_grpc is not on PATH"))
    for target, modes in measurements.items():
        results += [
            Figure(f"{target}, {mode}", tuple(measured.rates), "packets/s")
            for mode, measured in modes.items()
        ]
    return results


def _shares(bmv2: dict[str, Measurement]) -> list[Result]:
    """Return the rate of tagged frames relative to plain ones, counted at output and at input."""
    plain, tagged, flooded = (bmv2[mode] for mode in ("plain", "tagged", "flooded"))
    received_share = ratios(tagged.rates, plain.rates)
    cost = ratios(plain.costs, tagged.costs)
    return [
        Figure("BMv2, tagged / plain, packets sent", _double(received_share), "", 0.9, 0.7),
        Figure("the same by the switch's processor time", _double(cost), ""),
        Figure("BMv2, tagged / plain, packets received", received_share, "", note="each leaves twice"),
        Figure(
            "BMv2, flooded / plain, packets received",
            ratios(flooded.rates, plain.rates),
            "",
            note="its own replication to two ports, nothing rewritten",
        ),
    ]


def _double(shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(2 * share for share in shares)


def _run(target: str) -> dict[str, Measurement]:
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.switch.packets", target],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"the benchmark on {target} failed: {process.stderr}")
    return {mode: Measurement(**fields) for mode, fields in json.loads(process.stdout).items()}


if __name__ == "__main__":
    worker(sys.argv[1])
