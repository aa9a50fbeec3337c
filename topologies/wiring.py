"""A lab's cables, once its namespaces are there: the management network, and the training network."""

from __future__ import annotations

from topologies import links, loss, offloads
from topologies.describe import CONTROLLER, DATA_NET, MGMT_NET, Host, SwitchNode, Topology
from topologies.namespaces import name_of


def management(lab: str, topology: Topology) -> None:
    """Cable each switch and host to the bridge beside the controller."""
    controller = name_of(lab, CONTROLLER)
    links.add_bridge(controller, MGMT_NET[1], MGMT_NET)
    members: list[SwitchNode | Host] = [*topology.switches, *topology.hosts]
    for node in members:
        links.join_bridge(controller, node.name, name_of(lab, node.name), node.mgmt, MGMT_NET)


def training(lab: str, topology: Topology, mtu: int) -> None:
    """Cable each NIC to its switch, and the switches to each other."""
    for host in topology.hosts:
        for nic in host.interfaces:
            links.connect(name_of(lab, host.name), name_of(lab, nic.switch), nic, DATA_NET, mtu)
    for link in topology.links:
        (a, a_port), (b, b_port) = link.a, link.b
        links.add_cable(name_of(lab, a), f"port{a_port}", name_of(lab, b), f"port{b_port}", mtu=mtu)


def switch_offloads_off(lab: str, topology: Topology) -> None:
    """On both ends of every cable of the training network."""
    for host in topology.hosts:
        for nic in host.interfaces:
            offloads.switch_off(name_of(lab, host.name), nic.name)
    for switch in topology.switches:
        for port in range(1, switch.ports + 1):
            offloads.switch_off(name_of(lab, switch.name), f"port{port}")


def lose(lab: str, topology: Topology, share: float) -> str | None:
    """Lose frames both ways on each rank's cable; by what. Shadow links lose nothing, as PFC promises."""
    by = None
    for host in topology.ranks:
        for nic in host.interfaces:
            loss.add(name_of(lab, host.name), nic.name, share)
            by = loss.add(name_of(lab, nic.switch), f"port{nic.port}", share)
    return by
