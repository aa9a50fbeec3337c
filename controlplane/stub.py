"""Feature `stub`: entries that send the traffic of the stub TCP server to the controller.

`controlplane.endpoint` answers it.
Data plane: p4src/include/stub.p4. Packet tests: ptf_tests/stub.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

from controlplane.entities import TableEntry
from controlplane.network import Network


def punt(address: IPv4Address) -> tuple[TableEntry, TableEntry]:
    """Return the entries that send segments to `address`, except plain ACKs, and its ARP requests here."""
    key = (("address", int(address)),)
    return TableEntry("stub", key, "punt_segment"), TableEntry("stub_arp", key, "punt_arp")


def entries(network: Network, switch: str) -> Iterator[TableEntry]:
    """Yield the entries of the switch's own stub."""
    yield from punt(network.switches[switch].stub.ip)
