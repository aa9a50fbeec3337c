"""The stub endpoint: segments and their answers, as packets built by scapy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.wire import tag
from checkmate.wire.tag import Ends, Hello
from controlplane.endpoint import frames
from controlplane.endpoint.endpoint import Answer, Closure, ConnectedStreams, View, answer, closures_line
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.plan import plan_switch
from controlplane.reconciling import Changes, SwitchMemory
from testbed.jobs import job, job_data
from tests.support.controlplane.endpoint import empty_view
from tests.support.controlplane.hellos import signed

JOB = job(channels=2, ranks=3, nodes=2, replicas=1)
NETWORK = Network([JOB])
STUB = NETWORK.switches["tor0"].stub
NIC = JOB.shadow_nodes[0].nics[0]
ISN = 0xFFFFFFF8  # so that everything after it wraps
KEY = bytes(range(32))
NOW = 1_800_000_000_000_000
ENDS = Ends(NIC.ip, 5000, STUB.ip, STUB.port)


def view() -> View:
    return empty_view(JOB, KEY)


def segment(flags: str, payload: bytes = b"", **fields: object) -> bytes:
    tcp = {"sport": 5000, "dport": 7400, "seq": ISN, "ack": 0, "flags": flags, **fields}
    source, mac = tcp.pop("ip", str(NIC.ip)), tcp.pop("mac", NIC.mac)
    return bytes(Ether(src=mac, dst=STUB.mac) / IP(src=source, dst=str(STUB.ip)) / TCP(**tcp) / payload)


def ask(frame: bytes, at: View, port: int = NIC.port, now: int = NOW) -> Answer:
    parsed = frames.parse(frame)
    assert parsed is not None
    return answer(parsed, port, at, now)


def reply(result: Answer) -> Packet:
    assert result.frame is not None
    return Ether(result.frame)


def hello_frame(hello: Hello, key: bytes = KEY, **fields: Any) -> bytes:
    """Return a hello, whose MAC is for the connection on which the frame is sent."""
    ip, port = IPv4Address(str(fields.get("ip", NIC.ip))), int(str(fields.get("sport", 5000)))
    ends = Ends(ip, port, STUB.ip, int(str(fields.get("dport", STUB.port))))
    return segment("PA", signed(hello, ends, key), seq=(ISN + 1) % tag.MODULUS, **fields)


def connect(at: View, hello: Hello, **fields: Any) -> Answer:
    """Ask, and do with the answer what a controller does."""
    result = ask(hello_frame(hello, **fields), at)
    if result.admission is not None:
        for entry in result.admission.puts:
            if entry.table == "streams":
                at.connected.put(entry)
        assert isinstance(at.hello_times, dict)
        at.hello_times[result.admission.key] = result.admission.time
    return result


def hello_of(
    base: int = 0,
    boundary: int = 0,
    shadow_id: int = 0,
    channel: int = 0,
    incarnation: int = 9,
    after: float = 0.0,
) -> Hello:
    """Return a hello at `after` seconds from `NOW`."""
    return Hello(base, boundary, shadow_id, channel, incarnation, NOW + round(after * 1e6))


def flips(payload: bytes) -> Iterator[bytes]:
    """Yield a payload with each of its bits inverted."""
    for at in range(8 * len(payload)):
        yield (int.from_bytes(payload, "big") ^ 1 << at).to_bytes(len(payload), "big")


HELLO = hello_of(base=5)
HELLO_START = bytes.fromhex("c4ec0002")


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
    result = connect(at, HELLO)
    assert result.admission is not None
    rewrite, expect = result.admission.puts
    assert rewrite["acknowledgement"] == (ISN + 41) % tag.MODULUS
    assert rewrite["minus_base"] == tag.MODULUS - 5
    assert (rewrite["shadow_ip"], rewrite["shadow_port"]) == (int(NIC.ip), 5000)
    assert (expect["boundary"], expect["incarnation"]) == (rewrite["boundary"], 9)
    tcp = reply(result)[TCP]
    assert (str(tcp.flags), tcp.seq, tcp.ack) == ("A", 0, (ISN + 41) % tag.MODULUS)


def test_groups_on_the_same_hosts_have_streams_of_their_own() -> None:
    together = job(channels=2, ranks=3, nodes=2, groups=2, shared=True)
    at = empty_view(together, KEY)
    assert together.shadow_nodes[0].nics[0] == NIC
    first = connect(at, hello_of(boundary=0, shadow_id=0)).admission
    second = connect(at, hello_of(boundary=2, shadow_id=2), sport=5001).admission
    assert first is not None and second is not None
    assert first.key[0] == second.key[0] == at.boundary_ids["demo", 2], "one id for their addresses"
    assert (first.key[2], second.key[2]) == (0, 2)
    assert len(at.connected.by_stream) == 2
    for shadow_id in (0, 1, 4, 65535):
        result = ask(hello_frame(hello_of(boundary=2, shadow_id=shadow_id), sport=5002), at)
        assert result.admission is None
        assert f"no channel 0 of shadow id {shadow_id}" in result.note


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
        (hello_frame(hello_of(boundary=0, shadow_id=0, channel=1)), NIC.port),  # wrong NIC
        (hello_frame(hello_of(boundary=0, shadow_id=1, channel=0)), NIC.port),  # wrong node
        (hello_frame(hello_of(boundary=2, shadow_id=0, channel=0)), NIC.port),  # no such boundary
        (hello_frame(hello_of(boundary=0, shadow_id=2, channel=0)), NIC.port),  # no such shadow id
        (hello_frame(hello_of(boundary=0, shadow_id=0, channel=2)), NIC.port),  # no such channel
        (segment("PA", signed(HELLO, ENDS, KEY)[:9]), NIC.port),  # truncated, or the first of two segments
        (segment("PA", signed(HELLO, ENDS, KEY) + b"!"), NIC.port),
        (segment("PA", b"GET / HTTP/1.1\r\n"), NIC.port),
    ],
)
def test_what_is_no_right_hello_is_reset(frame: bytes, port: int) -> None:
    result = ask(frame, view(), port)
    assert result.admission is None
    tcp = reply(result)[TCP]
    assert str(tcp.flags) == "R"
    assert tcp.seq == Ether(frame)[TCP].ack
    assert result.note


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
    after = (ISN + 41) % tag.MODULUS
    assert ask(segment(flags, seq=after, ack=1, sport=5001), at).drop is None
    assert ask(segment(flags, seq=after + 1, ack=1), at).drop is None
    result = ask(segment(flags, seq=after, ack=77), at)
    assert result.drop == entry
    if flags == "FA":
        tcp = reply(result)[TCP]
        assert (str(tcp.flags), tcp.seq, tcp.ack) == ("FA", 77, after + 1)
    else:
        assert result.frame is None
    assert result.closure is not None
    line = closures_line([result.closure])
    how = "closed its stream" if flags == "FA" else "reset its stream"
    assert f"shadow NIC {NIC.ip}:5000 {how} of channel 0, shadow id 0: the node " in line
    assert ("training starts again" in line) == (flags == "FA")
    assert "no copies go there until the node connects" in line


def test_ends_of_many_streams_are_one_line() -> None:
    closure = Closure("tor0", "closed", "10.0.0.1", 5000, 0, 0)
    many = [replace(closure, nic=f"10.0.0.{i % 4}", port=5000 + i) for i in range(2048)]
    assert closures_line(many).startswith(
        "switch tor0: shadow NICs 10.0.0.0, 10.0.0.1, 10.0.0.2 and 1 more closed 2,048 streams: the node was "
    )
    assert closures_line([closure, closure]).startswith("switch tor0: shadow NIC 10.0.0.1 closed 2 streams: ")


@pytest.mark.parametrize(
    ("frame", "port"),
    [
        (segment("PA", b"x", seq=(ISN + 41) % tag.MODULUS), NIC.port + 1),
        (segment("PA", b"x", seq=(ISN + 41) % tag.MODULUS, mac="02:00:00:00:77:77"), NIC.port),
        (segment("PA", b"x", seq=12345), NIC.port),
        (segment("R", seq=(ISN + 41) % tag.MODULUS), NIC.port + 1),
        (segment("FA", seq=(ISN + 41) % tag.MODULUS), NIC.port + 1),
    ],
)
def test_nobody_else_ends_a_stream(frame: bytes, port: int) -> None:
    at = view()
    connect(at, HELLO)
    assert ask(frame, at, port).drop is None


def test_more_than_a_hello_on_a_connection_ends_it() -> None:
    at = view()
    connect(at, HELLO)
    result = ask(segment("PA", b"x", seq=(ISN + 41) % tag.MODULUS), at)
    assert result.drop in at.connected.by_stream.values()
    assert str(reply(result)[TCP].flags) == "R"


def test_a_port_that_a_node_has_anew_is_not_in_two_streams() -> None:
    at = view()
    connect(at, HELLO)
    (old,) = at.connected.by_stream.values()
    result = ask(
        hello_frame(hello_of(boundary=1, channel=1)), at
    )  # another stream of this NIC, from the same port
    assert result.admission is not None
    assert old in result.admission.drops


def test_hellos_over_parallel_links_come_in_by_the_port_that_they_are_sent_to() -> None:
    data = job_data(switches=2, nodes=1)
    data["fabric"]["links"] = [
        [{"switch": "tor0", "port": 301}, {"switch": "tor1", "port": 300}],
        [{"switch": "tor0", "port": 300}, {"switch": "tor1", "port": 301}],
    ]
    network = Network([of_data(Job, data)])
    nic = next(n for n in network.interfaces if n.switch == "tor1")
    assert network.port_towards("tor0", nic) == 300
    assert network.arrival_port("tor0", nic) == 301


def test_a_new_connection_replaces_the_old_whatever_the_incarnations() -> None:
    at = view()
    connect(at, HELLO)
    (old,) = at.connected.by_stream.values()
    same = connect(at, hello_of(base=5, after=1), sport=5001).admission
    assert same is not None
    assert same.drops == ()  # the same key: the entry is modified
    (old,) = at.connected.by_stream.values()
    admission = connect(at, hello_of(incarnation=8, after=2), sport=5002).admission
    assert admission is not None
    assert admission.drops == (old,)
    (now,) = at.connected.by_stream.values()
    assert (now["incarnation"], now["shadow_port"]) == (8, 5002)
    assert ask(segment("R", seq=(ISN + 41) % tag.MODULUS, sport=5000), at).drop is None


def refusal(result: Answer) -> str:
    """Return the log line of a hello that is refused."""
    assert result.admission is None
    assert str(reply(result)[TCP].flags) == "R"
    return result.note


def test_a_repeated_hello_gets_the_same_answer_from_a_restarted_controller() -> None:
    """The switch has the entry; the controller's memory of times is empty, and its clock may be anywhere."""
    at = view()
    first = connect(at, HELLO)
    restarted = replace(view(), connected=ConnectedStreams(at.connected.by_stream.values()))
    for now in (NOW, NOW + 10**9):
        again = ask(hello_frame(HELLO), restarted, now=now)
        assert (again.admission, again.frame) == (None, first.frame)


@pytest.mark.parametrize("offset", [-60_000_001, -60_000_000, 0, 60_000_000, 60_000_001])
def test_a_clock_may_differ_by_60_s(offset: int) -> None:
    result = ask(hello_frame(HELLO), view(), now=NOW - offset)
    if abs(offset) <= 60_000_000:
        assert result.admission is not None
    else:
        way = "ahead of" if offset > 0 else "behind"
        assert f"clock is 60.0 s {way} this controller's, more than 60 s" in refusal(result)


@pytest.mark.parametrize(
    "change",
    [
        {"sport": 5001},
        {"dport": 7400, "sport": 4999},
        {"payload": signed(HELLO, ENDS, bytes(32))},
        {"payload": signed(HELLO, replace(ENDS, stub_port=7401), KEY)},
        {"payload": signed(HELLO, replace(ENDS, shadow_ip=STUB.ip, stub_ip=NIC.ip), KEY)},
        *({"payload": flipped} for flipped in flips(signed(HELLO, ENDS, KEY)) if flipped[:4] == HELLO_START),
    ],
)
def test_every_bit_and_both_ends_are_authenticated(change: dict[str, Any]) -> None:
    payload = change.pop("payload", signed(HELLO, ENDS, KEY))
    note = refusal(ask(segment("PA", payload, seq=(ISN + 1) % tag.MODULUS, **change), view()))
    assert "its MAC is wrong: the node's hello.key" in note or "bytes 14 and 15 are" in note


def test_a_replayed_and_an_old_hello_are_refused() -> None:
    at = view()
    connect(at, HELLO)
    connect(at, hello_of(base=5, after=3), sport=5001)
    assert "it is old: 3.000 s before the stream's last one" in refusal(ask(hello_frame(HELLO), at))
    (entry,) = at.connected.by_stream.values()
    at.connected.drop(entry)  # as after a FIN
    replayed = ask(hello_frame(hello_of(base=5, after=3), sport=5001), at)
    assert "it was replayed" in refusal(replayed)
    assert connect(at, hello_of(after=3.000001), sport=5001).admission is not None


def test_streams_have_times_of_their_own() -> None:
    at = view()
    connect(at, hello_of(after=3))
    assert connect(at, hello_of(boundary=1, channel=1), sport=5001).admission is not None


def test_a_node_of_version_1_is_named_as_old() -> None:
    old = bytes.fromhex("c4ec0001") + bytes(12)
    note = refusal(ask(segment("PA", old, seq=(ISN + 1) % tag.MODULUS), view()))
    assert f"refused a hello from {NIC.ip}:5000: the node is old: the node's hello has version 1" in note


def test_a_refused_hello_leaves_no_trace_in_the_memory() -> None:
    """If the switch refuses the entries, the same hello, sent again, is not a replay."""
    memory = SwitchMemory(Holdings())
    plan = plan_switch(NETWORK, "tor0", Holdings())
    at = View.from_network(
        NETWORK, "tor0", plan.boundary_ids, memory.connected, memory.hello_times, {JOB.job: KEY}
    )
    for number in (1, 2):
        frame = hello_frame(hello_of(after=number), sport=5000 + number)
        result = ask(frame, at)
        before = dict(memory.hello_times)
        changes = Changes()
        memory.take(result, changes)
        assert memory.hello_times != before
        assert len(memory.connected.by_stream) == 1
        memory.forget(changes)
        assert memory.hello_times == before
        assert ask(frame, at).admission == result.admission
        memory.take(result, Changes())
