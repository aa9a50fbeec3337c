"""Feature `guard`: the source addresses that each port may send."""

from __future__ import annotations

from ipaddress import IPv4Address

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from controlplane.entities import TableEntry
from controlplane.forwarding import forward
from controlplane.guard import host_port, link_port, permit, refuse
from ptf_tests.base import FENCE_SOURCE, SwitchTest, count
from ptf_tests.packets import PEER_IP, PEER_MAC, PEER_PORT, STUB, TRAINER_IP, TRAINER_MAC, TRAINER_PORT
from ptf_tests.switch import CounterValue

LINK_PORT, OTHER_PORT = 9, 10
FOREIGN = IPv4Address("10.0.0.77")
LINK_LOCAL = IPv4Address("169.254.7.7")


def frames(source: IPv4Address) -> list[bytes]:
    """Return frames of every kind that carry a source address."""
    header = Ether(dst=PEER_MAC, src=TRAINER_MAC)
    address = {"src": str(source), "dst": str(PEER_IP)}
    packets: list[Packet] = [
        header / IP(**address) / TCP(sport=7010, dport=40000, flags="A", seq=7) / Raw(b"forged"),
        header / IP(**address, options=[b"\x01\x01\x01\x01"]) / TCP() / Raw(b"forged"),
        header / IP(**address, frag=3, proto=6) / Raw(b"later fragment"),
        header / IP(**address) / UDP() / Raw(b"datagram"),
        header / ARP(op=2, hwsrc=TRAINER_MAC, psrc=str(source), hwdst=PEER_MAC, pdst=str(PEER_IP)),
    ]
    return [bytes(packet) for packet in packets]


class Guard(SwitchTest):
    """A host at `TRAINER_PORT`, a link with the stub behind it at `LINK_PORT`, and no job at `OTHER_PORT`."""

    def setUp(self) -> None:
        super().setUp()
        self.host, self.link = host_port(TRAINER_PORT), link_port(LINK_PORT)
        self.host_address = refuse(TRAINER_IP, from_link=False)
        self.stub_addresses = [refuse(STUB.ip, from_link=from_link) for from_link in (False, True)]
        self.put(
            forward(PEER_MAC, PEER_PORT),
            permit(TRAINER_PORT, TRAINER_IP),
            permit(LINK_PORT, STUB.ip),
            self.host,
            self.link,
            self.host_address,
            *self.stub_addresses,
            permit(TRAINER_PORT, FENCE_SOURCE),
        )

    def passes(self, port: int, source: IPv4Address) -> None:
        self.check((port, frames(source)), {PEER_PORT: frames(source)})

    def check_refused(self, port: int, source: IPv4Address, entry: TableEntry) -> None:
        """Check that frames are dropped, and counted by this entry alone."""
        self.check((port, frames(source)), {})
        self.check_count(entry, *frames(source))


class OwnAddresses(Guard):
    def test_host(self) -> None:
        """a host's own address at its port"""
        self.passes(TRAINER_PORT, TRAINER_IP)
        self.check_count(self.host)

    def test_further_address(self) -> None:
        """another address of a host at its port, and at no other"""
        further = refuse(FOREIGN, from_link=False)
        self.put(permit(TRAINER_PORT, FOREIGN), further)
        for source in (TRAINER_IP, FOREIGN):
            self.passes(TRAINER_PORT, source)
        self.check_refused(OTHER_PORT, FOREIGN, further)

    def test_link(self) -> None:
        """at a link: the stub behind it, hosts of jobs, and addresses of no job"""
        for source in (STUB.ip, TRAINER_IP, FOREIGN):
            self.passes(LINK_PORT, source)

    def test_no_job(self) -> None:
        """at a port of no job: addresses of no job"""
        self.passes(OTHER_PORT, FOREIGN)

    def test_without_address(self) -> None:
        """frames without a source address to check: other protocols, VLANs, DHCP, and probes of RFC 5227"""
        header = Ether(dst=PEER_MAC, src=TRAINER_MAC)
        sent_frames = [
            bytes(packet)
            for packet in (
                header / IPv6(src="fe80::1", dst="fe80::2") / UDP(),
                header / Raw(bytes(50)),
                header / IP(src="0.0.0.0", dst="255.255.255.255") / UDP(sport=68, dport=67),
                header / ARP(psrc="0.0.0.0", pdst=str(TRAINER_IP)),
                header / Dot1Q(vlan=7) / IP(src=str(STUB.ip), dst=str(PEER_IP)) / UDP(),
                header / Dot1AD(vlan=7) / Dot1Q(vlan=0) / IP(src=str(STUB.ip), dst=str(PEER_IP)) / UDP(),
            )
        ]
        self.check((TRAINER_PORT, sent_frames), {PEER_PORT: sent_frames})


class OthersAddresses(Guard):
    def test_stub_from_host(self) -> None:
        """the stub's address at a host's port"""
        self.check_refused(TRAINER_PORT, STUB.ip, self.host)

    def test_foreign_from_host(self) -> None:
        """another host's address, and one of no job, at a host's port"""
        self.check((TRAINER_PORT, frames(PEER_IP)), {})
        self.check((TRAINER_PORT, frames(FOREIGN)), {})
        self.check_count(self.host, *frames(PEER_IP), *frames(FOREIGN))

    def test_link_local(self) -> None:
        """a link-local address at a host's port; it passes at a port of no job"""
        self.check_refused(TRAINER_PORT, LINK_LOCAL, self.host)
        self.passes(OTHER_PORT, LINK_LOCAL)

    def test_stub_from_other_link(self) -> None:
        """the stub's address at a link that it is not behind"""
        self.put(link_port(OTHER_PORT))
        self.check_refused(OTHER_PORT, STUB.ip, self.stub_addresses[1])

    def test_stub_from_no_job(self) -> None:
        """the stub's address at a port of no job"""
        self.check_refused(OTHER_PORT, STUB.ip, self.stub_addresses[0])

    def test_host_from_no_job(self) -> None:
        """a host's address at a port of no job"""
        self.check_refused(OTHER_PORT, TRAINER_IP, self.host_address)

    def test_vlan_zero(self) -> None:
        """any address in a frame with VLAN id 0, which a receiver takes for one without a VLAN"""
        inner = IP(src=str(TRAINER_IP), dst=str(PEER_IP)) / TCP() / Raw(b"forged")
        header = Ether(dst=PEER_MAC, src=TRAINER_MAC)
        tagged_frames = [bytes(header / tag / inner) for tag in (Dot1Q(vlan=0, prio=3), Dot1AD(vlan=0))]
        for port in (TRAINER_PORT, LINK_PORT, OTHER_PORT):
            with self.counts("hidden", count(*tagged_frames)):
                self.check((port, tagged_frames), {})
        with self.counts("hidden", CounterValue()):
            self.passes(TRAINER_PORT, TRAINER_IP)
