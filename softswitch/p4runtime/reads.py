"""Reads of a pipeline's state.

P4Runtime specification, sections 9 and 13. A reader gets a query and a function that adds an empty entity to
the answer. All refusals are `StatusError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from finsy.proto import p4d, p4r

from softswitch.p4runtime.entities import TableCodec, encode_count, encode_meter
from softswitch.p4runtime.fieldcodecs import invalid, to_bytes
from softswitch.p4runtime.pipeline import ArrayInfo, Pipeline, find
from softswitch.program.state import Entry, StatusError

Add = Callable[[], p4r.Entity]
T = TypeVar("T")


def read(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    """Add the entities that match a query to an answer."""
    kind = query.WhichOneof("entity")
    if kind is None:
        raise invalid("the query has no entity")
    reader = _READERS.get(kind)
    if reader is None:
        raise StatusError("UNIMPLEMENTED", f"{kind} is not supported by this target")
    reader(pipeline, query, add)


def _selected(things: dict[int, T], number: int, what: str) -> list[T]:
    """Return the thing with an id, or all of them for 0."""
    return [find(things, number, what)] if number else list(things.values())


def _table_entries(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.table_entry
    if not wanted.table_id and (wanted.match or wanted.priority or wanted.HasField("action")):
        raise invalid("a query for all tables must not have a match, priority or action")
    counters, meters = wanted.HasField("counter_data"), wanted.HasField("meter_config")
    for codec in _selected(pipeline.tables, wanted.table_id, "table"):
        for entry in codec.select(wanted):
            codec.encode(entry, add().table_entry, counters, meters)


def _direct_counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.direct_counter_entry.table_entry
    for codec, entry in _directs(pipeline, wanted, "counter", lambda codec: codec.counted):
        message = add().direct_counter_entry
        codec.encode_key(entry, message.table_entry)
        encode_count(entry.count, message.data)


def _direct_meters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.direct_meter_entry.table_entry
    for codec, entry in _directs(pipeline, wanted, "meter", lambda codec: codec.meter is not None):
        message = add().direct_meter_entry
        codec.encode_key(entry, message.table_entry)
        encode_meter(entry.meter, message, "config")


def _directs(
    pipeline: Pipeline, wanted: p4r.TableEntry, what: str, has: Callable[[TableCodec], bool]
) -> Iterator[tuple[TableCodec, Entry]]:
    """Yield the entries that a query for direct counters or meters selects."""
    for codec in _selected(pipeline.tables, wanted.table_id, "table"):
        if not has(codec):
            if wanted.table_id:
                raise invalid(f"table {codec.name} has no direct {what}")
            continue
        found = list(codec.select(wanted))
        if not found and wanted.match:
            raise StatusError("NOT_FOUND", f"table {codec.name} has no such entry")
        for entry in found:
            yield codec, entry


def _counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.counter_entry
    index = wanted.index if wanted.counter_id and wanted.HasField("index") else None
    for info in _selected(pipeline.counters, wanted.counter_id, "counter"):
        cells = pipeline.program.state.counters[info.id]
        for at in info.cells(index):
            message = add().counter_entry
            message.counter_id = info.id
            message.index.index = at
            encode_count(cells[at], message.data)


def _meters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.meter_entry
    index = wanted.index if wanted.meter_id and wanted.HasField("index") else None
    for info in _selected(pipeline.meters, wanted.meter_id, "meter"):
        cells = pipeline.program.state.meters[info.id]
        for at in info.cells(index):
            message = add().meter_entry
            message.meter_id = info.id
            message.index.index = at
            encode_meter(cells[at], message, "config")


def _registers(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    wanted = query.register_entry
    index = wanted.index if wanted.register_id and wanted.HasField("index") else None
    for info in _selected(pipeline.registers, wanted.register_id, "register"):
        values = pipeline.program.state.registers[info.id]
        for at in info.cells(index):
            message = add().register_entry
            message.register_id = info.id
            message.index.index = at
            _encode_register(info, values[at], message.data)


def _encode_register(info: ArrayInfo, value: int, data: p4d.P4Data) -> None:
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
            raise StatusError("UNIMPLEMENTED", "clone sessions are not supported by this target")
        return
    number = wanted.multicast_group_entry.multicast_group_id
    for group in _selected(pipeline.groups, number, "multicast group"):
        add().packet_replication_engine_entry.multicast_group_entry.CopyFrom(group)


def _none_there(
    kind: str, number: Callable[[p4r.Entity], int]
) -> Callable[[Pipeline, p4r.Entity, Add], None]:
    """Return a reader of a kind without entities: a read of all is empty, and one of them is not found."""

    def reader(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
        if number(query):
            raise StatusError("NOT_FOUND", f"{kind} does not exist: {number(query)}")

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
    "meter_entry": _meters,
    "direct_meter_entry": _direct_meters,
    "value_set_entry": _none_there("value set", lambda query: query.value_set_entry.value_set_id),
    "digest_entry": _none_there("digest", lambda query: query.digest_entry.digest_id),
}
