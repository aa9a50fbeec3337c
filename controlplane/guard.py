"""Feature `guard`: the source addresses that each port may send.

Data plane: p4src/include/guard.p4. Packet tests: ptf_tests/guard.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

from controlplane.entities import TableEntry
from controlplane.network import Network


def permit(port: int, address: IPv4Address) -> TableEntry:
    """Return the entry that lets frames from `address` in at `port`."""
    return TableEntry("sources", (("port", port), ("address", int(address))), "permit")


def host_port(port: int) -> TableEntry:
    """Return the entry by which a port accepts no other addresses than the permitted ones."""
    return TableEntry("guarded_ports", (("port", port),), "host_port")


def link_port(port: int) -> TableEntry:
    """Return the entry for a port to another switch: hosts of any job may be behind it."""
    return TableEntry("guarded_ports", (("port", port),), "link_port")


def refuse(address: IPv4Address, *, from_link: bool) -> TableEntry:
    """Return the entry that refuses an address at links, or at ports of no job, unless it is permitted."""
    return TableEntry(
        "guarded_addresses", (("address", int(address)), ("from_link", int(from_link))), "refuse"
    )


def entries(network: Network, switch: str) -> Iterator[TableEntry]:
    """Yield the switch's entries: a host is behind its own port, a stub behind the links on its paths."""
    for host in network.hosts:
        for address in host.sources:
            yield refuse(address, from_link=False)
            if host.switch == switch:
                yield permit(host.port, address)
        if host.switch == switch:
            yield host_port(host.port)
    for port in network.links(switch):
        yield link_port(port)
    for name, other in network.switches.items():
        yield refuse(other.stub.ip, from_link=False)
        yield refuse(other.stub.ip, from_link=True)
        for port in network.stub_ports(switch, name):
            yield permit(port, other.stub.ip)
