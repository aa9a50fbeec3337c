"""The cables of a lab: the management network and the training network, between existing namespaces."""

from __future__ import annotations

from topologies.describe.topology import CABLES, CONTROLLER, DATA_NET, MGMT_NET, Host, SwitchNode, Topology
from topologies.kernel import links, loss, offloads
from topologies.kernel.namespaces import name_of


def management(lab: str, topology: Topology) -> None:
    """Connect each switch and host to the bridge beside the controller."""
    controller = name_of(lab, CONTROLLER)
    links.add_bridge(controller, MGMT_NET[1], MGMT_NET)
    members: list[SwitchNode | Host] = [*topology.switches, *topology.hosts]
    for node in members:
        links.join_bridge(controller, node.name, name_of(lab, node.name), node.mgmt, MGMT_NET)


def training(lab: str, topology: Topology, mtu: int, *, cut: bool = False) -> None:
    """Connect each NIC to its switch, and the switches to each other.

    With `cut`, each rank's cable has two pieces, both of which end in the namespace of the cables.
    """
    for host in topology.hosts:
        for nic in host.interfaces:
            there, port = name_of(lab, nic.switch), f"port{nic.port}"
            if cut and host.role == "rank":
                inside, near, far = name_of(lab, CABLES), *cut_ends(host)
                links.add_cable(inside, far, there, port, mtu=mtu)
                there, port = inside, near
            links.connect(name_of(lab, host.name), there, port, nic, DATA_NET, mtu)
    for link in topology.links:
        (a, a_port), (b, b_port) = link.a, link.b
        links.add_cable(name_of(lab, a), f"port{a_port}", name_of(lab, b), f"port{b_port}", mtu=mtu)


def cut_ends(rank: Host) -> tuple[str, str]:
    """Return the interface names where a rank's cable is cut: towards the host, towards the switch."""
    return f"host{rank.number}", f"switch{rank.number}"


def switch_offloads_off(lab: str, topology: Topology, *, cut: bool = False) -> None:
    """Switch offloads off at both ends of every cable of the training network."""
    for host in topology.hosts:
        for nic in host.interfaces:
            offloads.switch_off(name_of(lab, host.name), nic.name)
        if cut and host.role == "rank":
            for end in cut_ends(host):
                offloads.switch_off(name_of(lab, CABLES), end)
    for switch in topology.switches:
        for port in range(1, switch.ports + 1):
            offloads.switch_off(name_of(lab, switch.name), f"port{port}")


def lose(lab: str, topology: Topology, share: float) -> str | None:
    """Drop frames in both directions on each rank's cable; return the mechanism.

    Links to shadow nodes are lossless, as with PFC.
    """
    by = None
    for host in topology.ranks:
        for nic in host.interfaces:
            loss.add(name_of(lab, host.name), nic.name, share)
            by = loss.add(name_of(lab, nic.switch), f"port{nic.port}", share)
    return by
