"""Free TCP ports for listeners on loopback."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

_PORTS: Final = range(10_000, 32_000)
"""Below those that kernels give to connections, so that none takes a port before its listener does."""
_WORKERS: Final = 10
"""Each of pytest-xdist's has a share of them, because a node that restarts binds the same port again."""
_CHANCE: Final = random.SystemRandom()
"""Processes beside each other must not draw the same ports, whatever seeds `random`."""


def free_port(count: int = 8) -> int:
    """Return the first of some ports in a row that are free on all addresses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    share = len(_PORTS) // _WORKERS
    own = _PORTS[worker * share : (worker + 1) * share - count]
    while True:
        first = _CHANCE.choice(own)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
