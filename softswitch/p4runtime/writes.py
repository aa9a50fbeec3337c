"""Updates of a pipeline's state: each is checked, applied, and can be undone.

P4Runtime specification, sections 9 (updates) and 12 (batches).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from finsy.proto import p4d, p4r

from softswitch.p4runtime.entities import TableCodec, decode_meter
from softswitch.p4runtime.fieldcodecs import invalid, parse, to_bytes
from softswitch.p4runtime.pipeline import ArrayInfo, Pipeline, Undo, find
from softswitch.program.meters import MeterCell
from softswitch.program.state import CounterCell, Entry, GroupReplica, StatusError

MAX_GROUP = 0xFFFF
MAX_INSTANCE = 0xFFFF
PORT_BITS = 32


def apply(pipeline: Pipeline, update: p4r.Update) -> Undo:
    """Apply one update; raise `StatusError` if it is refused.

    Returns:
        Functions that undo it, to be called from the last to the first.
    """
    if update.type not in (p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE):
        raise invalid("the update's type is unspecified")
    kind = update.entity.WhichOneof("entity")
    if kind is None:
        raise invalid("the update has no entity")
    writer = _WRITERS.get(kind)
    if writer is None:
        raise StatusError("UNIMPLEMENTED", f"{kind} is not supported by this target")
    undo: Undo = []
    writer(pipeline, update, undo)
    return undo


def _codec(pipeline: Pipeline, table_id: int) -> TableCodec:
    if not table_id:
        raise invalid("table 0 does not exist")
    return find(pipeline.tables, table_id, "table")


def _table_entry(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    message = update.entity.table_entry
    codec = _codec(pipeline, message.table_id)
    if message.is_default_action:
        _default_entry(codec, update.type, message, undo)
        return
    if codec.info.is_const_table and (update.type != p4r.Update.MODIFY or message.HasField("action")):
        raise StatusError("PERMISSION_DENIED", f"table {codec.name} has only constant entries")
    table = codec.table
    if update.type == p4r.Update.MODIFY:
        _modify(codec, message, undo)
    elif update.type == p4r.Update.DELETE:
        if message.is_const:
            raise invalid(f"table {codec.name}: is_const may not be set in a write")
        undo.append(partial(table.insert, table.delete(*codec.key(message))))
    else:
        if not codec.fields:
            raise invalid(f"table {codec.name} has no key, so it has only a default entry")
        entry = codec.entry(message)
        table.insert(entry)
        undo.append(partial(table.delete, entry.match, entry.priority))


def _modify(codec: TableCodec, message: p4r.TableEntry, undo: Undo) -> None:
    codec.check(message)
    old = _existing_entry(codec, message)
    action, params = old.action, old.params
    if message.HasField("action"):
        action, params = codec.action(message.action, default=False)
    if message.HasField("counter_data"):
        _set_count(old.count, message.counter_data, undo)
    meter = decode_meter(message, "meter_config", f"table {codec.name}: meter_config")
    if codec.info.is_const_table:
        if meter is not None:
            _set_meter(old, meter, undo)
        return
    undo.append(partial(codec.table.modify, replace(old)))
    new = Entry(old.match, action, params, old.priority, message.metadata, message.controller_metadata)
    new.meter = meter
    codec.table.modify(new)


def _default_entry(codec: TableCodec, kind: int, message: p4r.TableEntry, undo: Undo) -> None:
    table = codec.table
    codec.check(message)
    if kind != p4r.Update.MODIFY:
        raise invalid(f"table {codec.name}: the default entry can only be modified")
    if table.const_default:
        raise StatusError("PERMISSION_DENIED", f"table {codec.name}: the default action is constant")
    old = table.default
    entry = codec.entry(message) if message.HasField("action") else None
    if entry is not None and old is not None and not message.HasField("counter_data"):
        entry.count = old.count
    undo.append(partial(table.set_default, old))
    table.set_default(entry)
    if entry is None and table.default is not None:
        _set_count(table.default.count, p4r.CounterData(), undo)


def _set_count(count: CounterCell, data: p4r.CounterData, undo: Undo) -> None:
    undo.append(partial(count.set, count.packets, count.bytes))
    count.set(data.packet_count, data.byte_count)


def _set_meter(entry: Entry, meter: MeterCell | None, undo: Undo) -> None:
    undo.append(partial(setattr, entry, "meter", entry.meter))
    entry.meter = meter


def _only_modify(update: p4r.Update, kind: str) -> None:
    if update.type != p4r.Update.MODIFY:
        raise invalid(f"{kind} can only be modified")


def _direct_counter(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    message = update.entity.direct_counter_entry
    _only_modify(update, "a direct counter entry")
    codec = _codec(pipeline, message.table_entry.table_id)
    if not codec.has_counter:
        raise invalid(f"table {codec.name} has no direct counter")
    entry = _existing_entry(codec, message.table_entry)
    if message.HasField("data"):
        _set_count(entry.count, message.data, undo)


def _existing_entry(codec: TableCodec, message: p4r.TableEntry) -> Entry:
    """Return the entry that a message names; raise `StatusError` NOT_FOUND."""
    table = codec.table
    entry = table.default if message.is_default_action else table.entries.get(codec.key(message))
    if entry is None:
        raise StatusError("NOT_FOUND", f"table {codec.name} has no such entry")
    return entry


def _direct_meter(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    message = update.entity.direct_meter_entry
    _only_modify(update, "a direct meter entry")
    _no_meter_counters(message)
    codec = _codec(pipeline, message.table_entry.table_id)
    codec.check_meter(message.table_entry.is_default_action)
    entry = _existing_entry(codec, message.table_entry)
    _set_meter(entry, decode_meter(message, "config", f"the direct meter of table {codec.name}"), undo)


def _meter(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    """Set the cell of an index, or all of them; each has its own buckets."""
    message = update.entity.meter_entry
    _only_modify(update, "a meter entry")
    _no_meter_counters(message)
    info = find(pipeline.meters, message.meter_id, "meter")
    indices = info.cells(message.index if message.HasField("index") else None)
    cells = pipeline.program.state.meters[info.id]
    new = [decode_meter(message, "config", f"meter {info.name}") for _ in indices]
    whole = slice(indices.start, indices.stop)
    undo.append(partial(cells.__setitem__, whole, cells[whole]))
    cells[whole] = new


def _no_meter_counters(message: p4r.MeterEntry | p4r.DirectMeterEntry) -> None:
    if message.HasField("counter_data"):
        raise StatusError("UNIMPLEMENTED", "counters of meters are not supported by this target")


def _counter(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    message = update.entity.counter_entry
    _only_modify(update, "a counter entry")
    info = find(pipeline.counters, message.counter_id, "counter")
    cells = pipeline.program.state.counters[info.id]
    indices = info.cells(message.index if message.HasField("index") else None)
    if message.HasField("data"):
        for at in indices:
            _set_count(cells[at], message.data, undo)


def register_value(info: ArrayInfo, data: p4d.P4Data) -> int:
    """Return the cell's value in a P4Data; raise `StatusError` INVALID_ARGUMENT if it is wrong."""
    kind = "bool" if info.truth else "bitstring"
    if data.WhichOneof("data") != kind:
        raise invalid(f"register {info.name} takes a {kind}, not {data.WhichOneof('data')}")
    if info.truth:
        return int(data.bool)
    label = f"register {info.name}: the value"
    if not info.signed:
        return parse(data.bitstring, info.width, label)
    value = int.from_bytes(data.bitstring, signed=True)
    if not data.bitstring or not -(1 << info.width - 1) <= value < 1 << info.width - 1:
        raise invalid(f"{label} does not fit in {info.width} bits, signed")
    return value


def _register(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    message = update.entity.register_entry
    _only_modify(update, "a register entry")
    info = find(pipeline.registers, message.register_id, "register")
    indices = info.cells(message.index if message.HasField("index") else None)
    value = register_value(info, message.data)
    values = pipeline.program.state.registers[info.id]
    undo.append(
        partial(values.__setitem__, slice(indices.start, indices.stop), values[indices.start : indices.stop])
    )
    values[indices.start : indices.stop] = [value] * len(indices)


def _group(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    """Apply an update of a multicast group."""
    message = update.entity.packet_replication_engine_entry
    if message.WhichOneof("type") != "multicast_group_entry":
        raise StatusError("UNIMPLEMENTED", f"{message.WhichOneof('type')} is not supported by this target")
    number = message.multicast_group_entry.multicast_group_id
    if not 0 < number <= MAX_GROUP:
        raise invalid(f"multicast group {number}: it must be 1 to {MAX_GROUP}")
    groups, programmed = pipeline.groups, pipeline.program.state.groups
    if update.type == p4r.Update.INSERT and number in groups:
        raise StatusError("ALREADY_EXISTS", f"multicast group {number} already exists")
    if update.type != p4r.Update.INSERT and number not in groups:
        raise StatusError("NOT_FOUND", f"multicast group {number} does not exist")
    if update.type == p4r.Update.INSERT:
        undo += [partial(groups.pop, number, None), partial(programmed.pop, number, None)]
    else:
        undo.append(partial(groups.__setitem__, number, groups[number]))
        undo.append(partial(programmed.__setitem__, number, programmed[number]))
    if update.type == p4r.Update.DELETE:
        del groups[number], programmed[number]
    else:
        entry = p4r.MulticastGroupEntry()
        entry.CopyFrom(message.multicast_group_entry)
        groups[number], programmed[number] = entry, _replicas(entry)


def _replicas(entry: p4r.MulticastGroupEntry) -> tuple[GroupReplica, ...]:
    """Return a group's copies; give the entry, for later reads, ports as the shortest byte strings."""
    group = entry.multicast_group_id
    replicas = []
    copies = set()
    for message in entry.replicas:
        if message.backup_replicas:
            raise StatusError("UNIMPLEMENTED", f"multicast group {group}: no backup replicas on this target")
        port, instance = message.egress_port, message.instance
        if message.WhichOneof("port_kind") == "port":
            port = parse(message.port, PORT_BITS, "a replica's port")
            message.port = to_bytes(port)
        if instance > MAX_INSTANCE:
            raise invalid(f"multicast group {group}: instance {instance} is above {MAX_INSTANCE}")
        if (port, instance) in copies:
            raise invalid(f"multicast group {group}: port {port}, instance {instance} comes twice")
        copies.add((port, instance))
        replicas.append(GroupReplica(port, instance))
    return tuple(replicas)


_WRITERS: dict[str, Callable[[Pipeline, p4r.Update, Undo], None]] = {
    "table_entry": _table_entry,
    "direct_counter_entry": _direct_counter,
    "counter_entry": _counter,
    "direct_meter_entry": _direct_meter,
    "meter_entry": _meter,
    "register_entry": _register,
    "packet_replication_engine_entry": _group,
}
