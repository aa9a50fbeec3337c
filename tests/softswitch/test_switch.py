"""Packets through the switch: copies and their admission, counters, turns of the control plane."""

from __future__ import annotations

import threading
import time

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from softswitch.codegen.program import Output, load
from softswitch.frames import ports
from softswitch.frames.checksums import GSO_TCPV4, Offload, fold, locate
from softswitch.frames.ports import Handler, PortConnection
from softswitch.switch import SoftSwitch
from tests.softswitch.support.client import KINDS, Client, Running, insert, modify, read_p4info, wait_for
from tests.softswitch.support.memory_port import MemoryPort

FRAME = bytes.fromhex("02000000000102000000000288b5") + b"payload of a frame"
MAC = 0x020000000001


def replicated(running: Running, primary: Client, *replicas: tuple[int, int]) -> None:
    """Replicate frames from port 1 to a group of (port, instance)."""
    primary.write(insert(primary.group(5, *replicas)), insert(primary.mac_entry(MAC, 1, "replicate", 5)))


def arrive(running: Running, count: int = 1) -> None:
    """Send frames into port 1, and wait until the switch has processed them."""
    port = running.ports[1]
    before = port.stats.rx_packets
    for _ in range(count):
        port.inject(FRAME)
    wait_for(lambda: port.stats.rx_packets == before + count, "all frames taken")
    with running.switch.turn():
        pass


def test_unicast_and_counts(running: Running, primary: Client) -> None:
    primary.write(insert(primary.mac_entry(MAC, 1, "counted", 2)))
    arrive(running, 3)
    assert list(running.ports[2].output) == [FRAME] * 3
    stats = running.ports[2].stats
    assert (stats.tx_packets, stats.tx_bytes, stats.tx_segments) == (3, 3 * len(FRAME), 3)
    assert running.ports[1].stats.rx_bytes == 3 * len(FRAME)
    asking = primary.mac_entry(MAC, 1)
    asking.table_entry.counter_data.SetInParent()
    (entry,) = primary.read(asking)
    data = entry.table_entry.counter_data
    assert (data.packet_count, data.byte_count) == (3, 3 * len(FRAME))


def test_no_program_and_unknown_ports(running: Running) -> None:
    arrive(running)
    client = running.client()
    client.arbitration()
    client.set_pipeline()
    client.write(insert(client.mac_entry(MAC, 1, "counted", 99)))
    arrive(running)
    assert running.switch.unknown_port == 1
    assert not any(port.output for port in running.ports.values())


def test_copies_with_an_instance_go_first(running: Running, primary: Client) -> None:
    order: list[int] = []
    for port in running.ports.values():
        port.send = lambda frame, offload, number=port.number: order.append(number) or True  # type: ignore
    replicated(running, primary, (2, 0), (3, 1), (4, 2))
    arrive(running)
    assert order == [3, 4, 2]


def test_refused_copy_withholds_the_original(running: Running, primary: Client) -> None:
    replicated(running, primary, (2, 0), (3, 1), (4, 2))
    running.ports[3].refusing = True
    arrive(running)
    assert (len(running.ports[2].output), len(running.ports[4].output)) == (0, 1)
    assert (running.ports[3].stats.refused, running.ports[2].stats.withheld) == (1, 1)
    # Retransmissions are forwarded completely.
    running.ports[3].refusing = False
    arrive(running)
    assert [len(running.ports[port].output) for port in (2, 3, 4)] == [1, 1, 2]


def test_refused_original_holds_nothing_back(running: Running, primary: Client) -> None:
    replicated(running, primary, (2, 0), (4, 0), (3, 1))
    running.ports[2].refusing = True
    arrive(running)
    assert [len(running.ports[number].output) for number in (2, 3, 4)] == [0, 1, 1]
    assert not any(port.stats.withheld for port in running.ports.values())


def test_full_port_refuses(running: Running, primary: Client) -> None:
    replicated(running, primary, (2, 0), (3, 1))
    running.ports[3].capacity = 2
    arrive(running, 5)
    assert [len(running.ports[port].output) for port in (2, 3)] == [2, 2]
    assert (running.ports[3].stats.refused, running.ports[2].stats.withheld) == (3, 3)


def test_port_that_is_down_holds_nothing_back(
    running: Running, primary: Client, caplog: pytest.LogCaptureFixture
) -> None:
    replicated(running, primary, (2, 0), (3, 1))
    running.ports[3].connection.set_up(False)
    arrive(running, 2)
    assert len(running.ports[2].output) == 2
    assert running.ports[3].stats.disconnected == 2
    running.ports[3].connection.set_up(False)  # a notice of another port
    running.ports[3].connection.set_up(True)
    assert caplog.messages == [
        "port 3 (memory3) is down: it counts as not connected, and copies to it are dropped",
        "port 3 (memory3) is up again, and counts as connected",
    ]
    arrive(running)
    assert (len(running.ports[2].output), len(running.ports[3].output)) == (3, 1)


def test_port_that_refuses_for_a_second_holds_nothing_back(
    running: Running, primary: Client, caplog: pytest.LogCaptureFixture
) -> None:
    replicated(running, primary, (2, 0), (3, 1))
    running.ports[3].refusing = True
    begin = time.monotonic()
    while not running.ports[2].output:
        arrive(running)
        assert time.monotonic() < begin + 9, "training was held back for nine seconds"
    assert time.monotonic() - begin >= 1
    arrive(running, 3)
    assert len(running.ports[2].output) == 4
    stats, withheld = running.ports[3].stats, running.ports[2].stats.withheld
    assert (stats.refused, stats.disconnected) == (withheld, 4)  # retransmitted ones; lost ones
    (warning,) = caplog.messages
    assert warning.startswith("port 3 (memory3) accepted no frame for 1.")
    assert warning.endswith(" s: it counts as not connected, and copies to it are dropped")
    # It is tried again, and used when it has room.
    running.ports[3].refusing = False

    def sends_again() -> bool:
        arrive(running)
        return bool(running.ports[3].output)

    wait_for(sends_again, "the port connected again")
    count = len(running.ports[3].output)
    arrive(running, 5)
    assert len(running.ports[3].output) == count + 5
    assert caplog.messages == [warning, "port 3 (memory3) accepts frames again, and counts as connected"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_sender_that_backs_off_is_not_held_back_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    connection = PortConnection()
    assert connection.note_refused()
    now[0] += 10  # nothing was accepted meanwhile
    assert not connection.note_refused()
    connection.note_accepted()
    now[0] += 0.9
    assert connection.note_refused()
    now[0] += 1
    assert not connection.note_refused()
    assert not connection.usable()
    now[0] += ports.RETRY_S
    assert connection.usable()
    assert not connection.usable()
    # Once it counts as not connected, only an accepted copy makes it connected again.
    now[0] += 10
    assert connection.usable()
    assert not connection.note_refused()


def test_control_plane_gets_its_turn_under_load(running: Running, primary: Client) -> None:
    """A continuous stream of packets does not starve a writer."""
    replicated(running, primary, (2, 1), (3, 1), (4, 0))
    stop = threading.Event()

    def load() -> None:
        port = running.ports[1]
        while not stop.is_set():
            port.inject(FRAME)
            for output in running.ports.values():
                output.output.clear()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        begin = time.monotonic()
        for value in range(20):
            primary.write(modify(primary.group(5, (2, value))))
        assert time.monotonic() - begin < 20
    finally:
        stop.set()
        thread.join()


def test_trace() -> None:
    traces: list[str] = []
    port = MemoryPort(1)
    switch = SoftSwitch([port], trace=traces.append)

    switch.install(load(KINDS.with_suffix(".json").read_bytes(), read_p4info()))
    switch.handle(1, FRAME, None)
    port.close()
    assert len(traces) == 1
    assert "by_mac" in traces[0]


def test_a_trace_that_cannot_be_written_does_not_end_forwarding(caplog: pytest.LogCaptureFixture) -> None:
    def closed(_text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    ports = [MemoryPort(1), MemoryPort(2)]
    switch = SoftSwitch(ports, trace=closed)
    program = load(KINDS.with_suffix(".json").read_bytes(), read_p4info())
    switch.install(program)
    for _ in range(2):
        switch.handle(1, FRAME, None)
    assert caplog.messages == ["tracing ends, because a trace could not be written: [Errno 32] Broken pipe"]
    for port in ports:
        port.close()


class FailingPort(MemoryPort):
    """A port whose first attempt to receive fails."""

    def poll(self, handle: Handler, limit: int) -> None:
        if not self.stats.rx_packets:
            self.stats.rx_packets += 1
            raise OSError(105, "No buffer space available")
        super().poll(handle, limit)


def test_an_error_of_a_port_does_not_end_forwarding(caplog: pytest.LogCaptureFixture) -> None:
    ports = [FailingPort(1), MemoryPort(2)]
    switch = SoftSwitch(ports)
    switch.install(Watching())  # type: ignore[arg-type]
    ports[0].inject(FRAME)
    thread = threading.Thread(target=switch.run)
    thread.start()
    wait_for(lambda: bool(ports[1].output), "the frame")
    switch.stop()
    thread.join()
    assert "port 1 (memory1): could not receive: [Errno 105] No buffer space available" in caplog.messages
    for port in ports:
        port.close()


def segment(payload: bytes) -> tuple[bytes, bytes]:
    """Return a TCP segment with its checksum, and with only the pseudo header's sum."""
    packet = Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02") / IP(src="10.0.0.1", dst="10.0.0.2")
    whole = bytes(packet / TCP(sport=1, dport=2, flags="A") / Raw(payload))
    where = locate(whole)
    assert where is not None
    return whole, whole[:50] + fold(where.pseudo).to_bytes(2) + whole[52:]


class Watching:
    """Substitute of a program, which forwards all frames to port 2 and records them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def process(self, port: int, frame: bytes, trace: object = None) -> list[Output]:
        self.frames.append(frame)
        return [Output(2, frame, 0, 0)]


@pytest.mark.parametrize("sums_payload", [False, True])
def test_checksum_left_to_be_completed(sums_payload: bool) -> None:
    """A program that sums payloads gets complete checksums; receivers always do."""
    whole, partial = segment(b"x" * 3000)
    ports = [MemoryPort(1), MemoryPort(2)]
    switch = SoftSwitch(ports)
    watching = Watching()
    switch.install(watching, sums_payload=sums_payload)  # type: ignore[arg-type]
    switch.handle(1, partial, Offload(partial, bytes(10), 34, 16, GSO_TCPV4, 1000))
    assert watching.frames == [whole if sums_payload else partial]
    assert list(ports[1].output) == [whole]
    assert ports[1].stats.tx_segments == 3
    for port in ports:
        port.close()


def test_controller_gets_completed_checksums(running: Running, primary: Client) -> None:
    whole, partial = segment(b"x" * 3000)
    primary.write(insert(primary.mac_entry(MAC, 1, "punt")))
    running.ports[1].inject(partial, Offload(partial, bytes(10), 34, 16, GSO_TCPV4, 1000))
    assert primary.receive().packet.payload == whole
