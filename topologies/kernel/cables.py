"""The cables of a lab: the management network and the training network, between existing namespaces."""

from __future__ import annotations

from functools import partial

from topologies.describe.topology import CABLES, CONTROLLER, DATA_NET, MGMT_NET, Host, SwitchNode, Topology
from topologies.kernel import links, loss
from topologies.kernel.namespaces import name_of


def management(lab: str, topology: Topology) -> None:
    """Connect each switch and host to the bridge beside the controller."""
    controller = name_of(lab, CONTROLLER)
    links.add_bridge(controller, MGMT_NET[1], MGMT_NET)
    members: list[SwitchNode | Host] = [*topology.switches, *topology.hosts]
    for node in members:
        links.join_bridge(controller, node.name, name_of(lab, node.name), node.mgmt, MGMT_NET)


def training(lab: str, topology: Topology, mtu: int, *, cut: bool = False, offload: bool = True) -> None:
    """Connect each NIC to its switch, and the switches to each other; without `offload`, offloads are off.

    With `cut`, each rank's cable has two pieces, both of which end in the namespace of the cables.
    """
    connect = partial(links.add_cable, mtu=mtu, offload=offload)
    for host in topology.hosts:
        own = name_of(lab, host.name)
        for nic in host.interfaces:
            there, port = name_of(lab, nic.switch), f"port{nic.port}"
            if cut and host.role == "rank":
                inside, near, far = name_of(lab, CABLES), *cut_ends(host)
                connect(inside, far, there, port)
                there, port = inside, near
            connect(there, port, own, nic.name, far_mac=nic.mac)
            links.set_address(own, nic.name, nic.ip, DATA_NET)
    for link in topology.links:
        (a, a_port), (b, b_port) = link.a, link.b
        connect(name_of(lab, a), f"port{a_port}", name_of(lab, b), f"port{b_port}")


def cut_ends(rank: Host) -> tuple[str, str]:
    """Return the interface names where a rank's cable is cut: towards the host, towards the switch."""
    return f"host{rank.number}", f"switch{rank.number}"


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
