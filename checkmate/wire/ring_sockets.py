"""Ports and buffers of the ring's TCP sockets, which hosts must have room for."""

from __future__ import annotations

from typing import Final

RING_PORT: Final = 47000
"""Port of channel 0; channel c uses this plus c."""
HOST_PORT: Final = 46000
"""The first port of rings within a host, of which each rank has two."""
HOST_PORTS: Final = 2
REPAIR_PORT: Final = 45000
"""The first port of repairs, of which each rank has one."""
BUFFER_BYTES: Final = 4 << 20
"""Of each connection's send and receive buffer: a few slices, as the next one is copied during sending."""
