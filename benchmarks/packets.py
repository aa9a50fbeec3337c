"""Packet by packet: frames of 1,500 bytes through each target, tagged and plain, in turn.

A closed loop keeps a few dozen frames inside the switch, so that nothing is dropped and the switch sets the
pace. Plain frames are forwarded by the same program; a tagged one leaves twice.
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

from benchmarks.figures import Figure, Result, Skipped, ratios

TITLE = "Packet by packet: frames of 1,500 bytes, closed loop, one shadow copy each where tagged"
ROUNDS, SECONDS = 5, 1.5
WINDOW = 48
"""Frames inside the switch: below BMv2's 64 a queue."""
MODES = ("plain", "tagged")


def _packets_per_second(out: socket.socket, taps: list[socket.socket], frame: bytes, seconds: float) -> float:
    """Send `frame` again and again; a frame counts once it has come out at every tap."""
    counts = [0] * len(taps)
    sent = 0
    buffer = bytearray(2048)
    poller = select.poll()
    for tap in taps:
        poller.register(tap, select.POLLIN)
    start = now = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        while sent - min(counts) < WINDOW:
            out.send(frame)
            sent += 1
        poller.poll(10)  # rather than to spin: the switch needs the processor
        for index, tap in enumerate(taps):
            counts[index] += _drain(tap, buffer)
    if min(counts) == 0:
        raise RuntimeError("nothing comes out of the switch")
    return min(counts) / (now - start)


def worker(target: str) -> None:
    """Runs in a process of its own, which goes into a network namespace of its own."""
    from controlplane import forwarding, replication, streams  # noqa: PLC0415
    from controlplane.codec import Codec  # noqa: PLC0415
    from controlplane.entities import Entity, Group  # noqa: PLC0415
    from ptf_tests import namespace, packets  # noqa: PLC0415
    from ptf_tests.switch import Switch  # noqa: PLC0415
    from ptf_tests.targets import Process  # noqa: PLC0415

    namespace.enter()
    trainer, peer, shadow = packets.TRAINER_PORT, packets.PEER_PORT, packets.SHADOW_PORTS[0]
    ports = (trainer, peer, shadow)
    namespace.add_links([(f"sw{port}", f"host{port}") for port in ports])
    process = Process(target, 0, {port: f"sw{port}" for port in ports})
    try:
        switch = Switch(process.address, process.device_id, Codec.for_target(target))
        key = (packets.BOUNDARY, 0, 0, 1)
        switch.connect(lambda: process.ended)
        switch.set_pipeline()
        entities: list[Entity] = [
            forwarding.forward(packets.PEER_MAC, peer),
            replication.mark(packets.DSCP_BIT),
            Group(2, frozenset({(peer, 0), (shadow, 1)})),
            replication.replicate(
                packets.TRAINER_IP, packets.PEER_IP, 0, 0, group=2, boundary=packets.BOUNDARY
            ),
            streams.rewrite(key, 1, packets.Shadow(0).connection(), packets.STUB),
        ]
        switch.put(entities)
        out, *taps = (_raw(f"host{port}") for port in ports)
        payload = bytes(1500 - 20 - 36)
        tagged = packets.Segment(options=packets.tag(), payload=payload).frame()
        plain = packets.Segment(payload=bytes(1500 - 40), dscp=0).frame()
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            found["plain"].append(_packets_per_second(out, taps[:1], plain, SECONDS))
            _settle(taps)
            found["tagged"].append(_packets_per_second(out, taps, tagged, SECONDS))
            _settle(taps)
        json.dump(found, sys.stdout)
    finally:
        process.stop()


def _raw(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    made.bind((interface, 0))
    made.setblocking(False)
    return made


def _drain(tap: socket.socket, buffer: bytearray) -> int:
    """Take every frame that is there; how many."""
    count = 0
    while True:
        try:
            tap.recv_into(buffer)
        except BlockingIOError:
            return count
        count += 1


def _settle(taps: list[socket.socket]) -> None:
    """Let what is inside the switch come out, and throw it away."""
    time.sleep(0.2)
    for tap in taps:
        _drain(tap, bytearray(2048))


def measure() -> list[Result]:
    """Every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("packets", "needs root, for a network namespace")]
    found = {"softswitch": _run("softswitch")}
    results: list[Result] = []
    if shutil.which("simple_switch_grpc"):
        bmv2 = found["bmv2"] = _run("bmv2")
        segments = ratios(bmv2["tagged"], bmv2["plain"])
        frames = tuple(2 * ratio for ratio in segments)
        results += [
            Figure("BMv2, tagged / plain, packets received", segments, "", 0.9, 0.7),
            Figure("BMv2, tagged / plain, packets sent", frames, "", note="two leave for each tagged one"),
        ]
        results += [
            Figure(f"softswitch / BMv2, {m}", ratios(found["softswitch"][m], bmv2[m]), "", floor=0.2)
            for m in MODES
        ]
    else:
        results.append(Skipped("BMv2 beside it", "simple_switch_grpc is not on PATH"))
    for target, rates in found.items():
        results += [Figure(f"{target}, {mode}", tuple(rates[mode]), "packets/s") for mode in MODES]
    return results


def _run(target: str) -> dict[str, list[float]]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.packets", target], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the benchmark on {target} failed: {done.stderr}")
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    worker(sys.argv[1])
