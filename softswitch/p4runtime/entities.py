"""Translation of table entries between P4Runtime messages and the state.

P4Runtime specification, section 9.1. Codecs are built once per table, when the pipeline is set, so that large
batches cost only some microseconds per entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from finsy.proto import p4i, p4r

from softswitch.p4runtime.fieldcodecs import decode_match, encode_match, invalid, parse, to_bytes
from softswitch.program.match import Key, MatchKind
from softswitch.program.meters import MeterCell, MeterRates
from softswitch.program.state import CounterCell, Entry, StatusError, Table

NEEDS_PRIORITY = (MatchKind.TERNARY, MatchKind.RANGE, MatchKind.OPTIONAL)


@dataclass(frozen=True, slots=True)
class ActionCodec:
    """An action: parameter ids to (position, name, width), and its scope in a table."""

    id: int
    name: str
    params: dict[int, tuple[int, str, int]]

    def decode(self, action: p4r.Action) -> tuple[int, ...]:
        """Return the parameters in P4Info order; raise `StatusError` INVALID_ARGUMENT if they are wrong."""
        params = self.params
        values = [-1] * len(params)
        for param in action.params:
            try:
                position, name, width = params[param.param_id]
            except KeyError:
                raise invalid(
                    f"action {self.name} has no parameter {param.param_id}; it has {sorted(params)}"
                ) from None
            if values[position] >= 0:
                raise invalid(f"action {self.name}: parameter {name} comes twice")
            values[position] = parse(param.value, width, f"action {self.name}: parameter {name}")
        if -1 in values:
            missing = [name for position, name, _ in params.values() if values[position] < 0]
            raise invalid(f"action {self.name}: missing parameter {', '.join(missing)}")
        return tuple(values)

    def encode(self, message: p4r.Action, values: Sequence[int]) -> None:
        """Write the action into a message."""
        message.action_id = self.id
        add = message.params.add
        for number, value in zip(self.params, values, strict=True):
            add(param_id=number, value=to_bytes(value))


class TableCodec:
    """Codec of one table's entries. All refusals are `StatusError`."""

    def __init__(
        self,
        info: p4i.Table,
        table: Table,
        actions: dict[int, ActionCodec],
        has_counter: bool,
        meter: p4i.DirectMeter | None,
    ) -> None:
        self.info = info
        self.table = table
        self.name = short_name(info.preamble)
        self.has_counter = has_counter
        self.meter = meter
        self.fields = table.fields
        self.by_id = {
            field.id: (position, field, f"table {self.name}: match field {field.name}")
            for position, field in enumerate(self.fields)
        }
        self.prioritised = any(field.kind in NEEDS_PRIORITY for field in self.fields)
        self.actions = {ref.id: actions[ref.id] for ref in info.action_refs}

    def match(self, matches: Iterable[p4r.FieldMatch]) -> tuple[Key, ...]:
        """Return the key of a match list."""
        keys: list[Key] = [None] * len(self.fields)
        by_id = self.by_id
        for message in matches:
            if message.field_id not in by_id:
                raise invalid(
                    f"table {self.name} has no match field {message.field_id}; it has {sorted(by_id)}"
                )
            position, field, label = by_id[message.field_id]
            if keys[position] is not None:
                raise invalid(f"{label} comes twice")
            keys[position] = decode_match(message, field, label)
        for field, key in zip(self.fields, keys, strict=True):
            if key is None and field.kind is MatchKind.EXACT:
                raise invalid(f"table {self.name}: exact match field {field.name} is missing")
        return tuple(keys)

    def key(self, entry: p4r.TableEntry) -> tuple[tuple[Key, ...], int]:
        """Return match and priority of a non-default entry."""
        key = self.match(entry.match)
        priority = entry.priority
        if self.prioritised:
            if priority <= 0:
                raise invalid(
                    f"table {self.name}: priority is {priority}; with a ternary, range or optional field "
                    "it must be positive"
                )
        elif priority:
            raise invalid(
                f"table {self.name}: priority is {priority}; without a ternary, range or optional field "
                "it must be 0"
            )
        return key, priority

    def action(self, action: p4r.TableAction, default: bool) -> tuple[int, tuple[int, ...]]:
        """Return action id and parameters."""
        if action.WhichOneof("type") != "action":
            raise invalid(f"table {self.name} is direct, so its entries need a plain action")
        codec = self.actions.get(action.action.action_id)
        if codec is None:
            names = ", ".join(f"{allowed.name} ({allowed.id})" for allowed in self.actions.values())
            raise invalid(f"table {self.name} has no action {action.action.action_id}; it has {names}")
        if codec.id not in (self.table.default_actions if default else self.table.entry_actions):
            where = "as default action" if default else "in an entry"
            raise StatusError("PERMISSION_DENIED", f"table {self.name}: {codec.name} is not allowed {where}")
        return codec.id, codec.decode(action.action)

    def entry(self, message: p4r.TableEntry) -> Entry:
        """Return a new entry, default or not."""
        self.check(message)
        default = message.is_default_action
        match, priority = ((), 0) if default else self.key(message)
        action, params = self.action(message.action, default)
        metadata = message.metadata, message.controller_metadata
        entry = Entry(match, action, params, priority, *metadata, is_default=default)
        if message.HasField("counter_data"):
            entry.count = CounterCell(message.counter_data.packet_count, message.counter_data.byte_count)
        entry.meter = decode_meter(message, "meter_config", f"table {self.name}: meter_config")
        return entry

    def check(self, message: p4r.TableEntry) -> None:
        """Refuse message fields that are not allowed in writes to this table."""
        if message.is_const:
            raise invalid(f"table {self.name}: is_const may not be set in a write")
        if message.is_default_action and (message.match or message.priority):
            raise invalid(f"table {self.name}: the default entry has no match and no priority")
        if message.HasField("counter_data") and not self.has_counter:
            raise invalid(f"table {self.name} has no direct counter")
        if message.HasField("meter_counter_data"):
            raise StatusError("UNIMPLEMENTED", "counters of meters are not supported by this target")
        if message.HasField("meter_config"):
            self.check_meter(message.is_default_action)
        if message.idle_timeout_ns:
            raise invalid(f"table {self.name} has no idle timeout")

    def check_meter(self, default: bool) -> None:
        """Refuse an access to the direct meter if the table, or its default entry, has none."""
        if self.meter is None:
            raise invalid(f"table {self.name} has no direct meter")
        if default:
            raise StatusError(
                "UNIMPLEMENTED", f"table {self.name}: on this target, misses are not metered, only hits"
            )

    def encode_key(self, entry: Entry, message: p4r.TableEntry) -> None:
        """Write an entry's identity into a message, in canonical form."""
        message.table_id = self.table.id
        if entry.is_default:
            message.is_default_action = True
            return
        add = message.match.add
        for field, key in zip(self.fields, entry.match, strict=True):
            if key is not None:
                encode_match(key, field, add())
        message.priority = entry.priority

    def encode(self, entry: Entry, message: p4r.TableEntry, counters: bool, meters: bool) -> None:
        """Write a whole entry into a message, in canonical form, with its counter and meter if requested."""
        self.encode_key(entry, message)
        message.is_const = self.table.const_default if entry.is_default else self.info.is_const_table
        self.actions[entry.action].encode(message.action.action, entry.params)
        message.metadata = entry.metadata
        message.controller_metadata = entry.controller_metadata
        if meters:
            encode_meter(entry.meter, message, "meter_config")
        if counters and self.has_counter:
            encode_count(entry.count, message.counter_data)

    def select(self, query: p4r.TableEntry) -> Iterator[Entry]:
        """Yield the entries that match a read (specification, section 9.1.6)."""
        table = self.table
        if query.is_default_action:
            candidates = [] if table.default is None else [table.default]
        elif query.match:
            match = self.match(query.match)
            if self.prioritised and not query.priority:
                candidates = [entry for key, entry in table.entries.items() if key[0] == match]
            else:
                candidate = table.entries.get((match, query.priority))
                candidates = [] if candidate is None else [candidate]
        else:
            candidates = list(table.entries.values())
        action = query.action.action.action_id
        for entry in candidates:
            if (
                (not action or entry.action == action)
                and (not query.priority or entry.priority == query.priority)
                and (not query.metadata or entry.metadata == query.metadata)
                and (not query.controller_metadata or entry.controller_metadata == query.controller_metadata)
            ):
                yield entry


def short_name(preamble: p4i.Preamble) -> str:
    """Return the short name of a P4Info object."""
    return preamble.alias or preamble.name


def encode_count(count: CounterCell, message: p4r.CounterData) -> None:
    """Write a counter cell into a message."""
    message.SetInParent()
    message.packet_count = count.packets
    message.byte_count = count.bytes


Metered = p4r.TableEntry | p4r.MeterEntry | p4r.DirectMeterEntry


def encode_meter(cell: MeterCell | None, message: Metered, name: Literal["config", "meter_config"]) -> None:
    """Write a cell's configuration into a message's field; leave the default out (section 9.3)."""
    if cell is not None:
        getattr(message, name).MergeFrom(p4r.MeterConfig(**cell.rates._asdict()))


def decode_meter(message: Metered, name: Literal["config", "meter_config"], label: str) -> MeterCell | None:
    """Return a new cell for a message's field, `None` if it is not set; refuse impossible rates."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    config: p4r.MeterConfig = getattr(message, name)
    rates = MeterRates(config.cir, config.cburst, config.pir, config.pburst)
    if min(rates) < 0:
        raise invalid(f"{label}: rates and bursts must not be negative: {rates}")
    if rates.cir > rates.pir:
        raise invalid(f"{label}: the committed rate {rates.cir} is above the peak rate {rates.pir}")
    if config.eburst:
        raise invalid(f"{label}: eburst is for meters with a single rate")
    return MeterCell(rates)


def table_codecs(p4info: p4i.P4Info, tables: dict[int, Table]) -> dict[int, TableCodec]:
    """Return the tables of a P4Info by id; raise `ValueError` if one has an action that is not there."""
    actions = {
        action.preamble.id: ActionCodec(
            action.preamble.id,
            short_name(action.preamble),
            {
                param.id: (position, param.name, param.bitwidth)
                for position, param in enumerate(action.params)
            },
        )
        for action in p4info.actions
    }
    for table in p4info.tables:
        for ref in table.action_refs:
            if ref.id not in actions:
                raise ValueError(
                    f"the P4Info has no action {ref.id}, which table {short_name(table.preamble)} names"
                )
    meters = {meter.direct_table_id: meter for meter in p4info.direct_meters}
    table_ids_with_counter = {counter.direct_table_id for counter in p4info.direct_counters}
    return {
        number: TableCodec(
            info, tables[number], actions, number in table_ids_with_counter, meters.get(number)
        )
        for info in p4info.tables
        if (number := info.preamble.id) in tables
    }
