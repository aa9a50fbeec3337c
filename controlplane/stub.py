"""Feature `stub`: entries that send the traffic of the stub TCP server to the controller.

`controlplane.endpoint` answers it.
Data plane: p4src/include/stub.p4. Packet tests: ptf_tests/stub.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Final

from controlplane.entities import PortRate, Rate, TableEntry
from controlplane.network import Network

PORTS: Final = 512
"""Cells of the meter `stranger_rate` (`PORTS` in the P4 source)."""
STRANGER_RATE: Final = Rate(packets=50, burst=100)
"""Rate of all strangers of a port together: enough to report a misconfigured node."""
CLIENT_RATE: Final = Rate(packets=500, burst=2_000)
"""Rate of one shadow NIC, which may open many streams at once: each takes three packets.

It leaves the controller time for other NICs, if this one floods.
"""


def punt(address: IPv4Address) -> tuple[TableEntry, TableEntry]:
    """Return the entries that send segments to `address`, except plain ACKs, and its ARP requests here."""
    key = (("address", int(address)),)
    return TableEntry("stub", key, "punt_segment"), TableEntry("stub_arp", key, "punt_arp")


def client(port: int, address: IPv4Address) -> TableEntry:
    """Return the entry that gives a shadow NIC, behind `port`, a rate of its own."""
    key = (("port", port), ("address", int(address)))
    return TableEntry("clients", key, "meter_client", rate=CLIENT_RATE)


def entries(network: Network, switch: str) -> Iterator[TableEntry | PortRate]:
    """Yield the entries of the switch's own stub, and the limits of its clients and of strangers."""
    yield from punt(network.switches[switch].stub.ip)
    for port in range(PORTS):
        yield PortRate(port, STRANGER_RATE)
    for stream in network.streams:
        if stream.boundary.switch == switch:
            port_of_nic = network.arrival_port(switch, stream.nic)
            assert port_of_nic is not None  # `checkmate.job.checks` refuses a job whose parts no link joins
            yield client(port_of_nic, stream.nic.ip)
