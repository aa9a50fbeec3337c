"""Feature `forwarding`: known destinations to their port, all others to the flood group, and never back."""

from __future__ import annotations

import time
from typing import ClassVar

import ptf
from ptf.base_tests import BaseTest
from ptf.testutils import dp_poll, send_packet
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from controlplane.entities import Holdings, MulticastGroup, Update
from controlplane.forwarding import discard, flood_group, forward
from controlplane.plan import plan
from ptf_tests import fabric
from ptf_tests.base import SwitchTest
from ptf_tests.packets import BROADCAST, PORTS, payload
from ptf_tests.stage.namespace import frames_sent
from ptf_tests.switch import PtfSwitch

HOST, NEIGHBOUR, STRANGER = "02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:00:0c"


def frame(to: str = HOST, *layers: Packet) -> bytes:
    """Return an Ethernet frame; the default is UDP over IPv4."""
    inside: Packet = IP(src="10.9.0.1", dst="10.9.0.2") / UDP(sport=1, dport=2) / Raw(payload(100))
    if layers:
        inside = layers[0]
        for layer in layers[1:]:
            inside /= layer
    return bytes(Ether(dst=to, src=NEIGHBOUR) / inside)


class Unicast(SwitchTest):
    def test_known(self) -> None:
        """a known destination: out of its port, and no other"""
        self.put(forward(HOST, 2), forward(NEIGHBOUR, 1))
        self.check((1, frame(HOST)), {2: frame(HOST)})
        self.check((7, frame(HOST)), {2: frame(HOST)})
        self.check((2, frame(NEIGHBOUR)), {1: frame(NEIGHBOUR)})

    def test_every_port(self) -> None:
        """every port is reached"""
        self.put(*(forward(f"02:00:00:00:01:{port:02x}", port) for port in PORTS))
        for port in PORTS:
            packet = frame(f"02:00:00:00:01:{port:02x}")
            self.check((1 if port != 1 else 2, packet), {port: packet})

    def test_never_back(self) -> None:
        """a known destination behind the port that the frame came in by: nowhere"""
        self.put(forward(HOST, 2))
        self.check((2, frame(HOST)), {})

    def test_order(self) -> None:
        """frames keep their order"""
        self.put(forward(HOST, 2))
        packets = [frame(HOST, Raw(bytes([number]) * 80)) for number in range(45)]
        self.check((1, packets), {2: packets})

    def test_moved(self) -> None:
        """a host that moves is found at its new port"""
        self.put(old := forward(HOST, 2))
        self.check((1, frame(HOST)), {2: frame(HOST)})
        self.change(old, forward(HOST, 3))
        self.check((1, frame(HOST)), {3: frame(HOST)})
        self.drop(forward(HOST, 3))
        self.check((1, frame(HOST)), {port: frame(HOST) for port in PORTS if port != 1})

    def test_discarded(self) -> None:
        """a discarded destination: nowhere"""
        self.put(discard(HOST))
        self.check((1, frame(HOST)), {})


class Flooding(SwitchTest):
    def _floods(self, packet: bytes) -> None:
        for port in (1, 2, 18):
            self.check((port, packet), {output: packet for output in PORTS if output != port})

    def test_unknown(self) -> None:
        """an unknown destination: out of all ports but the one it came in by"""
        self.put(forward(HOST, 2))
        self._floods(frame(STRANGER))

    def test_broadcast(self) -> None:
        """broadcast: out of all ports but the one it came in by"""
        self.put(forward(HOST, 2))
        self._floods(frame(BROADCAST))

    def test_multicast(self) -> None:
        """Ethernet multicast: out of all ports but the one it came in by"""
        self._floods(frame("01:00:5e:00:00:fb"))

    def test_group_only(self) -> None:
        """flooding spares the ports that are not in the flood group"""
        packet = frame(BROADCAST)
        self.change(flood_group(set(PORTS)), flood_group({1, 2, 3}))
        outputs = self._answers(1, packet, (2, 3))
        self.change(flood_group({1, 2, 3}), flood_group(set(PORTS)))
        self.assertEqual({2: [packet], 3: [packet]}, outputs)
        self.check((1, ()), {})

    def _answers(self, port: int, packet: bytes, at: tuple[int, ...]) -> dict[int, list[bytes]]:
        """Return the outputs without a fence, which would need every port; `check` sees others later."""
        send_packet(self, port, packet)
        return {where: [dp_poll(self, port_number=where, timeout=5.0).packet] for where in at}


class Frames(SwitchTest):
    def _passes(self, packet: bytes) -> None:
        self.put(forward(HOST, 2))
        self.check((1, packet), {2: packet})

    def test_ipv6(self) -> None:
        """IPv6, byte for byte"""
        inside = IPv6(src="fd00::1", dst="fd00::2", tc=0x80) / TCP(sport=1, dport=2) / Raw(payload(300))
        self._passes(frame(HOST, inside))

    def test_vlan(self) -> None:
        """802.1Q and 802.1ad, byte for byte"""
        self.put(forward(HOST, 2))
        inside = IP(src="10.9.0.1", dst="10.9.0.2", tos=0x80) / TCP() / Raw(payload(100))
        for tags in (Dot1Q(vlan=42, prio=5), Dot1AD(vlan=7) / Dot1Q(vlan=8)):
            packet = frame(HOST, tags / inside)
            with self.subTest(tags.summary()):
                self.check((1, packet), {2: packet})

    def test_vlan_broadcast(self) -> None:
        """an 802.1Q broadcast floods, byte for byte"""
        packet = frame(BROADCAST, Dot1Q(vlan=42), ARP(op=1, pdst="10.9.0.2"))
        self.check((1, packet), {port: packet for port in PORTS if port != 1})

    def test_jumbo(self) -> None:
        """9,000-byte frames, byte for byte, known and flooded"""
        inside = IP(src="10.9.0.1", dst="10.9.0.2") / TCP() / Raw(payload(9000 - 14 - 40))
        packet = frame(HOST, inside)
        self.assertEqual(9000, len(packet))
        self._passes(packet)
        flooded = frame(BROADCAST, inside)
        self.check((1, flooded), {port: flooded for port in PORTS if port != 1})

    def test_small(self) -> None:
        """frames shorter than 60 bytes get no padding"""
        self.put(forward(HOST, 2))
        for length in (1, 2, 19, 20, 45):
            packet = frame(HOST, Raw(bytes(length)))
            self.check((1, packet), {2: packet})

    def test_truncated(self) -> None:
        """IPv4, TCP and ARP cut off anywhere, byte for byte"""
        self.put(forward(HOST, 2))
        segment = frame(HOST, IP(src="10.9.0.1", dst="10.9.0.2", tos=0x80) / TCP() / Raw(payload(20)))
        request = frame(HOST, ARP(op=1, pdst="10.9.0.2"))
        whole = [segment[:length] for length in (15, 20, 33, 34, 35, 40, 53, 54)]
        self.check((1, whole), {2: whole})
        requests = [request[:length] for length in (15, 20, 41)]
        self.check((1, requests), {2: requests})

    def test_damaged(self) -> None:
        """wrong checksums and lengths stay as they are"""
        self.put(forward(HOST, 2))
        packets = [
            frame(
                HOST, IP(src="10.9.0.1", dst="10.9.0.2", chksum=0x1234) / TCP(chksum=0x4321) / Raw(b"x" * 40)
            ),
            frame(HOST, IP(src="10.9.0.1", dst="10.9.0.2", len=9999) / TCP() / Raw(b"x" * 40)),
            frame(HOST, IP(src="10.9.0.1", dst="10.9.0.2", version=5) / TCP() / Raw(b"x" * 40)),
            frame(HOST, IP(src="10.9.0.1", dst="10.9.0.2", len=0, ihl=3) / TCP(dataofs=2) / Raw(b"x" * 40)),
            frame(HOST, IP(src="10.9.0.1", dst="10.9.0.2") / TCP(dataofs=15) / Raw(b"x")),
        ]
        self.check((1, packets), {2: packets})


class Loops(BaseTest):  # type: ignore[misc]
    """Three switches, with the entries of `controlplane.plan` for a job on them."""

    switches: ClassVar[dict[str, PtfSwitch]]

    @classmethod
    def setUpClass(cls) -> None:
        numbers = fabric.switch_ports()
        switches = SwitchTest.lab.start_switches(numbers)
        cls.addClassCleanup(SwitchTest.lab.stop_switches, switches)
        cls.switches = {f"s{number}": switch for number, switch in zip(numbers, switches, strict=True)}

    def setUp(self) -> None:
        super().setUp()
        self.dataplane = ptf.dataplane_instance
        self.dataplane.flush()

    def _apply(self, ranks: list[fabric.Place], shadow: fabric.Place, *links: int) -> None:
        job = fabric.job(ranks, shadow, tuple(fabric.LINKS[link] for link in links))
        plans = plan([job])
        for name, switch in self.switches.items():
            self.addCleanup(switch.reconcile, Holdings())
            if name in plans:
                switch.reconcile(plans[name].holdings)

    def _broadcasts(self, hosts: list[fabric.Place], tree_links: int) -> None:
        """Check broadcasts from each host: every other host and every link of the tree gets them once."""
        for origin in hosts:
            for to in (BROADCAST, STRANGER):
                before = sum(frames_sent(fabric.link_interfaces()).values())
                packet = self._from(origin, to)
                send_packet(self, origin, packet)
                for host in hosts:
                    if host != origin:
                        self.assertEqual(packet, self._next(host, 5.0), f"from {origin} to {host}")
                time.sleep(0.1)  # a storm would send thousands meanwhile
                carried = sum(frames_sent(fabric.link_interfaces()).values()) - before
                self.assertEqual(tree_links, carried, f"frames on links for one from {origin} to {to}")
                for switch, port, _ in fabric.host_interfaces():
                    self.assertIsNone(self._next((switch, port), 0.0), f"one more at {(switch, port)}")

    def _from(self, origin: fabric.Place, to: str) -> bytes:
        """Return a frame with its host's own address, because ports of a job's hosts accept no other."""
        return frame(to, IP(src=str(fabric.address(origin)), dst="10.9.0.2") / UDP() / Raw(payload(100)))

    def _next(self, place: fabric.Place, timeout: float) -> bytes | None:
        result = dp_poll(self, device_number=place[0], port_number=place[1], timeout=timeout)
        return None if isinstance(result, self.dataplane.PollFailure) else bytes(result.packet)

    def _unicast(self, hosts: list[fabric.Place]) -> None:
        """Check that unicast between any two hosts arrives once, and nowhere else."""
        for origin in hosts:
            for host in hosts:
                if host == origin:
                    continue
                packet = self._from(origin, fabric.mac(host))
                send_packet(self, origin, packet)
                self.assertEqual(packet, self._next(host, 5.0), f"from {origin} to {host}")
        for switch, port, _ in fabric.host_interfaces():
            self.assertIsNone(self._next((switch, port), 0.0), f"one more at {(switch, port)}")

    def test_two_switches(self) -> None:
        """two switches with two links: a broadcast crosses once, and reaches each host once"""
        self._apply([(1, 1), (2, 1)], (2, 2), 0, 1)
        hosts = [(1, 1), (2, 1), (2, 2)]
        self._broadcasts(hosts, tree_links=1)
        self._unicast(hosts)

    def test_three_switches(self) -> None:
        """three switches in a triangle, one side doubled: no storm, and each host is reached once"""
        self._apply([(1, 1), (2, 1), (3, 1)], (3, 2), 0, 1, 2, 3)
        hosts = [(1, 1), (2, 1), (3, 1), (3, 2)]
        self._broadcasts(hosts, tree_links=2)
        self._unicast(hosts)

    def test_control(self) -> None:
        """the control: flooded out of all ports of the loop, a broadcast does storm"""
        loop = {"s1": {1, 3, 4}, "s2": {1, 3, 4}}
        for name, ports in loop.items():
            self.addCleanup(self.switches[name].reconcile, Holdings())
            self.switches[name].put([flood_group(ports)])
        before = sum(frames_sent(fabric.link_interfaces()).values())
        send_packet(self, (1, 1), frame(BROADCAST))
        time.sleep(0.3)
        carried = sum(frames_sent(fabric.link_interfaces()).values()) - before
        for name, ports in loop.items():
            self.switches[name].write([Update(flood_group(ports), MulticastGroup(1, frozenset({(1, 0)})))])
        self._calm()
        self.assertGreater(carried, 20)

    def _calm(self) -> None:
        """Wait until there is no more traffic on the links."""
        carried = -1
        while (now := sum(frames_sent(fabric.link_interfaces()).values())) != carried:
            carried = now
            time.sleep(0.2)
