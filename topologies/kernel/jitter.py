"""Jitter: `python -m topologies.kernel.jitter` forwards frames between interfaces after a random delay.

Each direction draws a new delay, between 0 and the given one, whenever the last delay has passed. Frames
never overtake one another, so a shorter delay means a burst, as from a queue that empties. This works without
`tc netem`, and is the same on all kernels. Segments of 64 KB are forwarded whole.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from checkmate.base.privileges import keep_only
from checkmate.wire.tcp import SO_RCVBUFFORCE

# linux/if_packet.h and linux/if_ether.h
_SOL_PACKET: Final = 263
_PACKET_VNET_HDR: Final = 15
_PACKET_IGNORE_OUTGOING: Final = 23
_ETH_P_ALL: Final = 3
_BUFFER: Final = 64 << 20
_FRAME_MAX: Final = 1 << 17
_BATCH: Final = 64
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


def seconds(text: str) -> float:
    """Return `5ms`, `500us`, `0.005s` or `0.005` in seconds.

    Raises:
        BadDescription: It is not a delay from 0 to 1 s.
    """
    from topologies.describe.topology import BadDescription  # noqa: PLC0415 - the process of the cables needs none of it

    number, unit = next((text.removesuffix(u), u) for u in _UNITS if text.endswith(u))
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise BadDescription(f"{text!r} is not a jitter; use a delay such as 5ms or 0.005, at most 1 s")
    return value


class Way:
    """One direction of a cable: the frames in it, and when each is due."""

    def __init__(self, source: socket.socket, destination: socket.socket, seconds: float) -> None:
        self._source, self._destination = source, destination
        self._seconds = seconds
        self._delay, self._drawn_at = 0.0, -math.inf
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float:
        """When the next frame is due; infinity if there is none."""
        return self._frames[0][0] if self._frames else math.inf

    def take(self, now: float) -> None:
        """Receive the frames that have arrived."""
        if now - self._drawn_at >= self._seconds:
            self._delay, self._drawn_at = random.uniform(0, self._seconds), now
        due = max(now + self._delay, self._frames[-1][0] if self._frames else 0.0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                self._frames.append((due, self._source.recv(_FRAME_MAX)))

    def give(self, now: float) -> None:
        """Send the frames that are due."""
        while self.due <= now:
            with contextlib.suppress(OSError):  # full, or down: a cable does not report that
                self._destination.send(self._frames.popleft()[1])


class Cables:
    """Pairs of interfaces in this namespace, between which frames are forwarded in both directions."""

    def __init__(self, pairs: Iterable[tuple[str, str]], seconds: float) -> None:
        """Open the interfaces; the longest delay is `seconds`."""
        self._ways: dict[socket.socket, Way] = {}
        for names in pairs:
            first, second = map(_open, names)
            self._ways |= {first: Way(first, second, seconds), second: Way(second, first, seconds)}

    def run_once(self) -> None:
        """Wait until a frame arrives or is due; receive new frames, and send those that are due."""
        next_frame = min(way.due for way in self._ways.values())
        pause = None if next_frame == math.inf else max(0.0, next_frame - time.monotonic())
        ready, _, _ = select.select(self._ways, (), (), pause)
        now = time.monotonic()
        for source in ready:
            self._ways[source].take(now)
        for way in self._ways.values():
            way.give(now)


def _open(name: str) -> socket.socket:
    """Return a packet socket with virtio-net headers, which are sent as they were received."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for option in (_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING):
        packets.setsockopt(_SOL_PACKET, option, 1)
    packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _BUFFER)
    packets.bind((name, _ETH_P_ALL))
    packets.setblocking(False)
    return packets


def main() -> int:
    """Run until killed; return 1 if an interface cannot be opened."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.kernel.jitter",
        description=__doc__,
        epilog="example: python -m topologies.kernel.jitter --seconds 0.005 host0:switch0 host1:switch1",
    )
    parser.add_argument("--seconds", type=float, required=True, help="the longest delay")
    parser.add_argument("pairs", nargs="+", help="two interfaces, as NAME:NAME")
    arguments = parser.parse_args()
    pairs = [tuple(pair.split(":")) for pair in arguments.pairs]
    if any(len(pair) != 2 for pair in pairs) or arguments.seconds < 0:
        parser.error("specify pairs of interfaces as NAME:NAME, and a delay of 0 or more")
    try:
        cables = Cables([(first, second) for first, second in pairs], arguments.seconds)
    except OSError as error:
        print(f"no cable: {error}", file=sys.stderr)
        return 1
    keep_only()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("ready", flush=True)
    while True:
        cables.run_once()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
