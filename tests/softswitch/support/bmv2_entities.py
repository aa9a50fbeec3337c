"""A state of the embedded target as P4Runtime entities, for BMv2."""

from __future__ import annotations

from collections.abc import Iterator

from finsy.proto import p4r

from softswitch.program.match import MatchKind
from softswitch.program.meters import MeterCell
from softswitch.program.state import Entry, GroupReplica, State, Table


def updates(state: State) -> Iterator[p4r.Update]:
    """Yield the updates that make a state: groups, meters, entries, defaults that are not the program's."""
    for number, replicas in state.groups.items():
        yield _inserted(p4r.Entity(packet_replication_engine_entry=_group(number, replicas)))
    for number, cells in state.meters.items():
        for index, cell in enumerate(cells):
            if cell is not None:
                yield _modified(p4r.Entity(meter_entry=_meter(number, index, cell)))
    for table in state.tables.values():
        if table.const_entries:
            continue
        for entry in table.entries.values():
            yield _inserted(p4r.Entity(table_entry=table_entry(table, entry)))
        if table.default is not table.initial_default and table.default is not None:
            yield _modified(p4r.Entity(table_entry=table_entry(table, table.default)))


def _inserted(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.INSERT, entity=entity)


def _modified(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.MODIFY, entity=entity)


def _rates(cell: MeterCell) -> p4r.MeterConfig:
    return p4r.MeterConfig(**cell.rates._asdict())


def _meter(number: int, index: int, cell: MeterCell) -> p4r.MeterEntry:
    return p4r.MeterEntry(meter_id=number, index=p4r.Index(index=index), config=_rates(cell))


def _bytes(value: int) -> bytes:
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def _group(number: int, replicas: tuple[GroupReplica, ...]) -> p4r.PacketReplicationEngineEntry:
    copies = [p4r.Replica(egress_port=r.port, instance=r.instance) for r in replicas]
    group = p4r.MulticastGroupEntry(multicast_group_id=number, replicas=copies)
    return p4r.PacketReplicationEngineEntry(multicast_group_entry=group)


def table_entry(table: Table, entry: Entry, with_action: bool = True) -> p4r.TableEntry:
    """Return an entry, or only its key."""
    message = p4r.TableEntry(table_id=table.id, priority=entry.priority, is_default_action=entry.is_default)
    for field, key in zip(table.fields, () if entry.is_default else entry.match, strict=not entry.is_default):
        if key is None:
            continue
        match = message.match.add(field_id=field.id)
        if isinstance(key, int) and field.kind is MatchKind.EXACT:
            match.exact.value = _bytes(key)
        elif isinstance(key, int):
            match.optional.value = _bytes(key)
        elif field.kind is MatchKind.LPM:
            match.lpm.value, match.lpm.prefix_len = _bytes(key[0]), key[1]
        elif field.kind is MatchKind.TERNARY:
            match.ternary.value, match.ternary.mask = _bytes(key[0] & key[1]), _bytes(key[1])
        else:
            match.range.low, match.range.high = _bytes(key[0]), _bytes(key[1])
    if with_action:
        message.action.action.action_id = entry.action
        for number, value in enumerate(entry.params, 1):
            message.action.action.params.add(param_id=number, value=_bytes(value))
        if entry.meter is not None:
            message.meter_config.CopyFrom(_rates(entry.meter))
    return message
