"""A small synchronous P4Runtime client, for tests: one primary controller of one switch.

Sections below are those of the P4Runtime specification, version 1.4.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import grpc
from finsy import (
    P4CounterEntry,
    P4DirectCounterEntry,
    P4PacketIn,
    P4PacketOut,
    P4TableEntry,
    P4TableMatch,
)
from finsy.proto import U128, p4r, p4r_grpc

from controlplane.entities import (
    Entity,
    Holdings,
    MulticastGroup,
    Pairs,
    PortRate,
    TableEntry,
    Update,
    batches,
    difference,
)
from controlplane.p4runtime.codec import Codec

_TIMEOUT = 30.0
_LOAD_TIMEOUT = 120.0
_BATCH = 500
_ELECTION_ID = 1


class SwitchError(Exception):
    """The switch does not answer, or answers incorrectly."""


@dataclass(frozen=True, slots=True)
class CounterValue:
    """The value of a counter cell."""

    packets: int = 0
    bytes: int = 0

    def __add__(self, other: CounterValue) -> CounterValue:
        return CounterValue(self.packets + other.packets, self.bytes + other.bytes)

    def __sub__(self, other: CounterValue) -> CounterValue:
        return CounterValue(self.packets - other.packets, self.bytes - other.bytes)


@dataclass(frozen=True, slots=True)
class PuntedFrame:
    """A frame that the switch sent to its controller."""

    frame: bytes
    ingress_port: int


class PtfSwitch:
    """A connected switch; `close` ends the connection.

    `ports` maps the tests' port numbers to the switch's own.
    """

    def __init__(
        self, address: str, device_id: int, codec: Codec, ports: Mapping[int, int] | None = None
    ) -> None:
        self.codec = codec
        self._ports = dict(ports or {})
        self._tests_ports = {port: number for number, port in self._ports.items()}
        self.device_id = device_id
        self._channel = grpc.insecure_channel(address)
        self._stub = p4r_grpc.P4RuntimeStub(self._channel)
        self._requests: queue.SimpleQueue[p4r.StreamMessageRequest | None] = queue.SimpleQueue()
        self._arbitration: queue.SimpleQueue[p4r.MasterArbitrationUpdate] = queue.SimpleQueue()
        self._punted: queue.SimpleQueue[PuntedFrame] = queue.SimpleQueue()

    def connect(self, has_ended: Callable[[], bool], timeout: float = 30.0) -> None:
        """Become the primary controller (section 5); raise `SwitchError` on timeout, or if it `has_ended`."""
        ready = grpc.channel_ready_future(self._channel)
        deadline = time.monotonic() + timeout
        while True:
            try:
                ready.result(timeout=0.1)
                break
            except grpc.FutureTimeoutError:
                if has_ended() or time.monotonic() > deadline:
                    raise SwitchError("its P4Runtime server does not start") from None
        threading.Thread(target=self._listen, name="p4runtime-stream", daemon=True).start()
        update = p4r.MasterArbitrationUpdate(
            device_id=self.device_id, election_id=p4r.Uint128(high=0, low=_ELECTION_ID)
        )
        self._requests.put(p4r.StreamMessageRequest(arbitration=update))
        try:
            answer = self._arbitration.get(timeout=_TIMEOUT)
        except queue.Empty:
            raise SwitchError("no answer to the arbitration") from None
        if answer.status.code != 0:
            raise SwitchError(f"not the primary controller: {answer.status.message}")

    def _next_request(self) -> Iterator[p4r.StreamMessageRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _listen(self) -> None:
        try:
            for response in self._stub.StreamChannel(self._next_request()):
                if response.HasField("arbitration"):
                    self._arbitration.put(response.arbitration)
                elif response.HasField("packet"):
                    packet = P4PacketIn.decode(response, self.codec.schema)
                    port = int(packet["ingress_port"])
                    self._punted.put(PuntedFrame(packet.payload, self._tests_ports.get(port, port)))
        except grpc.RpcError:
            return  # closed, by us or with the switch: the next call reports it

    def set_pipeline(self) -> None:
        """Load the program (section 7)."""
        self._stub.SetForwardingPipelineConfig(
            p4r.SetForwardingPipelineConfigRequest(
                device_id=self.device_id,
                election_id=U128.encode(_ELECTION_ID),
                action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
                config=self.codec.pipeline_config(),
            ),
            timeout=_LOAD_TIMEOUT,
        )

    def take_over(self) -> None:
        """Empty a running switch if it runs the program, else load the program."""
        request = p4r.GetForwardingPipelineConfigRequest(
            device_id=self.device_id, response_type=p4r.GetForwardingPipelineConfigRequest.P4INFO_AND_COOKIE
        )
        try:
            reply = self._stub.GetForwardingPipelineConfig(request, timeout=_TIMEOUT)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                raise
            reply = p4r.GetForwardingPipelineConfigResponse()
        if self.codec.schema.has_p4info(reply.config.p4info):
            self.reconcile(Holdings())
        else:
            self.set_pipeline()

    def close(self) -> None:
        """Close stream and channel."""
        self._requests.put(None)
        self._channel.close()

    def put(self, entities: Iterable[Entity]) -> None:
        """Insert entities."""
        self.write(Update(None, entity) for entity in entities)

    def reconcile(self, target: Holdings) -> int:
        """Make the switch hold exactly `target`; return the number of updates."""
        updates = difference(self.holdings(), target)
        self.write(updates)
        return len(updates)

    def write(self, updates: Iterable[Update]) -> None:
        """Apply updates, in order."""
        for batch in batches(updates, _BATCH):
            self._stub.Write(
                p4r.WriteRequest(
                    device_id=self.device_id,
                    election_id=U128.encode(_ELECTION_ID),
                    updates=[self.codec.encode_update(self._there(update)) for update in batch],
                ),
                timeout=_TIMEOUT,
            )

    def holdings(self) -> Holdings:
        """Return all table entries and multicast groups that the switch holds."""
        holdings = self.codec.decode_all(self._read(self.codec.read_all()))
        return Holdings.from_entities(_renumber_entity(entity, self._tests_ports) for entity in holdings)

    def _there(self, update: Update) -> Update:
        """Return an update with the switch's own port numbers."""
        old, new = (entity and _renumber_entity(entity, self._ports) for entity in (update.old, update.new))
        return Update(old, new)

    def _read(self, entities: Iterable[p4r.Entity]) -> Iterator[p4r.Entity]:
        request = p4r.ReadRequest(device_id=self.device_id, entities=entities)
        for response in self._stub.Read(request, timeout=_TIMEOUT):
            yield from response.entities

    def direct_count(self, entry: TableEntry) -> CounterValue:
        """Return the direct counter of one entry (section 9.4)."""
        renumbered = _renumber_entity(entry, self._ports)
        assert isinstance(renumbered, TableEntry)
        key = P4TableEntry(
            renumbered.table, match=P4TableMatch(renumbered.match), priority=renumbered.priority
        )
        read = P4DirectCounterEntry(table_entry=key).encode(self.codec.schema)
        (data,) = (e.direct_counter_entry.data for e in self._read([read]))
        return CounterValue(data.packet_count, data.byte_count)

    def counts(self, counter: str) -> list[CounterValue]:
        """Return all cells of an indexed counter (section 9.3)."""
        entries = [
            P4CounterEntry.decode(e, self.codec.schema)
            for e in self._read([self.codec.read_counter(counter)])
        ]
        cells = {entry.index: CounterValue(entry.packet_count, entry.byte_count) for entry in entries}
        return [cells[index] for index in range(len(cells))]

    def packet_out(self, port: int, frame: bytes) -> None:
        """Send a frame out of a port (section 16.1)."""
        packet = P4PacketOut(frame, padding=0, egress_port=self._ports.get(port, port))
        self._requests.put(packet.encode_update(self.codec.schema))

    def next_punted(self, timeout: float) -> PuntedFrame | None:
        """Return the next frame for the controller, or `None` after `timeout` seconds."""
        try:
            return self._punted.get(timeout=timeout)
        except queue.Empty:
            return None


def _renumber_entity(entity: Entity, ports: Mapping[int, int]) -> Entity:
    """Return the entity with other port numbers: of replicas, a key, a parameter or a meter's cell."""
    if isinstance(entity, MulticastGroup):
        return MulticastGroup(entity.id, frozenset((ports.get(port, port), i) for port, i in entity.replicas))
    if isinstance(entity, PortRate):
        return replace(entity, port=ports.get(entity.port, entity.port))

    def renumber(pairs: Pairs) -> Pairs:
        return tuple(
            (name, ports.get(value, value) if name == "port" and isinstance(value, int) else value)
            for name, value in pairs
        )

    return replace(entity, match=renumber(entity.match), params=renumber(entity.params))
