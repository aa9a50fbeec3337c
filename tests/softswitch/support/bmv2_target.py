"""simple_switch_grpc in its own network namespace, driven frame by frame, for differential tests.

The switch's gRPC server listens on a Unix socket, and its Thrift port is inside the namespace.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from finsy.proto import p4i, p4r, p4r_grpc
from pyroute2 import netns

from softswitch.program.state import State
from tests.softswitch.support import cables
from tests.softswitch.support.bmv2_entities import table_entry, updates
from tests.softswitch.support.scenarios import CPU_PORT

DEVICE = 1
SHORTEST = 14
"""Bytes that raw sockets send at least."""
VLAN_TYPES = (0x8100, 0x88A8)
VLAN_BYTES = 20
"""Bytes of a frame with a VLAN tag and the type after it."""
START_S = 20.0
ANSWER_S = 10.0


def carried(frame: bytes) -> bytes:
    """Return a frame as a network carries it: the kernel drops one that ends within a VLAN tag."""
    return frame.ljust(VLAN_BYTES, b"\0") if int.from_bytes(frame[12:14], "big") in VLAN_TYPES else frame


def missing() -> str | None:
    """Return the reason if the switch cannot run here, else `None`."""
    if shutil.which("simple_switch_grpc") is None:
        return "simple_switch_grpc is not on PATH"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


class Bmv2:
    """One running switch with a program loaded; ports are numbers, frames bytes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Path,
        channel: grpc.Channel,
        sockets: dict[int, socket.socket],
        p4info: p4i.P4Info,
    ) -> None:
        self._process = process
        self._log = log
        self._stub = p4r_grpc.P4RuntimeStub(channel)
        self._sockets = sockets
        self._p4info = p4info
        self._requests: queue.Queue[p4r.StreamMessageRequest | None] = queue.Queue()
        self._packets: queue.Queue[bytes] = queue.Queue()
        self._primary = threading.Event()
        self._layout = {m.preamble.name: m.metadata for m in p4info.controller_packet_metadata}
        arbitration = p4r.MasterArbitrationUpdate(device_id=DEVICE, election_id=p4r.Uint128(low=1))
        self._requests.put(p4r.StreamMessageRequest(arbitration=arbitration))
        self._responses = self._stub.StreamChannel(iter(self._requests.get, None), wait_for_ready=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._primary.wait(START_S):
            raise TimeoutError("simple_switch_grpc grants no arbitration")

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)
        self._responses.cancel()
        self._reader.join(ANSWER_S)

    def _read(self) -> None:
        try:
            for response in self._responses:
                if response.HasField("arbitration"):
                    self._primary.set()
                elif response.HasField("packet"):
                    self._packets.put(
                        self._header("packet_in", response.packet.metadata) + response.packet.payload
                    )
        except grpc.RpcError as error:
            # A switch that has died is reported when its frames are awaited.
            if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                raise

    def _header(self, name: str, values: object) -> bytes:
        """Return the program's controller header before the frame."""
        by_id = {m.metadata_id: int.from_bytes(m.value, "big") for m in values}  # type: ignore[attr-defined]
        total = bits = 0
        for field in self._layout.get(name, ()):
            total = total << field.bitwidth | by_id.get(field.id, 0)
            bits += field.bitwidth
        return total.to_bytes(bits // 8, "big")

    # Control plane

    def load(self, config: bytes) -> None:
        """Set the pipeline."""
        self._stub.SetForwardingPipelineConfig(
            p4r.SetForwardingPipelineConfigRequest(
                device_id=DEVICE,
                election_id=p4r.Uint128(low=1),
                action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
                config=p4r.ForwardingPipelineConfig(p4info=self._p4info, p4_device_config=config),
            )
        )

    def install(self, state: State) -> None:
        """Write a state: entries, defaults that are not the program's, groups, meters."""
        request = p4r.WriteRequest(device_id=DEVICE, election_id=p4r.Uint128(low=1), updates=updates(state))
        self._stub.Write(request)

    def counts(self, state: State) -> dict[tuple[str, object], tuple[int, int]]:
        """Return packets and bytes of every counter cell, and of every entry with a direct counter."""
        counts: dict[tuple[str, object], tuple[int, int]] = {}
        for counter in self._p4info.counters:
            query = p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter.preamble.id))
            for entity in self._entities(query):
                cell = entity.counter_entry
                data = (cell.data.packet_count, cell.data.byte_count)
                counts[counter.preamble.name, cell.index.index] = data
        for direct in self._p4info.direct_counters:
            table = state.tables[direct.direct_table_id]
            for entry in table.entries.values():
                read = p4r.DirectCounterEntry(table_entry=table_entry(table, entry, with_action=False))
                for entity in self._entities(p4r.Entity(direct_counter_entry=read)):
                    data_ = entity.direct_counter_entry.data
                    key = (table.name, (entry.match, entry.priority))
                    counts[key] = (data_.packet_count, data_.byte_count)
        return counts

    def _entities(self, query: p4r.Entity) -> Iterator[p4r.Entity]:
        for response in self._stub.Read(p4r.ReadRequest(device_id=DEVICE, entities=[query])):
            yield from response.entities

    # Data plane

    def send(self, port: int, frame: bytes) -> None:
        """Send a frame into a port; for `CPU_PORT`, as a PacketOut."""
        if port != CPU_PORT:
            self._sockets[port].send(frame)
            return
        fields = self._layout["packet_out"]
        size = sum(f.bitwidth for f in fields) // 8
        total = int.from_bytes(frame[:size], "big")
        shift = size * 8
        packet = p4r.PacketOut(payload=frame[size:])
        for field in fields:
            shift -= field.bitwidth
            value = total >> shift & ((1 << field.bitwidth) - 1)
            packet.metadata.add(metadata_id=field.id, value=value.to_bytes((field.bitwidth + 7) // 8, "big"))
        self._requests.put(p4r.StreamMessageRequest(packet=packet))

    def receive(self, last: dict[int, list[bytes]]) -> dict[int, list[bytes]]:
        """Return each port's outputs up to the last frames that are expected there, in any order.

        For ports that are not in `last`, these are their outputs when the others are done. Raises
        `TimeoutError` if a last frame does not arrive.
        """
        outputs: dict[int, list[bytes]] = {port: [] for port in (*self._sockets, CPU_PORT)}
        deadline = time.monotonic() + ANSWER_S
        for port in sorted(last):
            waiting = list(last[port])
            while waiting:
                frame = self._receive(port, deadline - time.monotonic())
                if frame is None:
                    self._check_alive()
                    raise TimeoutError(f"port {port} gave {outputs[port]}, but {waiting} should be among it")
                outputs[port].append(frame)
                if frame in waiting:
                    waiting.remove(frame)
        for port in set(outputs) - set(last):
            while (frame := self._receive(port, 0)) is not None:
                outputs[port].append(frame)
        return outputs

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            tail = self._log.read_text()[-2000:]
            raise RuntimeError(f"simple_switch_grpc ended with {self._process.returncode}: {tail}")

    def _receive(self, port: int, timeout: float) -> bytes | None:
        if port == CPU_PORT:
            try:
                return self._packets.get(timeout=timeout) if timeout > 0 else self._packets.get_nowait()
            except queue.Empty:
                return None
        return cables.receive(self._sockets[port], timeout)


@contextmanager
def running(name: str, config: bytes, p4info: p4i.P4Info, ports: list[int]) -> Iterator[Bmv2]:
    """Yield a switch with these ports and this program; remove everything at the end."""
    space = f"diff-{os.getpid()}-{name}"
    netns.create(space)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sockets = _cables(space, ports)
            process = _start(space, Path(folder), ports)
            try:
                with grpc.insecure_channel(f"unix:{folder}/grpc") as channel:
                    switch = Bmv2(process, Path(folder) / "log", channel, sockets, p4info)
                    switch.load(config)
                    yield switch
                    switch.close()
            finally:
                process.kill()
                process.wait()
                for cable in sockets.values():
                    cable.close()
    finally:
        netns.remove(space)


def _cables(space: str, ports: list[int]) -> dict[int, socket.socket]:
    """Create a veth pair in the namespace for each port, and return raw sockets on their far ends."""
    sockets = {}
    netns.pushns(space)
    try:
        for path in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):
            path.write_text("1")
        for port in ports:
            pair = f"ip link add s{port} mtu 9500 type veth peer name t{port} mtu 9500".split()
            subprocess.run(pair, check=True)
            for end in (f"s{port}", f"t{port}"):
                subprocess.run(["ip", "link", "set", end, "up"], check=True)
            sockets[port] = cables.open_cable(f"t{port}")
    finally:
        netns.popns()
    return sockets


def _start(space: str, folder: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    binary = shutil.which("simple_switch_grpc")
    assert binary is not None
    interfaces = [word for port in ports for word in ("-i", f"{port}@s{port}")]
    command = ["nsenter", f"--net=/run/netns/{space}", binary, "--no-p4", "--device-id", str(DEVICE)]
    command += interfaces
    command += ["--", "--grpc-server-addr", f"unix:{folder}/grpc", "--cpu-port", str(CPU_PORT)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    deadline = time.monotonic() + START_S
    while not (folder / "grpc").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"simple_switch_grpc didn't start: {(folder / 'log').read_text()}")
        time.sleep(0.05)
    return process
