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


def _select(things: dict[int, T], number: int, kind: str) -> list[T]:
    """Return the thing with an id, or all of them for 0."""
    return [find(things, number, kind)] if number else list(things.values())


def _table_entries(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.table_entry
    if not pattern.table_id and (pattern.match or pattern.priority or pattern.HasField("action")):
        raise invalid("a query for all tables must not have a match, priority or action")
    counters, meters = pattern.HasField("counter_data"), pattern.HasField("meter_config")
    for codec in _select(pipeline.tables, pattern.table_id, "table"):
        for entry in codec.select(pattern):
            codec.encode(entry, add().table_entry, counters, meters)


def _direct_counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.direct_counter_entry.table_entry
    for codec, entry in _directs(pipeline, pattern, "counter", lambda codec: codec.has_counter):
        message = add().direct_counter_entry
        codec.encode_key(entry, message.table_entry)
        encode_count(entry.count, message.data)


def _direct_meters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.direct_meter_entry.table_entry
    for codec, entry in _directs(pipeline, pattern, "meter", lambda codec: codec.meter is not None):
        message = add().direct_meter_entry
        codec.encode_key(entry, message.table_entry)
        encode_meter(entry.meter, message, "config")


def _directs(
    pipeline: Pipeline, pattern: p4r.TableEntry, kind: str, has: Callable[[TableCodec], bool]
) -> Iterator[tuple[TableCodec, Entry]]:
    """Yield the entries that a query for direct counters or meters selects."""
    for codec in _select(pipeline.tables, pattern.table_id, "table"):
        if not has(codec):
            if pattern.table_id:
                raise invalid(f"table {codec.name} has no direct {kind}")
            continue
        entries = list(codec.select(pattern))
        if not entries and pattern.match:
            raise StatusError("NOT_FOUND", f"table {codec.name} has no such entry")
        for entry in entries:
            yield codec, entry


def _counters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.counter_entry
    index = pattern.index if pattern.counter_id and pattern.HasField("index") else None
    for info in _select(pipeline.counters, pattern.counter_id, "counter"):
        cells = pipeline.program.state.counters[info.id]
        for at in info.cells(index):
            message = add().counter_entry
            message.counter_id = info.id
            message.index.index = at
            encode_count(cells[at], message.data)


def _meters(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.meter_entry
    index = pattern.index if pattern.meter_id and pattern.HasField("index") else None
    for info in _select(pipeline.meters, pattern.meter_id, "meter"):
        cells = pipeline.program.state.meters[info.id]
        for at in info.cells(index):
            message = add().meter_entry
            message.meter_id = info.id
            message.index.index = at
            encode_meter(cells[at], message, "config")


def _registers(pipeline: Pipeline, query: p4r.Entity, add: Add) -> None:
    pattern = query.register_entry
    index = pattern.index if pattern.register_id and pattern.HasField("index") else None
    for info in _select(pipeline.registers, pattern.register_id, "register"):
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
    pattern = query.packet_replication_engine_entry
    if pattern.WhichOneof("type") == "clone_session_entry":
        # There are none, so only a read of all of them is possible.
        if pattern.clone_session_entry.session_id:
            raise StatusError("UNIMPLEMENTED", "clone sessions are not supported by this target")
        return
    number = pattern.multicast_group_entry.multicast_group_id
    for group in _select(pipeline.groups, number, "multicast group"):
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
