"""Feature `stub`: the pretended TCP server that shadow nodes connect to.

Entries that bring its traffic to the controller. Stateless up to a valid hello: what a stream's entry says
is all that is remembered. `stub_frames` has the frames that come and those that answer them.
Data plane: p4src/include/stub.p4. Packet tests: ptf_tests/stub.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

from controlplane.entities import TableEntry
from controlplane.network import Network


def punt(address: IPv4Address) -> tuple[TableEntry, TableEntry]:
    """Segments to `address`, plain ACKs apart, and ARP requests for it go to the controller."""
    key = (("address", int(address)),)
    return TableEntry("stub", key, "punt_segment"), TableEntry("stub_arp", key, "punt_arp")


def entries(network: Network, switch: str) -> Iterator[TableEntry]:
    """The switch's own stub."""
    yield from punt(network.switches[switch].stub.ip)
