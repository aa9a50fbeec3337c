"""Free TCP ports for listeners on loopback."""

from __future__ import annotations

import os
import random
import socket
import threading
from typing import Final

_PORTS: Final = range(10_000, 32_000)
"""Below those that kernels give to connections, so that none takes a port before its listener does."""
_WORKERS: Final = 10
"""Each of pytest-xdist's has a share of them, because a node that restarts binds the same port again."""
_CHANCE: Final = random.SystemRandom()
"""Processes beside each other must not begin at the same port, whatever seeds `random`."""


class _Ports:
    """A walk through one worker's share, so that a process gets no port twice until all have been used."""

    def __init__(self) -> None:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
        share = len(_PORTS) // _WORKERS
        self._share = _PORTS[worker * share : (worker + 1) * share]
        self._at = _CHANCE.randrange(share)
        self._lock = threading.Lock()

    def take(self, count: int) -> range:
        """Return the next ports in a row."""
        with self._lock:
            if self._at + count > len(self._share):
                self._at = 0
            ports = self._share[self._at : self._at + count]
            self._at += count
            return ports


_ports: Final = _Ports()


def free_port(count: int = 8) -> int:
    """Return the first of some ports in a row that are free on all addresses, given to nobody else here."""
    while True:
        ports = _ports.take(count)
        if all(_is_free(port) for port in ports):
            return ports[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
