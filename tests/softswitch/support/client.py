"""A plain P4Runtime client, and hosts in namespaces, for tests of the switch."""

from __future__ import annotations

import os
import queue
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from finsy.proto import U128, p4i, p4r, p4r_grpc, rpc_status
from google.protobuf import text_format

from softswitch.p4runtime.service import P4RuntimeService
from softswitch.switch import SoftSwitch
from tests.softswitch.support.memory_port import MemoryPort

DEVICE = 3
KINDS = Path(__file__).parents[1] / "programs" / "kinds"

Config = p4r.SetForwardingPipelineConfigRequest


def read_p4info(program: Path = KINDS) -> p4i.P4Info:
    return text_format.Parse(program.with_suffix(".p4info.txtpb").read_text(), p4i.P4Info())


def number(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8 or 1)


class Failure(Exception):
    """An RPC's status: the code, the message, and the p4.v1.Error of each element of its batch."""

    def __init__(self, error: grpc.RpcError) -> None:
        assert isinstance(error, grpc.Call)
        super().__init__(f"{error.code()}: {error.details()}")
        self.code: str = error.code().name
        self.message: str = error.details() or ""
        self.errors: list[p4r.Error] = []
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                assert isinstance(value, bytes)
                status = rpc_status.Status.FromString(value)
                assert status.code == error.code().value[0]
                for detail in status.details:
                    self.errors.append(p4r.Error())
                    assert detail.Unpack(self.errors[-1])

    @property
    def codes(self) -> list[int]:
        return [error.canonical_code for error in self.errors]


class Client:
    """A controller's stream and RPCs, as raw messages."""

    def __init__(
        self, address: str, election_id: int | None = 1, device: int = DEVICE, role: str = ""
    ) -> None:
        options = [("grpc.max_metadata_size", 4 << 20), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.stub = p4r_grpc.P4RuntimeStub(self.channel)
        self.device = device
        self.role = role
        self.election_id = election_id
        self.p4info = read_p4info()
        self._requests: queue.SimpleQueue[p4r.StreamMessageRequest | None] = queue.SimpleQueue()
        self._responses = self.stub.StreamChannel(iter(self._requests.get, None))
        self.arbitrate(election_id)

    def arbitrate(self, election_id: int | None, device: int | None = None, role: str | None = None) -> None:
        message = p4r.StreamMessageRequest()
        message.arbitration.device_id = self.device if device is None else device
        if role or (role is None and self.role):
            message.arbitration.role.name = self.role if role is None else role
        if election_id is not None:
            message.arbitration.election_id.CopyFrom(U128.encode(election_id))
        self.election_id = election_id
        self._requests.put(message)

    def send(self, message: p4r.StreamMessageRequest) -> None:
        self._requests.put(message)

    def receive(self) -> p4r.StreamMessageResponse:
        try:
            return next(self._responses)
        except grpc.RpcError as error:
            raise Failure(error) from None

    def arbitration(self) -> tuple[int, int | None]:
        """Return status code and election id of the next message, which must be an arbitration."""
        message = self.receive()
        assert message.WhichOneof("update") == "arbitration", message
        arbitration = message.arbitration
        assert arbitration.device_id == self.device
        return arbitration.status.code, U128.decode(arbitration.election_id) if arbitration.HasField(
            "election_id"
        ) else None

    def close(self) -> None:
        self._requests.put(None)
        self._responses.cancel()
        self.channel.close()

    def set_pipeline(
        self,
        action: p4r.SetForwardingPipelineConfigRequest.Action.ValueType = Config.VERIFY_AND_COMMIT,
        program: Path | None = KINDS,
        change: Callable[[p4r.SetForwardingPipelineConfigRequest], None] | None = None,
    ) -> None:
        request = p4r.SetForwardingPipelineConfigRequest(device_id=self.device, action=action, role=self.role)
        if self.election_id is not None:
            request.election_id.CopyFrom(U128.encode(self.election_id))
        if program is not None:
            request.config.p4info.CopyFrom(read_p4info(program))
            request.config.p4_device_config = program.with_suffix(".json").read_bytes()
            request.config.cookie.cookie = 77
        if change is not None:
            change(request)
        try:
            self.stub.SetForwardingPipelineConfig(request)
        except grpc.RpcError as error:
            raise Failure(error) from None

    def get_pipeline(self, response_type: int = 0, device: int = DEVICE) -> p4r.ForwardingPipelineConfig:
        request = p4r.GetForwardingPipelineConfigRequest(device_id=device)
        request.response_type = response_type  # type: ignore[assignment]
        try:
            return self.stub.GetForwardingPipelineConfig(request).config
        except grpc.RpcError as error:
            raise Failure(error) from None

    def write(self, *updates: p4r.Update, atomicity: int = 0, **fields: object) -> None:
        request = p4r.WriteRequest(device_id=self.device, updates=updates, role=self.role)
        request.atomicity = atomicity  # type: ignore[assignment]
        if self.election_id is not None:
            request.election_id.CopyFrom(U128.encode(self.election_id))
        for name, value in fields.items():
            setattr(request, name, value)
        try:
            self.stub.Write(request)
        except grpc.RpcError as error:
            raise Failure(error) from None

    def read(self, *entities: p4r.Entity, device: int = DEVICE) -> list[p4r.Entity]:
        try:
            answer = self.stub.Read(p4r.ReadRequest(device_id=device, entities=entities))
            return [entity for response in answer for entity in response.entities]
        except grpc.RpcError as error:
            raise Failure(error) from None

    def id(self, name: str) -> int:
        info = self.p4info
        for kind in (info.tables, info.actions, info.counters, info.registers):
            for element in kind:
                if element.preamble.name == name:
                    return element.preamble.id
        raise KeyError(name)

    def entry(self, table: str, action: str | None = None, *params: int, priority: int = 0) -> p4r.Entity:
        """Return an entity with a table entry without a match."""
        entity = p4r.Entity()
        entity.table_entry.table_id = self.id(table)
        entity.table_entry.priority = priority
        if action is not None:
            entity.table_entry.action.action.action_id = self.id(action)
            for place, value in enumerate(params, 1):
                entity.table_entry.action.action.params.add(param_id=place, value=number(value))
        return entity

    def mac_entry(self, mac: int, port: int, action: str | None = None, *params: int) -> p4r.Entity:
        """Return an entity with an entry of the exact table."""
        entity = self.entry("by_mac", action, *params)
        for place, value in enumerate((mac, port), 1):
            entity.table_entry.match.add(field_id=place).exact.value = number(value)
        return entity

    def group(self, group: int, *replicas: tuple[int, int]) -> p4r.Entity:
        entity = p4r.Entity()
        entry = entity.packet_replication_engine_entry.multicast_group_entry
        entry.multicast_group_id = group
        for port, instance in replicas:
            entry.replicas.add(port=number(port), instance=instance)
        return entity


def insert(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.INSERT, entity=entity)


def modify(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.MODIFY, entity=entity)


def delete(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.DELETE, entity=entity)


@dataclass
class Running:
    """A running switch; `client` creates controllers that are closed at the end."""

    switch: SoftSwitch
    service: P4RuntimeService
    address: str
    ports: dict[int, MemoryPort]
    clients: list[Client]

    def client(self, election_id: int | None = 1, **fields: object) -> Client:
        client = Client(self.address, election_id, **fields)  # type: ignore[arg-type]
        self.clients.append(client)
        return client


def wait_for(condition: Callable[[], bool], label: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{label}: not within {timeout_s} s"
        time.sleep(0.005)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def sh(command: str) -> str:
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout


@dataclass
class Wires:
    """A namespace `switch` with interfaces s1, s2, ..., each connected to e0 (10.77.0.N/24) of a host."""

    switch: str
    hosts: dict[int, str]

    def mac(self, host: int) -> int:
        address = sh(f"nsenter --net=/run/netns/{self.hosts[host]} ip -br link show e0").split()[2]
        return int(address.replace(":", ""), 16)
