"""Reads of a pipeline's state.

P4Runtime specification, sections 9 and 13. A reader gets a query and a function that adds an empty entity to
the answer. All refusals are `TableError`.
"""

from __future__ import annotations

from collections.abc import Callable

from finsy.proto import p4d, p4r

from softswitch.p4runtime.bytestrings import to_bytes
from softswitch.p4runtime.entities import TableCodec, encode_count
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.p4runtime.pipeline import Pipeline, RegisterInfo
from softswitch.p4runtime.writes import cells_of
from softswitch.program.state import TableError

Add = Callable[[], p4r.Entity]


def read(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    """Add the entities that match a query to an answer."""
    kind = query.WhichOneof("entity")
    if kind is None:
        raise invalid("the query has no entity")
    reader = _READERS.get(kind)
    if reader is None:
        raise TableError("UNIMPLEMENTED", f"{kind} is not supported by this target")
    reader(pipeline, query, add)


def _codecs(pipeline: Pipeline, table_id: int) -> list[TableCodec]:
    if table_id == 0:
        return list(pipeline.tables.values())
    codec = pipeline.tables.get(table_id)
    if codec is None:
        raise TableError("NOT_FOUND", f"table {table_id} does not exist")
    return [codec]


def _table_entries(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.table_entry
    if not wanted.table_id and (wanted.match or wanted.priority or wanted.HasField("action")):
        raise invalid("a query for all tables must not have a match, priority or action")
    counters = wanted.HasField("counter_data")
    for codec in _codecs(pipeline, wanted.table_id):
        for entry in codec.select(wanted):
            codec.encode(entry, add().table_entry, counters)


def _direct_counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.direct_counter_entry.table_entry
    for codec in _codecs(pipeline, wanted.table_id):
        if not codec.counted:
            if wanted.table_id:
                raise invalid(f"table {codec.name} has no direct counter")
            continue
        found = list(codec.select(wanted))
        if not found and wanted.match:
            raise TableError("NOT_FOUND", f"table {codec.name} has no such entry")
        for entry in found:
            message = add().direct_counter_entry
            codec.encode_key(entry, message.table_entry)
            encode_count(entry.count, message.data)


def _counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.counter_entry
    if wanted.counter_id and wanted.counter_id not in pipeline.counters:
        raise TableError("NOT_FOUND", f"counter {wanted.counter_id} does not exist")
    for number in [wanted.counter_id] if wanted.counter_id else list(pipeline.counters):
        info = pipeline.counters[number]
        cells = pipeline.program.state.counters[number]
        one = bool(wanted.counter_id) and wanted.HasField("index")
        for at in cells_of(info.name, info.size, one, wanted.index.index):
            message = add().counter_entry
            message.counter_id = number
            message.index.index = at
            encode_count(cells[at], message.data)


def _registers(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.register_entry
    if wanted.register_id and wanted.register_id not in pipeline.registers:
        raise TableError("NOT_FOUND", f"register {wanted.register_id} does not exist")
    for number in [wanted.register_id] if wanted.register_id else list(pipeline.registers):
        info = pipeline.registers[number]
        values = pipeline.program.state.registers[number]
        one = bool(wanted.register_id) and wanted.HasField("index")
        for at in cells_of(info.name, info.size, one, wanted.index.index):
            message = add().register_entry
            message.register_id = number
            message.index.index = at
            _encode_register(info, values[at], message.data)


def _encode_register(info: RegisterInfo, value: int, data: p4d.P4Data) -> None:
    if info.truth:
        data.bool = bool(value)
    elif info.signed:
        # One bit more than the magnitude, for the sign; -1 needs as few as 0.
        length = ((value if value >= 0 else ~value).bit_length() + 8) // 8
        data.bitstring = value.to_bytes(length, signed=True)
    else:
        data.bitstring = to_bytes(value)


def _groups(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.packet_replication_engine_entry
    if wanted.WhichOneof("type") == "clone_session_entry":
        # There are none, so only a read of all of them is possible.
        if wanted.clone_session_entry.session_id:
            raise TableError("UNIMPLEMENTED", "clone sessions are not supported by this target")
        return
    number = wanted.multicast_group_entry.multicast_group_id
    if number and number not in pipeline.groups:
        raise TableError("NOT_FOUND", f"multicast group {number} does not exist")
    for group in [pipeline.groups[number]] if number else list(pipeline.groups.values()):
        add().packet_replication_engine_entry.multicast_group_entry.CopyFrom(group)


def _none_there(
    kind: str, number: Callable[[p4r.Entity], int]
) -> Callable[[Pipeline, p4r.Entity, Add], None]:
    """Return a reader of a kind without entities: a read of all is empty, and one of them is not found."""

    def reader(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
        if number(query):
            raise TableError("NOT_FOUND", f"{kind} does not exist: {number(query)}")

    return reader


_READERS: dict[str, Callable[[Pipeline, p4r.Entity, Add], None]] = {
    "table_entry": _table_entries,
    "direct_counter_entry": _direct_counters,
    "counter_entry": _counters,
    "register_entry": _registers,
    "packet_replication_engine_entry": _groups,
    "action_profile_member": _none_there(
        "action profile", lambda query: query.action_profile_member.action_profile_id
    ),
    "action_profile_group": _none_there(
        "action profile", lambda query: query.action_profile_group.action_profile_id
    ),
    "meter_entry": _none_there("meter", lambda query: query.meter_entry.meter_id),
    "direct_meter_entry": _none_there(
        "direct meter of table", lambda query: query.direct_meter_entry.table_entry.table_id
    ),
    "value_set_entry": _none_there("value set", lambda query: query.value_set_entry.value_set_id),
    "digest_entry": _none_there("digest", lambda query: query.digest_entry.digest_id),
}
