"""Feature `forwarding`: entries from the jobs' hosts, the switches' stubs and the links.

Data plane: p4src/include/forwarding.p4. Packet tests: ptf_tests/forwarding.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.entities import FLOOD_GROUP, MulticastGroup, TableEntry, mac_number
from controlplane.network import Network


def forward(mac: str, port: int) -> TableEntry:
    """Return the entry that sends frames to `mac` out of `port`."""
    return TableEntry("forwarding", (("mac", mac_number(mac)),), "forward", (("port", port),))


def discard(mac: str) -> TableEntry:
    """Return the entry that drops frames to `mac`, unless another feature has handled them."""
    return TableEntry("forwarding", (("mac", mac_number(mac)),), "discard")


def flood_group(ports: set[int]) -> MulticastGroup:
    """Return the group for broadcasts and unknown addresses; the program never sends a frame back."""
    return MulticastGroup(FLOOD_GROUP, frozenset((port, 0) for port in ports))


def shadow_macs(network: Network) -> frozenset[int]:
    """Return the MAC addresses to which copies go."""
    nodes = (node for job in network.jobs for node in job.shadow_nodes)
    return frozenset(mac_number(nic.mac) for node in nodes for nic in node.nics)


def entries(network: Network, switch: str) -> Iterator[TableEntry | MulticastGroup]:
    """Yield the entries by which `switch` forwards between all hosts and stubs of the jobs."""
    ports = set(network.tree_ports(switch))
    for host in network.interfaces:
        port = network.port_towards(switch, host)
        if port is not None:
            yield forward(host.mac, port)
        if host.switch == switch:
            ports.add(host.port)
    for name, peer in network.switches.items():
        if name == switch:
            # Frames that the feature `stub` does not handle, such as a ping, have no port to leave by.
            yield discard(peer.stub.mac)
        elif (port := network.port_to_switch(switch, name)) is not None:
            yield forward(peer.stub.mac, port)
    yield flood_group(ports)
