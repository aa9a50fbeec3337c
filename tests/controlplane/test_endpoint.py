"""The stub endpoint: segments and their answers, as packets built by scapy."""

from __future__ import annotations

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from checkmate.job.schema import Job
from checkmate.wire import tag
from checkmate.wire.tag import Hello
from controlplane.endpoint import frames
from controlplane.endpoint.endpoint import Answer, Connected, View, answer
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.plan import plan_switch
from testbed.jobs import job, job_data

JOB = job(channels=2, ranks=3, nodes=2, replicas=1)
NETWORK = Network([JOB])
STUB = NETWORK.switches["tor0"].stub
NIC = JOB.shadow_nodes[0].nics[0]
ISN = 0xFFFFFFF8  # so that everything after it wraps


def view() -> View:
    plan = plan_switch(NETWORK, "tor0", Holdings())
    return View.of(NETWORK, "tor0", plan.boundary_ids, Connected())


def segment(flags: str, payload: bytes = b"", **fields: object) -> bytes:
    tcp = {"sport": 5000, "dport": 7400, "seq": ISN, "ack": 0, "flags": flags, **fields}
    source, mac = tcp.pop("ip", str(NIC.ip)), tcp.pop("mac", NIC.mac)
    return bytes(Ether(src=mac, dst=STUB.mac) / IP(src=source, dst=str(STUB.ip)) / TCP(**tcp) / payload)


def ask(frame: bytes, at: View, port: int = NIC.port) -> Answer:
    parsed = frames.parse(frame)
    assert parsed is not None
    return answer(parsed, port, at)


def reply(found: Answer) -> Packet:
    assert found.frame is not None
    return Ether(found.frame)


def hello_frame(hello: Hello, **fields: object) -> bytes:
    return segment("PA", hello.pack(), seq=(ISN + 1) % tag.MODULUS, **fields)


def connect(at: View, hello: Hello, **fields: object) -> Answer:
    found = ask(hello_frame(hello, **fields), at)
    if found.admission is not None:
        for entry in found.admission.put:
            if entry.table == "streams":
                at.connected.put(entry)
    return found


HELLO = Hello(base=5, boundary=0, shadow_id=0, channel=0, incarnation=9)


def test_a_syn_is_answered_as_the_design_says() -> None:
    options = [("MSS", 1460), ("SAckOK", b""), ("Timestamp", (1, 0)), ("NOP", None), ("WScale", 9)]
    back = reply(ask(segment("S", options=options), view()))
    assert (back.dst, back.src) == (NIC.mac, STUB.mac)
    assert (back[IP].src, back[IP].dst) == (str(STUB.ip), str(NIC.ip))
    tcp = back[TCP]
    assert (tcp.sport, tcp.dport, str(tcp.flags)) == (7400, 5000, "SA")
    assert (tcp.seq, tcp.ack) == (0xFFFFFFFF, (ISN + 1) % tag.MODULUS)
    assert {name for name, _ in tcp.options if name not in ("NOP", "EOL")} == {"MSS", "WScale"}


def test_no_window_scale_where_none_was_offered() -> None:
    back = reply(ask(segment("S", options=[("MSS", 1460)]), view()))
    assert "WScale" not in {name for name, _ in back[TCP].options}


def test_a_hello_is_admitted_and_acknowledged_after() -> None:
    at = view()
    found = connect(at, HELLO)
    assert found.admission is not None
    rewrite, expect = found.admission.put
    assert rewrite["acknowledgement"] == (ISN + 17) % tag.MODULUS
    assert rewrite["minus_base"] == tag.MODULUS - 5
    assert (rewrite["shadow_ip"], rewrite["shadow_port"]) == (int(NIC.ip), 5000)
    assert (expect["boundary"], expect["incarnation"]) == (rewrite["boundary"], 9)
    tcp = reply(found)[TCP]
    assert (str(tcp.flags), tcp.seq, tcp.ack) == ("A", 0, (ISN + 17) % tag.MODULUS)


def test_a_repeated_hello_gets_the_same_answer_and_changes_nothing() -> None:
    at = view()
    first = connect(at, HELLO)
    again = ask(hello_frame(HELLO), at)
    assert again.admission is None
    assert again.frame == first.frame


@pytest.mark.parametrize(
    ("frame", "port"),
    [
        (hello_frame(HELLO, ip="10.9.9.9"), NIC.port),  # a stranger
        (hello_frame(HELLO, mac="02:00:00:00:77:77"), NIC.port),  # another MAC
        (hello_frame(HELLO), NIC.port + 1),  # by another port
        (hello_frame(HELLO, dport=7401), NIC.port),  # at another TCP port
        (hello_frame(Hello(0, 0, 0, 1, 9)), NIC.port),  # wrong NIC
        (hello_frame(Hello(0, 0, 1, 0, 9)), NIC.port),  # wrong node
        (hello_frame(Hello(0, 2, 0, 0, 9)), NIC.port),  # no such boundary
        (hello_frame(Hello(0, 0, 2, 0, 9)), NIC.port),  # no such shadow id
        (hello_frame(Hello(0, 0, 0, 2, 9)), NIC.port),  # no such channel
        (segment("PA", HELLO.pack()[:9]), NIC.port),  # truncated, or the first of two segments
        (segment("PA", HELLO.pack() + b"!"), NIC.port),
        (segment("PA", b"GET / HTTP/1.1\r\n"), NIC.port),
    ],
)
def test_what_is_no_right_hello_is_reset(frame: bytes, port: int) -> None:
    found = ask(frame, view(), port)
    assert found.admission is None
    tcp = reply(found)[TCP]
    assert str(tcp.flags) == "R"
    assert tcp.seq == Ether(frame)[TCP].ack
    assert found.note


def test_a_strangers_syn_is_reset() -> None:
    tcp = reply(ask(segment("S", ip="10.9.9.9"), view()))[TCP]
    assert (str(tcp.flags), tcp.seq, tcp.ack) == ("RA", 0, (ISN + 1) % tag.MODULUS)


def test_arp_is_answered() -> None:
    request = bytes(
        Ether(src=NIC.mac, dst="ff:ff:ff:ff:ff:ff")
        / ARP(op=1, hwsrc=NIC.mac, psrc=str(NIC.ip), pdst=str(STUB.ip))
    )
    arp = reply(ask(request, view()))[ARP]
    assert (arp.op, arp.hwsrc, arp.psrc, arp.hwdst, arp.pdst) == (
        2,
        STUB.mac,
        str(STUB.ip),
        NIC.mac,
        str(NIC.ip),
    )


@pytest.mark.parametrize("flags", ["FA", "R"])
def test_fin_and_rst_count_only_for_the_connection_that_they_name(flags: str) -> None:
    at = view()
    connect(at, HELLO)
    (entry,) = at.connected.by_stream.values()
    after = (ISN + 17) % tag.MODULUS
    assert ask(segment(flags, seq=after, ack=1, sport=5001), at).drop is None
    assert ask(segment(flags, seq=after + 1, ack=1), at).drop is None
    found = ask(segment(flags, seq=after, ack=77), at)
    assert found.drop == entry
    if flags == "FA":
        tcp = reply(found)[TCP]
        assert (str(tcp.flags), tcp.seq, tcp.ack) == ("FA", 77, after + 1)
    else:
        assert found.frame is None
    said = "closed its stream" if flags == "FA" else "reset its stream"
    assert f"shadow NIC {NIC.ip}:5000 {said} of channel 0, shadow id 0: the node " in found.note
    assert ("training starts again" in found.note) == (flags == "FA")
    assert "no copies go to it until it connects" in found.note


@pytest.mark.parametrize(
    ("frame", "port"),
    [
        (segment("PA", b"x", seq=(ISN + 17) % tag.MODULUS), NIC.port + 1),
        (segment("PA", b"x", seq=(ISN + 17) % tag.MODULUS, mac="02:00:00:00:77:77"), NIC.port),
        (segment("PA", b"x", seq=12345), NIC.port),
        (segment("R", seq=(ISN + 17) % tag.MODULUS), NIC.port + 1),
        (segment("FA", seq=(ISN + 17) % tag.MODULUS), NIC.port + 1),
    ],
)
def test_nobody_else_ends_a_stream(frame: bytes, port: int) -> None:
    at = view()
    connect(at, HELLO)
    assert ask(frame, at, port).drop is None


def test_more_than_a_hello_on_a_connection_ends_it() -> None:
    at = view()
    connect(at, HELLO)
    found = ask(segment("PA", b"x", seq=(ISN + 17) % tag.MODULUS), at)
    assert found.drop in at.connected.by_stream.values()
    assert str(reply(found)[TCP].flags) == "R"


def test_a_port_that_a_node_has_anew_is_not_in_two_streams() -> None:
    at = view()
    connect(at, HELLO)
    (old,) = at.connected.by_stream.values()
    other = ask(hello_frame(Hello(0, 1, 0, 1, 9)), at)  # another stream of this NIC, from the same port
    assert other.admission is not None
    assert old in other.admission.drop


def test_hellos_over_parallel_links_come_in_by_the_port_that_they_are_sent_to() -> None:
    data = job_data(switches=2, nodes=1)
    data["fabric"]["links"] = [
        [{"switch": "tor0", "port": 301}, {"switch": "tor1", "port": 300}],
        [{"switch": "tor0", "port": 300}, {"switch": "tor1", "port": 301}],
    ]
    network = Network([Job.model_validate(data)])
    nic = next(n for n in network.hosts if n.switch == "tor1")
    assert network.port_towards("tor0", nic) == 300
    assert network.arrival_port("tor0", nic) == 301


def test_a_new_connection_replaces_the_old_whatever_the_incarnations() -> None:
    at = view()
    connect(at, HELLO)
    (old,) = at.connected.by_stream.values()
    same = connect(at, HELLO, sport=5001).admission
    assert same is not None
    assert same.drop == ()  # the same key: the entry is modified
    (old,) = at.connected.by_stream.values()
    other = connect(at, Hello(0, 0, 0, 0, 8), sport=5002).admission
    assert other is not None
    assert other.drop == (old,)
    (now,) = at.connected.by_stream.values()
    assert (now["incarnation"], now["shadow_port"]) == (8, 5002)
    assert ask(segment("R", seq=(ISN + 17) % tag.MODULUS, sport=5000), at).drop is None
