"""Linking of a program's BMv2 JSON and P4Info: tables, actions, counters, meters and registers by name.

The result is the program's state, with constant entries and default actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from finsy.proto import p4i

from softswitch.codegen.emitter import Links, parse_hex
from softswitch.program.bmv2 import Json, ProgramConfig, UnsupportedProgramError
from softswitch.program.match import Key, MatchField, MatchKind
from softswitch.program.meters import Clock
from softswitch.program.schema import FormatError
from softswitch.program.state import CounterCell, Entry, State, Table

MAX_CELLS: Final = 1 << 20
"""Cells of all indexed counters, meters and registers: each takes 8 bytes or more."""
ArrayT = TypeVar("ArrayT", p4i.Counter, p4i.Meter, p4i.Register)

# p4c writes optional keys as ternary.
JSON_KINDS = {kind: {kind.value} for kind in MatchKind} | {MatchKind.OPTIONAL: {"optional", "ternary"}}


def link(config: ProgramConfig, p4info: p4i.P4Info, clock: Clock) -> Links:
    """Return the run-time objects for all names in the JSON; raise `ValueError` if P4Info differs."""
    cells = sum(
        array.size for arrays in (p4info.counters, p4info.meters, p4info.registers) for array in arrays
    )
    if cells > MAX_CELLS:
        raise FormatError(
            f"counters, meters and registers have {cells:,} cells together; a program may have {MAX_CELLS:,}"
        )
    links = Links(State(), clock)
    arities = {}
    for action in p4info.actions:
        links.actions[action.preamble.name] = action.preamble.id
        arities[action.preamble.id] = [(p.name, p.bitwidth) for p in action.params]
    for name, array in _arrays(config.raw["counter_arrays"], p4info.counters, "counter"):
        counters = [CounterCell() for _ in range(array.size)]
        links.counters[name] = links.state.counters[array.preamble.id] = counters
    for name, registers in _arrays(config.raw["register_arrays"], p4info.registers, "register"):
        _check_register(config, registers)
        links.registers[name] = links.state.registers[registers.preamble.id] = [0] * registers.size
    for name, meters in _arrays(config.raw["meter_arrays"], p4info.meters, "meter"):
        links.meters[name] = links.state.meters[meters.preamble.id] = [None] * meters.size
    _check_meters(config, p4info)
    tables = {t["name"]: t for pipeline in config.pipelines.values() for t in pipeline["tables"]}
    for info in p4info.tables:
        name = info.preamble.name
        if name not in tables:
            raise _mismatch(f"the P4Info has a table {name} that the JSON lacks")
        _link_table(config, tables.pop(name), info, links)
    for json in tables.values():
        entry = json["default_entry"] if not json["key"] else {}
        if not (entry.get("action_const") and entry.get("action_entry_const")):
            raise _mismatch(f"the JSON has a table {json['name']} that the P4Info lacks")
    for json in config.actions.values():
        action_id = links.actions.get(json["name"])
        parameters = [(p["name"], p["bitwidth"]) for p in json["runtime_data"]]
        if action_id is not None and arities[action_id] != parameters:
            raise _mismatch(
                f"action {json['name']} has parameters {parameters} in the JSON, not {arities[action_id]}"
            )
    return links


def _check_register(config: ProgramConfig, info: p4i.Register) -> None:
    """Raise `ValueError` unless a register's values have the same width in both."""
    bits = info.type_spec.bitstring
    width = bits.int.bitwidth if bits.WhichOneof("type_spec") == "int" else bits.bit.bitwidth
    json = config.array("register_arrays", info.preamble.name)
    if width > json["bitwidth"]:
        raise _mismatch(
            f"register {json['name']} has {width} bits in the P4Info, {json['bitwidth']} in the JSON"
        )


def _mismatch(text: str) -> ValueError:
    return ValueError(f"the BMv2 JSON and the P4Info don't belong together: {text}")


def _check_meters(config: ProgramConfig, p4info: p4i.P4Info) -> None:
    """Raise `ValueError` unless each meter has the same unit in both, and each direct one the same table."""
    tables = {table.preamble.id: table.preamble.name for table in p4info.tables}
    meters = {meter.preamble.name: (meter.spec, "") for meter in p4info.meters}
    for meter in p4info.direct_meters:
        meters[meter.preamble.name] = meter.spec, tables.get(meter.direct_table_id, "")
    for json in config.raw["meter_arrays"]:
        spec, table = meters.pop(json["name"], (p4i.MeterSpec(), ""))
        kind = p4i.MeterSpec.Unit.Name(spec.unit).lower(), table
        if kind != (json["type"], json.get("binding", "")):
            raise _mismatch(f"meter {json['name']} has another unit or table in the P4Info")
        if json["rate_count"] != 2 or spec.type != p4i.MeterSpec.TWO_RATE_THREE_COLOR:
            config.problem(f"meter {json['name']} must have two rates and three colors", json)
    for name in meters:
        raise _mismatch(f"the P4Info has a meter {name} that the JSON lacks")


def _arrays(arrays: list[Json], infos: Iterable[ArrayT], kind: str) -> Iterator[tuple[str, ArrayT]]:
    """Yield name and P4Info of each array of the JSON; raise `ValueError` if these differ."""
    infos_by_name = {info.preamble.name: info for info in infos}
    for json in arrays:
        if json.get("is_direct"):
            continue
        info = infos_by_name.pop(json["name"], None)
        if info is None or info.size != json["size"]:
            raise _mismatch(f"{kind} {json['name']} of size {json['size']} is not in the P4Info")
        yield json["name"], info
    for name in infos_by_name:
        raise _mismatch(f"the P4Info has a {kind} {name} that the JSON lacks")


def _link_table(config: ProgramConfig, json: Json, info: p4i.Table, links: Links) -> None:
    name = info.preamble.name
    fields = tuple(_match_field(config, json, f) for f in info.match_fields)
    kinds = [(key["name"], key["match_type"]) for key in json["key"]]
    if [n for n, _ in kinds] != [f.name for f in fields]:
        raise _mismatch(
            f"table {name} has keys {[n for n, _ in kinds]} in the JSON, not {[f.name for f in fields]}"
        )
    for (key, kind), f in zip(kinds, fields, strict=True):
        if kind not in JSON_KINDS[f.kind]:
            raise _mismatch(f"key {key} of table {name} is {kind} in the JSON, {f.kind.value} in the P4Info")
    for action_id in json["action_ids"]:
        if config.actions[action_id]["name"] not in links.actions:
            raise _mismatch(
                f"action {config.actions[action_id]['name']} of table {name} is not in the P4Info"
            )
    default = _default(config, json, links)
    const = info.const_default_action_id != 0
    table = Table(info.preamble.id, name, fields, info.size, default, const, default=default)
    _install_entries(config, json, table, links)
    table.const_entries = info.is_const_table
    links.tables[name] = links.state.tables[table.id] = table
    scopes = {ref.id: ref.scope for ref in info.action_refs}
    table.entry_actions = {i for i, scope in scopes.items() if scope != p4i.ActionRef.DEFAULT_ONLY}
    table.default_actions = {i for i, scope in scopes.items() if scope != p4i.ActionRef.TABLE_ONLY}


def _match_field(config: ProgramConfig, json: Json, f: p4i.MatchField) -> MatchField:
    target = next((key["target"] for key in json["key"] if key["name"] == f.name), None)
    max_width = 1 if target is None or target[1] == "$valid$" else config.field(target).width
    if not 0 < f.bitwidth <= max_width:
        raise _mismatch(
            f"key {f.name} of table {json['name']} has {f.bitwidth} bits in the P4Info, "
            f"{max_width} in the JSON"
        )
    kind = p4i.MatchField.MatchType.Name(f.match_type)
    if kind not in MatchKind.__members__:
        kind_name = f.other_match_type or kind
        config.problem(
            f"match kind {kind_name} of key {f.name} of table {json['name']} is not supported", json
        )
        raise UnsupportedProgramError(config.problems)
    return MatchField(f.id, f.name, f.bitwidth, MatchKind[kind])


def _default(config: ProgramConfig, json: Json, links: Links) -> Entry | None:
    entry = json.get("default_entry")
    if entry is None:
        return None
    action = links.actions[config.actions[entry["action_id"]]["name"]]
    return Entry((), action, tuple(parse_hex(text) for text in entry["action_data"]), is_default=True)


def _install_entries(config: ProgramConfig, json: Json, table: Table, links: Links) -> None:
    """Install the program's own entries. In the JSON the lowest priority wins, in P4Runtime the highest."""
    entries = json.get("entries") or ()
    ordered = all(f.kind in (MatchKind.EXACT, MatchKind.LPM) for f in table.fields)
    last = max((entry["priority"] for entry in entries), default=0)
    for entry in entries:
        match = tuple(_key(f, key) for f, key in zip(table.fields, entry["match_key"], strict=True))
        action = entry["action_entry"]
        params = tuple(parse_hex(text) for text in action["action_data"])
        action_id = links.actions[config.actions[action["action_id"]]["name"]]
        priority = 0 if ordered else last - entry["priority"] + 1
        table.install(Entry(match, action_id, params, priority))


def _key(f: MatchField, key: Json) -> Key:
    """Return a constant entry's field; `None` if it matches everything."""
    if f.kind is MatchKind.RANGE:
        low, high = parse_hex(key["start"]), parse_hex(key["end"])
        return None if (low, high) == (0, (1 << f.width) - 1) else (low, high)
    value = parse_hex(key["key"])
    if f.kind is MatchKind.EXACT:
        return value
    if f.kind is MatchKind.LPM:
        return (value, key["prefix_length"]) if key["prefix_length"] else None
    mask = parse_hex(key["mask"])
    if not mask:
        return None
    return value if f.kind is MatchKind.OPTIONAL else (value, mask)
