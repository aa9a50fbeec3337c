"""Updates of a pipeline's state: each is checked, applied, and can be undone.

P4Runtime specification, sections 9 (updates) and 12 (batches).
"""

from __future__ import annotations

from collections.abc import Callable

from finsy.proto import p4d, p4r

from softswitch.p4runtime.bytestrings import parse
from softswitch.p4runtime.entities import TableCodec
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.p4runtime.multicast import write_group
from softswitch.p4runtime.pipeline import Pipeline, RegisterInfo
from softswitch.program.state import CounterCell, Entry, TableError

Undo = Callable[[], None]


def apply(pipeline: Pipeline, update: p4r.Update) -> Undo:
    """Apply one update and return a function that undoes it; raise `TableError` if it is refused."""
    if update.type not in (p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE):
        raise invalid("the update's type is unspecified")
    kind = update.entity.WhichOneof("entity")
    if kind is None:
        raise invalid("the update has no entity")
    writer = _WRITERS.get(kind)
    if writer is None:
        raise TableError("UNIMPLEMENTED", f"{kind} is not supported by this target")
    return writer(pipeline, update)


def _codec(pipeline: Pipeline, table_id: int) -> TableCodec:
    codec = pipeline.tables.get(table_id)
    if codec is None:
        raise TableError("NOT_FOUND" if table_id else "INVALID_ARGUMENT", f"table {table_id} does not exist")
    return codec


def _table_entry(pipeline: Pipeline, update: p4r.Update) -> Undo:
    message = update.entity.table_entry
    codec = _codec(pipeline, message.table_id)
    if message.is_default_action:
        return _default_entry(codec, update.type, message)
    if codec.info.is_const_table and (update.type != p4r.Update.MODIFY or message.HasField("action")):
        raise TableError("PERMISSION_DENIED", f"table {codec.name} has only constant entries")
    if update.type == p4r.Update.INSERT:
        return _insert(codec, message)
    if update.type == p4r.Update.MODIFY:
        return _modify(codec, message)
    return _delete(codec, message)


def _insert(codec: TableCodec, message: p4r.TableEntry) -> Undo:
    if not codec.fields:
        raise invalid(f"table {codec.name} has no key, so it has only a default entry")
    entry = codec.entry(message)
    table = codec.table
    table.insert(entry)
    return lambda: table.delete(entry.match, entry.priority)


def _modify(codec: TableCodec, message: p4r.TableEntry) -> Undo:
    codec.check(message)
    table = codec.table
    key = codec.key(message)
    old = table.entries.get(key)
    if old is None:
        raise TableError("NOT_FOUND", f"table {codec.name} has no such entry")
    undo = _set_count(old.count, message) if message.HasField("counter_data") else None
    if codec.info.is_const_table:
        return undo or (lambda: None)
    if message.HasField("action"):
        action, params = codec.action(message.action, default=False)
    else:
        action, params = old.action, old.params
    table.modify(
        Entry(
            *(key[0], action, params, key[1]),
            metadata=message.metadata,
            controller_metadata=message.controller_metadata,
        )
    )

    def back() -> None:
        table.modify(old)
        if undo is not None:
            undo()

    return back


def _delete(codec: TableCodec, message: p4r.TableEntry) -> Undo:
    if message.is_const:
        raise invalid(f"table {codec.name}: is_const may not be set in a write")
    table = codec.table
    key = codec.key(message)
    old = table.entries.get(key)
    table.delete(*key)
    assert old is not None
    return lambda: table.insert(old)


def _default_entry(codec: TableCodec, kind: int, message: p4r.TableEntry) -> Undo:
    table = codec.table
    codec.check(message)
    if kind != p4r.Update.MODIFY:
        raise invalid(f"table {codec.name}: the default entry can only be modified")
    if table.const_default:
        raise TableError("PERMISSION_DENIED", f"table {codec.name}: the default action is constant")
    old = table.default
    if message.HasField("action"):
        entry = codec.entry(message)
        if old is not None and not message.HasField("counter_data"):
            entry.count = old.count
        table.set_default(entry)
        return lambda: table.set_default(old)
    table.set_default(None)
    reset = _set_count(table.default.count, p4r.TableEntry()) if table.default is not None else None

    def back() -> None:
        table.set_default(old)
        if reset is not None:
            reset()

    return back


def _set_count(
    count: CounterCell, message: p4r.TableEntry | p4r.CounterEntry | p4r.DirectCounterEntry
) -> Undo:
    data = message.counter_data if isinstance(message, p4r.TableEntry) else message.data
    before = count.packets, count.bytes
    count.packets, count.bytes = data.packet_count, data.byte_count

    def back() -> None:
        count.packets, count.bytes = before

    return back


def _only_modify(update: p4r.Update, what: str) -> None:
    if update.type != p4r.Update.MODIFY:
        raise invalid(f"{what} can only be modified")


def _direct_counter(pipeline: Pipeline, update: p4r.Update) -> Undo:
    message = update.entity.direct_counter_entry
    _only_modify(update, "a direct counter entry")
    codec = _codec(pipeline, message.table_entry.table_id)
    if not codec.counted:
        raise invalid(f"table {codec.name} has no direct counter")
    if message.table_entry.is_default_action:
        entry = codec.table.default
    else:
        entry = codec.table.entries.get(codec.key(message.table_entry))
    if entry is None:
        raise TableError("NOT_FOUND", f"table {codec.name} has no such entry")
    return _set_count(entry.count, message) if message.HasField("data") else (lambda: None)


def cells_of(name: str, size: int, has_index: bool, index: int) -> range:
    """Return the cells for an index, or all without one; raise `TableError` for a wrong index."""
    if not has_index:
        return range(size)
    if index < 0:
        raise invalid(f"{name}: index {index} is negative")
    if index >= size:
        raise TableError("OUT_OF_RANGE", f"{name}: index {index}; it has {size} cells")
    return range(index, index + 1)


def _counter(pipeline: Pipeline, update: p4r.Update) -> Undo:
    message = update.entity.counter_entry
    _only_modify(update, "a counter entry")
    info = pipeline.counters.get(message.counter_id)
    if info is None:
        raise TableError("NOT_FOUND", f"counter {message.counter_id} does not exist")
    cells = pipeline.program.state.counters[message.counter_id]
    chosen = cells_of(info.name, info.size, message.HasField("index"), message.index.index)
    undo = [_set_count(cells[at], message) for at in chosen] if message.HasField("data") else []

    def back() -> None:
        for each in undo:
            each()

    return back


def register_value(info: RegisterInfo, data: p4d.P4Data) -> int:
    """Return the cell's value in a P4Data; raise `TableError` INVALID_ARGUMENT if it is wrong."""
    wanted = "bool" if info.truth else "bitstring"
    if data.WhichOneof("data") != wanted:
        raise invalid(f"register {info.name} takes a {wanted}, not {data.WhichOneof('data')}")
    if info.truth:
        return int(data.bool)
    what = f"register {info.name}: the value"
    if not info.signed:
        try:
            return parse(data.bitstring, info.width, what)
        except ValueError as error:
            raise invalid(str(error)) from None
    value = int.from_bytes(data.bitstring, signed=True)
    if not data.bitstring or not -(1 << info.width - 1) <= value < 1 << info.width - 1:
        raise invalid(f"{what} does not fit in {info.width} bits, signed")
    return value


def _register(pipeline: Pipeline, update: p4r.Update) -> Undo:
    message = update.entity.register_entry
    _only_modify(update, "a register entry")
    info = pipeline.registers.get(message.register_id)
    if info is None:
        raise TableError("NOT_FOUND", f"register {message.register_id} does not exist")
    values = pipeline.program.state.registers[message.register_id]
    chosen = cells_of(info.name, info.size, message.HasField("index"), message.index.index)
    value = register_value(info, message.data)
    before = values[chosen.start : chosen.stop]
    values[chosen.start : chosen.stop] = [value] * len(chosen)

    def back() -> None:
        values[chosen.start : chosen.stop] = before

    return back


_WRITERS: dict[str, Callable[[Pipeline, p4r.Update], Undo]] = {
    "table_entry": _table_entry,
    "direct_counter_entry": _direct_counter,
    "counter_entry": _counter,
    "register_entry": _register,
    "packet_replication_engine_entry": write_group,
}
