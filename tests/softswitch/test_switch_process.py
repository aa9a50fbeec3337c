"""The switch as a process between kernels: TCP through it byte for byte, signals, statistics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from finsy.proto import p4r

from tests.softswitch.support.client import (
    DEVICE,
    KINDS,
    Client,
    Wires,
    insert,
    needs_root,
    sh,
    wait_for,
)
from tests.softswitch.support.process import descriptors, process
from tests.softswitch.support.scenarios import CPU_PORT

BROADCAST = (1 << 48) - 1
MEGABYTES = 24


WRITER = """
import pathlib, queue, sys
import grpc
from finsy.proto import p4r, p4r_grpc
request = p4r.WriteRequest.FromString(pathlib.Path(sys.argv[1]).read_bytes())
stub = p4r_grpc.P4RuntimeStub(grpc.insecure_channel("127.0.0.1:9559"))
hello = p4r.StreamMessageRequest()
hello.arbitration.device_id = request.device_id
hello.arbitration.election_id.CopyFrom(request.election_id)
said = queue.SimpleQueue()
said.put(hello)
stream = stub.StreamChannel(iter(said.get, None))
assert next(stream).arbitration.status.code == 0
stub.Write(request)
said.put(None)
"""


def in_namespace(wires: Wires, path: Path) -> None:
    """Set entries from inside the switch's namespace, where its P4Runtime server listens on loopback."""
    updates = p4r.WriteRequest(device_id=DEVICE)
    updates.election_id.low = 1
    maker = Client("unused:1")
    everyone = maker.group(1, *((port, port) for port in wires.hosts))
    updates.updates.append(insert(everyone))
    for source in wires.hosts:
        updates.updates.append(insert(maker.mac_entry(BROADCAST, source, "replicate", 1)))
        for target in wires.hosts:
            updates.updates.append(insert(maker.mac_entry(wires.mac(target), source, "counted", target)))
    maker.close()
    path.write_bytes(updates.SerializeToString())
    run(wires.switch, WRITER, str(path))


def run(namespace: str, code: str, *arguments: str) -> None:
    result = subprocess.run(
        ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


RECEIVER = """
import hashlib, socket, sys
listening = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
connection, _ = listening.accept()
digest = hashlib.sha256()
while data := connection.recv(1 << 20):
    digest.update(data)
print(digest.hexdigest())
"""
SENDER = """
import hashlib, random, socket, sys
sending = socket.create_connection((sys.argv[1], 7000), timeout=20)
digest = hashlib.sha256()
generator = random.Random(1)
for _ in range(int(sys.argv[2])):
    data = generator.randbytes(1 << 20)
    digest.update(data)
    sending.sendall(data)
print(digest.hexdigest())
"""


def transfer(wires: Wires, source: int, target: int) -> None:
    """Send megabytes from one host to another over TCP and compare digests."""
    address = f"10.77.0.{target}"
    with subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{wires.hosts[target]}", sys.executable, "-c", RECEIVER, address],
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            result = subprocess.run(
                [
                    "nsenter",
                    f"--net=/run/netns/{wires.hosts[source]}",
                    sys.executable,
                    "-c",
                    SENDER,
                    address,
                    str(MEGABYTES),
                ],
                capture_output=True,
                text=True,
                timeout=90,
                check=True,
            )
            assert receiver.stdout.read() == result.stdout
        finally:
            receiver.kill()


@needs_root
@pytest.mark.parametrize("offloads", [True, False])
def test_tcp_passes_byte_for_byte(wires: Wires, tmp_path: Path, offloads: bool) -> None:
    """Some megabytes in 64 KB segments, and packet by packet; all checksums are correct on arrival."""
    if not offloads:
        for host in wires.hosts.values():
            sh(f"nsenter --net=/run/netns/{host} ethtool -K e0 tx off tso off gso off gro off")
    stats = tmp_path / "stats.json"
    interfaces = [option for number in wires.hosts for option in ("-i", f"{number}@s{number}")]
    program = str(KINDS.with_suffix(".json"))
    with process(*interfaces, program, "--", "--stats-file", str(stats), inside=wires.switch):
        in_namespace(wires, tmp_path / "updates")
        transfer(wires, 1, 2)
        transfer(wires, 2, 3)
    counts = json.loads(stats.read_text())["ports"]
    per_packet = counts["1"]["rx_bytes"] / counts["1"]["rx_packets"]
    assert per_packet > 20000 if offloads else per_packet < 9100
    assert counts["1"]["rx_segments"] >= MEGABYTES * (1 << 20) / 9000
    assert not any(count["unsendable"] or count["rx_dropped"] for count in counts.values())
    for host in wires.hosts.values():
        snmp = sh(f"nsenter --net=/run/netns/{host} cat /proc/net/snmp").splitlines()
        names, values = (line.split() for line in snmp if line.startswith("Tcp:"))
        assert dict(zip(names, values, strict=True))["InCsumErrors"] == "0"


@needs_root
def test_ports_are_not_promiscuous_afterwards(wires: Wires) -> None:
    with process("--no-p4", "-i", "1@s1", inside=wires.switch):
        assert "promiscuity 1" in sh(f"nsenter --net=/run/netns/{wires.switch} ip -d link show s1")
    assert "promiscuity 0" in sh(f"nsenter --net=/run/netns/{wires.switch} ip -d link show s1")


@needs_root
def test_a_port_that_goes_and_comes_is_told_on_stderr(wires: Wires, tmp_path: Path) -> None:
    """There is one line when a port no longer counts as connected, and one when it does again."""
    stats = tmp_path / "stats.json"
    arguments = ("--no-p4", "-i", "1@s1", "-i", "2@s2", "--stats-file", str(stats))
    with process(*arguments, inside=wires.switch) as (running, _):
        assert running.stderr is not None
        for state, words in (
            ("down", "is down: it counts as not connected, and copies to it are dropped"),
            ("up", "is up again, and counts as connected"),
        ):
            sh(f"nsenter --net=/run/netns/{wires.switch} ip link set s2 {state}")
            assert running.stderr.readline().split(" WARNING ")[1] == f"port 2 (s2) {words}\n"
        running.send_signal(signal.SIGTERM)
        assert running.stderr.read() == ""


@needs_root
def test_no_descriptor_left_does_not_end_the_data_plane(wires: Wires) -> None:
    """A link that goes and comes has its state looked up, which needs a descriptor."""
    with process("--no-p4", "-i", "1@s1", "-i", "2@s2", inside=wires.switch) as (running, _):
        assert running.stderr is not None

        def set_link(state: str) -> None:
            sh(f"nsenter --net=/run/netns/{wires.switch} ip link set s2 {state}")

        set_link("down")
        assert "is down" in running.stderr.readline()  # now it has all that forwarding needs
        sh(f"prlimit --pid {running.pid} --nofile={descriptors(running.pid)}:")
        for state in ("up", "down"):
            set_link(state)
            time.sleep(0.3)
            assert running.poll() is None, running.communicate()[1]
        sh(f"prlimit --pid {running.pid} --nofile=1024:")
        set_link("up")
        line = ""
        while "up again" not in line:
            line = running.stderr.readline()
            assert line


def test_signal_ends_streams_and_the_process() -> None:
    with process("--no-p4", "--grpc-server-addr", "127.0.0.1:0") as (running, address):
        client = Client(address)
        assert client.arbitration() == (0, 1)
        client.set_pipeline()
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
        client.close()


def test_trace_and_cpu_port() -> None:
    arguments = (str(KINDS.with_suffix(".json")), "--", "--cpu-port", str(CPU_PORT), "--trace")
    with process(*arguments, "--grpc-server-addr", "127.0.0.1:0", "--thrift-port", "9090") as (
        running,
        address,
    ):
        client = Client(address)
        client.arbitration()
        message = p4r.StreamMessageRequest()
        message.packet.payload = bytes(60)
        message.packet.metadata.add(metadata_id=1, value=b"\0")
        message.packet.metadata.add(metadata_id=2, value=b"\4")
        client.send(message)
        assert running.stdout is not None
        begin = time.monotonic()
        text = ""
        while "from_cpu" not in text:
            text += running.stdout.readline()
            assert time.monotonic() - begin < 20, text
        client.close()


def test_statistics_go_on_after_an_error(tmp_path: Path) -> None:
    """A folder in the way of the file that replaces the old one, as a stand-in for a full disk."""
    stats = tmp_path / "stats.json"
    obstacle = tmp_path / "stats.json.new"
    with process("--no-p4", "--grpc-server-addr", "127.0.0.1:0", "--stats-file", str(stats)) as (running, _):
        obstacle.mkdir()
        assert running.stderr is not None
        assert "statistics could not be written" in running.stderr.readline()
        before = json.loads(stats.read_text())["time"]
        obstacle.rmdir()
        wait_for(lambda: json.loads(stats.read_text())["time"] > before, "new statistics")
        obstacle.mkdir()  # for those at the end


SHELL = Path(sys.prefix) / "p4runtime-shell" / "bin" / "python"
SHELL_SCRIPT = """
import sys
import p4runtime_sh.shell as sh
info, program = sys.argv[2:]
sh.setup(device_id=3, grpc_addr=sys.argv[1], election_id=(0, 5), config=sh.FwdPipeConfig(info, program))
entry = sh.TableEntry("by_mac")(action="counted")
entry.match["mac"] = "02:00:00:00:00:01"
entry.match["port"] = "1"
entry.action["port"] = "2"
entry.insert()
group = sh.MulticastGroupEntry(7)
group.add(1, 0)
group.add(2, 1)
group.insert()
try:
    found = []
    sh.TableEntry("by_mac").read(lambda each: found.append(each))
    assert [each.action.msg().params[0].value for each in found] == [b"\\2"], found
    assert [len(each.replicas) for each in sh.MulticastGroupEntry(7).read()] == [2]
    counter = sh.CounterEntry("seen")
    counter.index = 3
    assert [each.packet_count for each in counter.read()] == [0]
    assert [each.packet_count for each in sh.DirectCounterEntry("hits").read()] == [0]
    entry.delete()
finally:
    sh.teardown()
print("all went well")
"""


@pytest.mark.skipif(not SHELL.exists(), reason="no p4runtime-shell: `checkmate shell --install` sets it up")
def test_p4runtime_shell_as_client() -> None:
    """This client shares no code with ours."""
    with process("--no-p4", "--grpc-server-addr", "127.0.0.1:0") as (_, address):
        result = subprocess.run(
            [
                SHELL,
                "-c",
                SHELL_SCRIPT,
                address,
                KINDS.with_suffix(".p4info.txtpb"),
                KINDS.with_suffix(".json"),
            ],
            env=os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
    assert "all went well" in result.stdout
