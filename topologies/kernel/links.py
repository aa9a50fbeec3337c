"""Links, addresses and kernel settings of a namespace, over netlink and /proc/sys."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from pyroute2.ethtool.ioctl import IoctlEthtool

from topologies.describe.topology import CABLES, CONTROLLER, DATA_NET, MGMT_NET, LabHost, SwitchNode, Topology
from topologies.kernel import loss
from topologies.kernel.namespaces import entered, name_of, netlink

MGMT_BRIDGE: Final = "mgmt"
MGMT_INTERFACE: Final = "mgmt0"

_CONGESTION: Final = "net/ipv4/tcp_congestion_control"
_TWO_NICS: Final = {
    # Two NICs in one subnet: each answers for its own address only, and replies may arrive on either.
    "arp_ignore": "1",
    "arp_announce": "2",
    "rp_filter": "0",
}
_SETTINGS: Final = {
    _CONGESTION: "cubic",
    # Enough for 64 MB per stream, and for a ring over a switch with queues; the kernel adapts the default.
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 16777216",
    # Neighbour discovery would add noise to the switches' counters.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    **{f"net/ipv4/conf/all/{key}": value for key, value in _TWO_NICS.items()},
    **{f"net/ipv4/conf/default/{key}": value for key, value in _TWO_NICS.items()},
}
"""A namespace's sysctls by path below /proc/sys; they must be set before it gets links."""


def prepare(namespace: str) -> None:
    """Set a new namespace's sysctls, and bring its loopback interface up."""
    with netlink(namespace) as ip:
        for key, value in _SETTINGS.items():
            path = Path("/proc/sys", key)
            if key.startswith("net/ipv6") and not path.exists():
                continue  # a kernel without IPv6 needs no setting
            try:
                path.write_text(value)
            except PermissionError:
                # Only algorithms in the machine's tcp_allowed_congestion_control can be a namespace's
                # default; the ring sets cubic on each of its sockets anyway.
                if key != _CONGESTION:
                    raise
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")


def add_bridge(namespace: str, address: IPv4Address, subnet: IPv4Network) -> None:
    """Create the management network's bridge, with the controller's own address."""
    with netlink(namespace) as ip:
        ip.link("add", ifname=MGMT_BRIDGE, kind="bridge")
        index = ip.link_lookup(ifname=MGMT_BRIDGE)[0]
        ip.addr("add", index=index, address=str(address), prefixlen=subnet.prefixlen)
        ip.link("set", index=index, state="up")


def join_bridge(
    namespace: str, bridge_port: str, host: str, address: IPv4Address, subnet: IPv4Network
) -> None:
    """Connect a host's management interface to the bridge in `namespace`."""
    add_cable(namespace, bridge_port, host, MGMT_INTERFACE, mtu=1500)
    with netlink(namespace) as ip:
        bridge = ip.link_lookup(ifname=MGMT_BRIDGE)[0]
        ip.link("set", index=ip.link_lookup(ifname=bridge_port)[0], master=bridge)
    set_address(host, MGMT_INTERFACE, address, subnet)


def add_cable(
    here: str,
    port: str,
    there: str,
    far_port: str,
    *,
    mtu: int,
    far_mac: str | None = None,
    offload: bool = True,
) -> None:
    """Create a veth pair between two namespaces, up at both ends, without a trace in other namespaces."""
    far = {"ifname": far_port, "net_ns_fd": there, "mtu": mtu} | ({"address": far_mac} if far_mac else {})
    with netlink(here) as ip:
        ip.link("add", ifname=port, kind="veth", mtu=mtu, peer=far)
    for namespace, interface in ((here, port), (there, far_port)):
        with netlink(namespace) as ip:
            ip.link("set", index=ip.link_lookup(ifname=interface)[0], state="up")
        if not offload:
            switch_offloads_off(namespace, interface)


def set_address(namespace: str, interface: str, address: IPv4Address, subnet: IPv4Network) -> None:
    """Assign an address to an interface."""
    with netlink(namespace) as ip:
        index = ip.link_lookup(ifname=interface)[0]
        ip.addr("add", index=index, address=str(address), prefixlen=subnet.prefixlen)


def counters(namespace: str) -> dict[str, dict[str, int]]:
    """Return each interface's counters, with the kernel's names (rtnl_link_stats64)."""
    with netlink(namespace) as ip:
        return {
            link.get_attr("IFLA_IFNAME"): dict(link.get_attr("IFLA_STATS64") or {}) for link in ip.get_links()
        }


_OFFLOADS: Final = {
    "gro": "generic-receive-offload",
    "gso": "generic-segmentation-offload",
    "tso": "tcp-segmentation-offload",
    "rx checksums": "rx-checksumming",
    "tx checksums": "tx-checksumming",  # last: the others depend on it
}


def switch_offloads_off(namespace: str, interface: str) -> None:
    """Switch all offloads of an interface off."""
    with entered(namespace), closing(IoctlEthtool(interface)) as ethtool:
        for name in _OFFLOADS.values():
            ethtool.set_offload_flag(name, 0)


def offloads(namespace: str, interface: str) -> dict[str, bool]:
    """Return for each offload of an interface whether it is on."""
    with entered(namespace), closing(IoctlEthtool(interface)) as ethtool:
        flags = ethtool.get_offload_flags()
    return {offload: bool(flags[name]) for offload, name in _OFFLOADS.items()}


def connect_management(lab: str, topology: Topology) -> None:
    """Connect each switch and host to the bridge beside the controller."""
    controller = name_of(lab, CONTROLLER)
    add_bridge(controller, MGMT_NET[1], MGMT_NET)
    members: list[SwitchNode | LabHost] = [*topology.switches, *topology.hosts]
    for node in members:
        join_bridge(controller, node.name, name_of(lab, node.name), node.mgmt, MGMT_NET)


def connect_training(
    lab: str, topology: Topology, mtu: int, *, has_cables: bool = False, offload: bool = True
) -> None:
    """Connect each NIC to its switch, and the switches to each other; without `offload`, offloads are off.

    With `has_cables`, each rank's cable has two pieces, both of which end in the namespace of the cables.
    """
    connect = partial(add_cable, mtu=mtu, offload=offload)
    for host in topology.hosts:
        namespace = name_of(lab, host.name)
        for index, nic in enumerate(host.interfaces):
            near_namespace, port = name_of(lab, nic.switch), f"port{nic.port}"
            if has_cables and host.role == "rank":
                inside, (near, far) = name_of(lab, CABLES), cut_ends(host)[index]
                connect(inside, far, near_namespace, port)
                near_namespace, port = inside, near
            connect(near_namespace, port, namespace, nic.name, far_mac=nic.mac)
            set_address(namespace, nic.name, nic.ip, DATA_NET)
    for link in topology.links:
        (a, a_port), (b, b_port) = link.a, link.b
        connect(name_of(lab, a), f"port{a_port}", name_of(lab, b), f"port{b_port}")


def cut_ends(host: LabHost) -> list[tuple[str, str]]:
    """Return the interface names where a training host's cables are cut: towards the host, and the switch."""
    numbers = [f"{host.number}", *(f"{host.number}n{index}" for index in range(1, len(host.interfaces)))]
    return [(f"host{number}", f"switch{number}") for number in numbers]


def lose_copies(lab: str, topology: Topology, share: float) -> str | None:
    """Drop frames on their way from switches to shadow nodes; return the mechanism."""
    by = None
    for node in topology.shadow_nodes:
        for nic in node.interfaces:
            by = loss.add(name_of(lab, nic.switch), f"port{nic.port}", share)
    return by


def lose(lab: str, topology: Topology, share: float) -> str | None:
    """Drop frames in both directions on each training host's cables; return the mechanism."""
    by = None
    for host in topology.trainers:
        for nic in host.interfaces:
            loss.add(name_of(lab, host.name), nic.name, share)
            by = loss.add(name_of(lab, nic.switch), f"port{nic.port}", share)
    return by
