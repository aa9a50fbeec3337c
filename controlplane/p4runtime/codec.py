"""Translation of entities to P4Runtime messages and back, by the program's P4Info."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from finsy import (
    P4CounterData,
    P4CounterEntry,
    P4DirectCounterEntry,
    P4MeterConfig,
    P4MeterEntry,
    P4MulticastGroupEntry,
    P4Schema,
    P4TableAction,
    P4TableEntry,
    P4TableMatch,
)
from finsy.p4entity import P4Replica
from finsy.proto import p4i, p4r

from checkmate.job.schema import Switch
from checkmate.job.tofino import chips
from controlplane.entities import (
    FEATURE_OF_TABLE,
    Entity,
    Holdings,
    MulticastGroup,
    Pairs,
    PortRate,
    Rate,
    TableEntry,
    Update,
    Value,
)
from controlplane.tofino import device_config
from controlplane.tofino.device_config import NotCompiled
from p4src import artifacts
from p4src.tofino import P4INFO

PROGRAM = "checkmate_v1model"
STRANGER_METER = "stranger_rate"
_VERBS = {
    "insert": p4r.Update.INSERT,
    "modify": p4r.Update.MODIFY,
    "delete": p4r.Update.DELETE,
}


def compiled_files(target: str) -> tuple[Path, Path]:
    """Return P4Info and device configuration of the committed v1model program for `target`."""
    folder = artifacts(target)
    return folder / f"{PROGRAM}.p4info.txtpb", folder / f"{PROGRAM}.json"


class Codec:
    """Translator for one program.

    `server` is a Tofino's P4Runtime server, and `without` the reason for a missing device configuration.
    """

    def __init__(
        self,
        schema: P4Schema,
        *,
        server: Literal["stratum", "pi"] | None = None,
        without: NotCompiled | None = None,
    ) -> None:
        self.schema = schema
        self._server = server
        self._without = without
        self._fields = {
            table.alias: tuple(field.alias for field in table.match_fields) for table in schema.tables
        }
        self._params = {
            action.alias: tuple(param.name for param in action.params) for action in schema.actions
        }

    @classmethod
    def for_target(
        cls, target: str, p4runtime: Literal["stratum", "pi"] = "stratum", cpu_port: int | None = None
    ) -> Codec:
        """Return the codec of the program compiled for `target`, for its P4Runtime server.

        A Tofino's device configuration may be missing until it is loaded. If even its P4Info is missing,
        v1model's is used for planning: both programs have the same tables, of the sizes in `types.p4`.
        """
        if target not in chips.TARGETS:
            p4info, config = compiled_files(target)
            return cls(P4Schema(p4info, config))
        make = partial(cls, server=p4runtime)
        p4info = artifacts(target) / P4INFO
        if not p4info.exists():
            missing = NotCompiled(f"{p4info} is missing; `python -m p4src.compile {target}` makes it")
            return make(P4Schema(compiled_files("bmv2")[0]), without=missing)
        try:
            program = device_config.read_program(target)
            if cpu_port is not None:
                device_config.check_cpu_port(program, target, cpu_port)
            blob = device_config.pack(program, p4runtime)
        except NotCompiled as error:
            return make(P4Schema(p4info), without=error)
        return make(P4Schema(p4info, blob))

    @classmethod
    def for_switch(cls, switch: Switch) -> Codec:
        """Return the codec of a switch's program."""
        return cls.for_target(switch.target, switch.p4runtime, switch.packet_port)

    def for_program(self, p4info: p4i.P4Info) -> Codec:
        """Return the codec of another program that the same server runs."""
        return Codec(P4Schema(p4info), server=self._server)

    def pipeline_config(self) -> p4r.ForwardingPipelineConfig:
        """Return the message that loads the program; raise `NotCompiled` without the compiler's output."""
        if self._without is not None:
            raise self._without
        return self.schema.get_pipeline_config()

    @property
    def cookie(self) -> int | None:
        """A number that differs between builds of one P4Info, or `None` if the build is unknown."""
        return None if self._without is not None else self.schema.p4cookie

    def encode(self, entity: Entity) -> p4r.Entity:
        """Return a P4Runtime entity."""
        if isinstance(entity, MulticastGroup):
            replicas = [P4Replica(port, instance=instance) for port, instance in sorted(entity.replicas)]
            return P4MulticastGroupEntry(entity.id, replicas=replicas).encode(self.schema)
        if isinstance(entity, PortRate):
            config = None if entity.rate is None else _meter_config(entity.rate)
            return P4MeterEntry(STRANGER_METER, index=entity.port, config=config).encode(self.schema)
        return P4TableEntry(
            entity.table,
            match=P4TableMatch(entity.match),
            action=P4TableAction(entity.action, **dict(entity.params)),
            priority=entity.priority,
            meter_config=None if entity.rate is None else _meter_config(entity.rate),
        ).encode(self.schema)

    def encode_update(self, update: Update) -> p4r.Update:
        """Return a P4Runtime update. A meter's cell always exists, so it can only be modified."""
        message = p4r.Update(type=_VERBS[update.verb], entity=self.encode(update.entity))
        if isinstance(update.entity, PortRate):
            message.type = p4r.Update.MODIFY
            if update.new is None:
                message.entity.meter_entry.ClearField("config")
        return message

    def decode(self, message: p4r.Entity) -> Entity | None:
        """Return our entity, or `None` for an entry that we never write, such as a default entry."""
        if message.HasField("packet_replication_engine_entry"):
            group = message.packet_replication_engine_entry.multicast_group_entry
            replicas = [P4Replica.decode(replica) for replica in group.replicas]
            return MulticastGroup(group.multicast_group_id, frozenset((r.port, r.instance) for r in replicas))
        if message.HasField("meter_entry"):
            return _port_rate(message.meter_entry)
        entry = P4TableEntry.decode(message, self.schema)
        if entry.is_default_action or entry.table_id not in FEATURE_OF_TABLE:
            return None
        action = cast(P4TableAction, entry.action)
        return TableEntry(
            entry.table_id,
            self._match(entry),
            action.name,
            tuple((name, int(action.args[name])) for name in self._params[action.name]),
            entry.priority,
            _rate(message.table_entry),
        )

    def _match(self, entry: P4TableEntry) -> Pairs:
        match = entry.match or P4TableMatch()
        return tuple((name, _key(match[name])) for name in self._fields[entry.table_id] if name in match)

    def read_all(self) -> list[p4r.Entity]:
        """Return the wildcard reads for all that a switch holds: every table, group and port's rate."""
        entries = P4TableEntry().encode(self.schema)
        entries.table_entry.meter_config.SetInParent()  # otherwise they come without their rates
        reads = [entries, P4MulticastGroupEntry().encode(self.schema)]
        if self._server != "pi":  # the drivers have no function for it
            reads.append(P4MeterEntry(STRANGER_METER).encode(self.schema))
        return reads

    def read_tables(self, names: Iterable[str]) -> list[p4r.Entity]:
        """Return the wildcard reads for some tables."""
        return [P4TableEntry(name).encode(self.schema) for name in names]

    def decode_entries(self, answers: Iterable[p4r.Entity]) -> Holdings:
        """Return what a switch holds, from the answers to `read_tables`."""
        return Holdings.from_entities(entity for entity in map(self.decode, answers) if entity is not None)

    def decode_all(self, answers: Iterable[p4r.Entity]) -> Holdings:
        """Return what a switch holds, from the answers to `read_all`."""
        holdings = self.decode_entries(answers)
        if self._server == "pi":
            for port in range(self.schema.meters[STRANGER_METER].size):
                holdings.put(PortRate(port, None))
        return holdings

    def read_direct_counters(self, table: str, entries: Iterable[TableEntry]) -> list[p4r.Entity]:
        """Return the reads of a table's direct counters, if it holds these entries.

        A Tofino's Stratum returns all of them only with the entries (`BfrtTableManager::ReadTableEntry`).
        PI asks the chip only if the read is of one entry (`direct_counter_read` in its `device_mgr.cpp`).
        """
        if self._server == "stratum":
            return [P4TableEntry(table, counter_data=P4CounterData()).encode(self.schema)]
        keys = [P4TableEntry(table)]
        if self._server == "pi":
            keys = [
                P4TableEntry(table, match=P4TableMatch(entry.match), priority=entry.priority)
                for entry in entries
            ]
        return [P4DirectCounterEntry(table_entry=key).encode(self.schema) for key in keys]

    def decode_direct_counter(self, message: p4r.Entity) -> tuple[dict[str, Any], int, int]:
        """Return match fields by name, packets and bytes in an answer to `read_direct_counters`."""
        if message.HasField("table_entry"):
            table_entry = P4TableEntry.decode(message, self.schema)
            data = table_entry.counter_data or P4CounterData()
            return dict(table_entry.match or {}), data.packet_count, data.byte_count
        entry = P4DirectCounterEntry.decode(message, self.schema)
        assert entry.table_entry is not None
        return dict(entry.table_entry.match or {}), entry.packet_count, entry.byte_count

    def read_counter(self, counter: str) -> p4r.Entity:
        """Return the wildcard read for all cells of an indexed counter."""
        return P4CounterEntry(counter).encode(self.schema)


def _key(value: object) -> Value:
    if isinstance(value, tuple):
        return (int(value[0]), int(value[1]))
    return int(cast(int, value))


def _meter_config(rate: Rate) -> P4MeterConfig:
    """Return one rate as a two-rate meter (RFC 2698) without yellow packets."""
    return P4MeterConfig(cir=rate.packets, cburst=rate.burst, pir=rate.packets, pburst=rate.burst)


def _rate(message: p4r.TableEntry | p4r.MeterEntry) -> Rate | None:
    config = message.meter_config if isinstance(message, p4r.TableEntry) else message.config
    return Rate(config.cir, config.cburst) if config.cir else None


def _port_rate(message: p4r.MeterEntry) -> PortRate | None:
    rate = _rate(message)
    return None if rate is None else PortRate(message.index.index, rate)
