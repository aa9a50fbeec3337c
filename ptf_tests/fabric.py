"""Three switches in loops, and jobs on them, for the tests of broadcast storms.

s1 === s2      two parallel links (3-3, 4-4)
  \\    /       s1.5 - s3.3, s2.5 - s3.4; hosts at ports 1 and 2 of each
    s3
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

from checkmate.job.schema import Attachment, DpGroup, Fabric, Job, Nic, Rank, ShadowNode, Stub, Switch

SWITCHES = (1, 2, 3)
HOST_PORTS = (1, 2)
LINKS = (((1, 3), (2, 3)), ((1, 4), (2, 4)), ((1, 5), (3, 3)), ((2, 5), (3, 4)))

Place = tuple[int, int]
"""(switch, port)."""


def interface_pairs() -> Iterator[tuple[str, str]]:
    """Yield the veth pairs of links and hosts."""
    for near, far in LINKS:
        yield _interface(near), _interface(far)
    for switch, port, interface in host_interfaces():
        yield interface, _interface((switch, port))


def host_interfaces() -> Iterator[tuple[int, int, str]]:
    """Yield (switch, port, the host's interface)."""
    for switch in SWITCHES:
        for port in HOST_PORTS:
            yield switch, port, f"h{switch}p{port}"


def link_interfaces() -> list[str]:
    """Return the interfaces of both ends of every link."""
    return [_interface(end) for link in LINKS for end in link]


def switch_ports() -> dict[int, dict[int, str]]:
    """Return each switch's ports and their interfaces."""
    ends = [end for link in LINKS for end in link] + [(s, p) for s in SWITCHES for p in HOST_PORTS]
    return {s: {port: _interface((s, port)) for switch, port in ends if switch == s} for s in SWITCHES}


def _interface(place: Place) -> str:
    return f"f{place[0]}p{place[1]}"


def mac(place: Place) -> str:
    """Return the MAC address of the host at a place."""
    return f"02:00:00:02:{place[0]:02x}:{place[1]:02x}"


def job(ranks: list[Place], shadow: Place, links: tuple[tuple[Place, Place], ...]) -> Job:
    """Return a job of one DP group whose ranks, in ring order, and shadow NIC are at these places."""
    numbers = sorted({switch for link in links for switch, _ in link})
    return Job(
        job="loop",
        fabric=Fabric(
            switches=tuple(_switch(number) for number in numbers),
            links=tuple((_attachment(near), _attachment(far)) for near, far in links),
        ),
        dp_groups=(DpGroup(ranks=tuple(_rank(index, place) for index, place in enumerate(ranks))),),
        shadow_nodes=(ShadowNode(id=0, mgmt="192.0.2.1:7000", nics=(_nic(shadow),)),),
    )


def _switch(number: int) -> Switch:
    stub = Stub(ip=IPv4Address("10.2.255.0") + number, mac=f"02:00:00:02:ff:{number:02x}", port=7010)
    return Switch(name=f"s{number}", address="127.0.0.1:9559", stub=stub)


def _attachment(place: Place) -> Attachment:
    return Attachment(switch=f"s{place[0]}", port=place[1])


def _rank(index: int, place: Place) -> Rank:
    return Rank(
        rank=index,
        ip=address(place),
        mac=mac(place),
        mgmt=f"192.0.2.{10 + index}",
        switch=f"s{place[0]}",
        port=place[1],
    )


def _nic(place: Place) -> Nic:
    return Nic(ip=address(place), mac=mac(place), switch=f"s{place[0]}", port=place[1])


def address(place: Place) -> IPv4Address:
    """Return the IP address of the host at a place."""
    return IPv4Address("10.2.0.0") + 256 * place[0] + place[1]
