"""Ports and buffers of the TCP sockets of ring and trees, which hosts must have room for."""

from __future__ import annotations

from typing import Final

RING_PORT: Final = 47000
"""Port of channel 0; channel c uses this plus c."""
HOST_PORT: Final = 46000
"""The first port of rings within a host, of which each rank has two."""
HOST_PORTS: Final = 2
REPAIR_PORT: Final = 45000
"""The first port of repairs, of which each rank has one."""
TREE_PORT: Final = 38000
"""The first port of trees, of which each rank has `TREE_PORTS`."""
TREE_CHANNEL_PORTS: Final = 6
"""In both trees: one for the parent, and two for children."""
TREE_PORTS: Final = 4 * TREE_CHANNEL_PORTS
"""The trees have at most 4 channels."""
BUFFER_BYTES: Final = 4 << 20
"""Of each connection's send and receive buffer: a few slices, as the next one is copied during sending."""
