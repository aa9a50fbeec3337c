"""Write and Read of every kind of entity (P4Runtime specification, sections 9, 12 and 13)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from finsy.proto import p4r, rpc_code

from tests.softswitch.support.client import Client, Failure, delete, insert, modify, number

INVALID, DENIED, MISSING = rpc_code.INVALID_ARGUMENT, rpc_code.PERMISSION_DENIED, rpc_code.NOT_FOUND
EXISTS, FULL, RANGE = rpc_code.ALREADY_EXISTS, rpc_code.RESOURCE_EXHAUSTED, rpc_code.OUT_OF_RANGE
UNIMPLEMENTED = rpc_code.UNIMPLEMENTED
CONTINUE, ROLLBACK, ATOMIC = 0, 1, 2


def refusal(client: Client, update: p4r.Update) -> tuple[int, str]:
    """Return code and message of the refusal of a single update."""
    with pytest.raises(Failure) as failure:
        client.write(update)
    assert failure.value.code == "UNKNOWN"
    assert len(failure.value.errors) == 1
    assert failure.value.errors[0].space
    return failure.value.errors[0].canonical_code, failure.value.errors[0].message


def prefix_entry(client: Client, value: int, length: int, port: int = 1) -> p4r.Entity:
    entity = client.entry("by_prefix", "forward", port)
    match = entity.table_entry.match.add(field_id=1)
    match.lpm.value, match.lpm.prefix_len = number(value), length
    return entity


def mask_entry(client: Client, value: int, mask: int, source: int | None, priority: int = 7) -> p4r.Entity:
    entity = client.entry("by_mask", "forward", 2, priority=priority)
    match = entity.table_entry.match.add(field_id=1)
    match.ternary.value, match.ternary.mask = number(value), number(mask)
    if source is not None:
        entity.table_entry.match.add(field_id=2).optional.value = number(source)
    return entity


def range_entry(client: Client, low: int, high: int, priority: int = 7) -> p4r.Entity:
    entity = client.entry("by_range", "forward", 2, priority=priority)
    match = entity.table_entry.match.add(field_id=1)
    match.range.low, match.range.high = number(low), number(high)
    return entity


def test_entries_read_back_as_written(primary: Client) -> None:
    entities = [
        primary.mac_entry(0x020000000001, 3, "counted", 2),
        prefix_entry(primary, 0x020000000000, 8),
        primary.entry("by_prefix", "drop"),
        mask_entry(primary, 0x0800, 0x0F00, 0x020000000009),
        mask_entry(primary, 0, 0xFFFF, None),
        primary.entry("by_mask", "NoAction", priority=1),
        range_entry(primary, 0x600, 0x700),
    ]
    entities[0].table_entry.metadata = b"mine"
    entities[1].table_entry.controller_metadata = 99
    primary.write(*map(insert, entities))
    read = [
        entity
        for entity in primary.read(p4r.Entity(table_entry=p4r.TableEntry()))
        if not entity.table_entry.is_const
    ]
    key = p4r.Entity.SerializeToString
    assert sorted(read, key=key) == sorted(entities, key=key)


def test_padded_byte_strings_read_back_canonical(primary: Client) -> None:
    entity = primary.entry("by_mac", "counted")
    entity.table_entry.match.add(field_id=1).exact.value = b"\0\0\0\0\0\0\0\0\1"
    entity.table_entry.match.add(field_id=2).exact.value = b"\0\0"
    entity.table_entry.action.action.params.add(param_id=1, value=b"\0\0\1\xff")
    primary.write(insert(entity))
    assert primary.read(primary.entry("by_mac")) == [primary.mac_entry(1, 0, "counted", 0x1FF)]
    assert refusal(primary, insert(primary.mac_entry(1, 0, "punt")))[0] == EXISTS


def field(place: int, **value: object) -> Callable[[p4r.TableEntry], None]:
    def change(entry: p4r.TableEntry) -> None:
        del entry.match[:]
        entry.match.add(field_id=place, **value)

    return change


def param(place: int, value: bytes) -> Callable[[p4r.TableEntry], None]:
    def change(entry: p4r.TableEntry) -> None:
        entry.action.action.params.add(param_id=place, value=value)

    return change


def action(name: str) -> Callable[[p4r.TableEntry, Client], None]:
    def change(entry: p4r.TableEntry, client: Client) -> None:
        entry.action.action.action_id = client.id(name)
        del entry.action.action.params[:]

    return change


FAULTS: list[tuple[str, Callable[..., None], int, str]] = [
    ("by_mac", field(1, exact={"value": b"\1"}), INVALID, "exact match field port is missing"),
    ("by_mac", field(1, exact={"value": b""}), INVALID, "mac is missing or empty"),
    ("by_mac", field(1, exact={"value": b"\1" * 7}), INVALID, "does not fit in 48 bits"),
    ("by_mac", field(2, exact={"value": b"\2\0"}), INVALID, "does not fit in 9 bits"),
    ("by_mac", field(1, ternary={"value": b"\1", "mask": b"\1"}), INVALID, "mac is exact, not ternary"),
    ("by_mac", field(9, exact={"value": b"\1"}), INVALID, "no match field 9"),
    ("by_mac", lambda e: e.match.append(e.match[0]), INVALID, "mac comes twice"),
    ("by_mac", lambda e: setattr(e, "priority", 3), INVALID, "priority is 3"),
    ("by_mac", lambda e: e.ClearField("action"), INVALID, "plain action"),
    ("by_mac", param(2, b"\1"), INVALID, "no parameter 2"),
    ("by_mac", param(1, b"\1"), INVALID, "port comes twice"),
    ("by_mac", action("counted"), INVALID, "missing parameter port"),
    ("by_mac", action("forward"), INVALID, "no action"),
    ("by_mac", lambda e: setattr(e.action.action.params[0], "value", b"\2\0"), INVALID, "fit in 9 bits"),
    ("by_mac", lambda e: setattr(e.action.action.params[0], "value", b""), INVALID, "missing or empty"),
    ("by_mac", lambda e: setattr(e, "is_const", True), INVALID, "is_const"),
    ("by_mac", lambda e: setattr(e, "idle_timeout_ns", 5), INVALID, "idle timeout"),
    ("by_mac", lambda e: e.meter_config.SetInParent(), INVALID, "no direct meter"),
    ("by_mac", lambda e: setattr(e, "table_id", 12345), MISSING, "table 12345 does not exist"),
    ("by_mac", lambda e: setattr(e, "table_id", 0), INVALID, "table 0 does not exist"),
    ("by_prefix", lambda e: e.counter_data.SetInParent(), INVALID, "no direct counter"),
    ("by_prefix", field(1, lpm={"value": b"\0", "prefix_len": 0}), INVALID, "prefix length 0"),
    ("by_prefix", field(1, lpm={"value": b"\1", "prefix_len": 49}), INVALID, "prefix length 49"),
    ("by_prefix", field(1, lpm={"value": b"\1", "prefix_len": 8}), INVALID, "beyond its prefix of 8"),
    ("by_prefix", action("NoAction"), DENIED, "NoAction is not allowed in an entry"),
    ("by_mask", field(1, ternary={"value": b"\0", "mask": b"\0"}), INVALID, "mask is 0"),
    ("by_mask", field(1, ternary={"value": b"\3", "mask": b"\1"}), INVALID, "outside its mask"),
    ("by_mask", lambda e: setattr(e, "priority", 0), INVALID, "priority is 0"),
    ("by_mask", lambda e: setattr(e, "priority", -4), INVALID, "priority is -4"),
    ("by_range", field(1, range={"low": b"\2", "high": b"\1"}), INVALID, "above high"),
    ("by_range", field(1, range={"low": b"\0", "high": b"\xff\xff"}), INVALID, "omit the field"),
]


@pytest.mark.parametrize(("table", "change", "code", "says"), FAULTS, ids=[entity_[3] for entity_ in FAULTS])
def test_malformed_entry(
    primary: Client, table: str, change: Callable[..., None], code: int, says: str
) -> None:
    entity = {
        "by_mac": lambda: primary.mac_entry(1, 1, "counted", 2),
        "by_prefix": lambda: prefix_entry(primary, 0x02 << 40, 8),
        "by_mask": lambda: mask_entry(primary, 1, 1, 2),
        "by_range": lambda: range_entry(primary, 1, 2),
    }[table]()
    arguments = (
        (entity.table_entry, primary) if change.__qualname__.startswith("action.") else (entity.table_entry,)
    )
    change(*arguments)
    refusal_code, message = refusal(primary, insert(entity))
    assert (refusal_code, says in message) == (code, True), message
    assert not [
        entity_
        for entity_ in primary.read(p4r.Entity(table_entry=p4r.TableEntry()))
        if not entity_.table_entry.is_const
    ]


def test_insert_modify_delete(primary: Client) -> None:
    entity = primary.mac_entry(1, 1, "counted", 2)
    assert refusal(primary, modify(entity))[0] == MISSING
    assert refusal(primary, delete(entity))[0] == MISSING
    primary.write(insert(entity))
    assert refusal(primary, insert(entity))[0] == EXISTS
    entity.table_entry.action.action.params[0].value = b"\3"
    primary.write(modify(entity))
    assert primary.read(primary.entry("by_mac")) == [entity]
    # Without an action, a modification keeps it; only the key matters in a deletion.
    without = primary.mac_entry(1, 1)
    without.table_entry.metadata = b"new"
    primary.write(modify(without))
    entity.table_entry.metadata = b"new"
    assert primary.read(primary.entry("by_mac")) == [entity]
    nonsense = primary.mac_entry(1, 1)
    nonsense.table_entry.action.action.action_id = 1
    primary.write(delete(nonsense))
    assert primary.read(primary.entry("by_mac")) == []


def test_full_table(primary: Client) -> None:
    primary.write(*(insert(prefix_entry(primary, prefix << 40, 8)) for prefix in range(1, 5)))
    code, message = refusal(primary, insert(prefix_entry(primary, 5 << 40, 8)))
    assert (code, "has 4 entries" in message) == (FULL, True)


def test_same_match_with_two_priorities_are_two_entries(primary: Client) -> None:
    entries = [mask_entry(primary, 1, 1, None, priority=priority) for priority in (1, 2)]
    primary.write(*map(insert, entries))
    assert refusal(primary, insert(entries[0]))[0] == EXISTS
    query = mask_entry(primary, 1, 1, None, priority=0)
    query.table_entry.ClearField("action")
    assert primary.read(query) == entries
    primary.write(delete(entries[0]))
    assert primary.read(query) == entries[1:]


def default(client: Client, table: str, action: str | None, *params: int) -> p4r.Entity:
    entity = client.entry(table, action, *params)
    entity.table_entry.is_default_action = True
    return entity


def test_default_entry(primary: Client) -> None:
    entity = default(primary, "keyless", "forward", 4)
    query = default(primary, "keyless", None)
    before = primary.read(query)
    assert before == [default(primary, "keyless", "NoAction")]
    primary.write(modify(entity))
    assert primary.read(query) == [entity]
    primary.write(modify(query))
    assert primary.read(query) == before
    assert refusal(primary, insert(entity))[0] == INVALID
    assert refusal(primary, delete(entity))[0] == INVALID
    assert refusal(primary, insert(primary.entry("keyless", "forward", 4)))[0] == INVALID
    assert refusal(primary, modify(default(primary, "by_prefix", "drop")))[0] == DENIED
    assert refusal(primary, modify(default(primary, "by_mask", "forward", 1)))[0] == DENIED
    with_match = primary.mac_entry(1, 1, "punt")
    with_match.table_entry.is_default_action = True
    assert refusal(primary, modify(with_match))[0] == INVALID
    constant = primary.read(default(primary, "by_mask", None))
    assert [entry.table_entry.is_const for entry in constant] == [True]


def test_constant_table(primary: Client) -> None:
    fixed = primary.read(primary.entry("fixed"))
    assert len(fixed) == 1
    assert fixed[0].table_entry.is_const
    assert fixed[0].table_entry.match[0].exact.value == b"\x88\xcc"
    fixed[0].table_entry.is_const = False
    for update in (insert, modify, delete):
        assert refusal(primary, update(fixed[0]))[0] == DENIED
    new_entry = primary.entry("fixed", "forward", 1)
    new_entry.table_entry.match.add(field_id=1).exact.value = b"\1"
    assert refusal(primary, insert(new_entry))[0] == DENIED


def test_read_filters(primary: Client) -> None:
    entries = [primary.mac_entry(number, 1, "counted", number) for number in (1, 2)]
    entries.append(primary.mac_entry(3, 1, "punt"))
    entries[0].table_entry.metadata = b"first"
    entries[1].table_entry.controller_metadata = 22
    primary.write(*map(insert, entries))
    query = primary.mac_entry(2, 1)
    assert primary.read(query) == [entries[1]]
    assert primary.read(primary.mac_entry(9, 1)) == []
    by_action = primary.entry("by_mac")
    by_action.table_entry.action.action.action_id = primary.id("punt")
    assert primary.read(by_action) == [entries[2]]
    by_metadata = primary.entry("by_mac")
    by_metadata.table_entry.metadata = b"first"
    assert primary.read(by_metadata) == [entries[0]]
    by_cookie = primary.entry("by_mac")
    by_cookie.table_entry.controller_metadata = 22
    assert primary.read(by_cookie) == [entries[1]]


def test_direct_counters(primary: Client) -> None:
    entity = primary.mac_entry(1, 1, "counted", 2)
    entity.table_entry.counter_data.packet_count = 5
    primary.write(insert(entity))
    query = p4r.Entity()
    query.direct_counter_entry.table_entry.table_id = primary.id("by_mac")
    (entry,) = primary.read(query)
    assert entry.direct_counter_entry.data == p4r.CounterData(packet_count=5)
    assert entry.direct_counter_entry.table_entry.match == entity.table_entry.match
    entry.direct_counter_entry.data.byte_count = 9
    primary.write(modify(entry))
    everywhere = p4r.Entity()
    everywhere.direct_counter_entry.SetInParent()
    assert primary.read(everywhere) == [entry]
    # Only in the entry if requested; a modification without it keeps the counts.
    primary.write(modify(primary.mac_entry(1, 1, "counted", 3)))
    assert not primary.read(primary.entry("by_mac"))[0].table_entry.HasField("counter_data")
    asking = primary.entry("by_mac")
    asking.table_entry.counter_data.SetInParent()
    assert primary.read(asking)[0].table_entry.counter_data == p4r.CounterData(packet_count=5, byte_count=9)
    assert refusal(primary, insert(entry))[0] == INVALID
    entry.direct_counter_entry.table_entry.match[0].exact.value = b"\7"
    assert refusal(primary, modify(entry))[0] == MISSING
    with pytest.raises(Failure) as missing:
        primary.read(entry)
    assert missing.value.codes == [MISSING]


def counter(client: Client, index: int | None, packets: int | None = None) -> p4r.Entity:
    entity = p4r.Entity()
    entity.counter_entry.counter_id = client.id("seen")
    if index is not None:
        entity.counter_entry.index.index = index
    if packets is not None:
        entity.counter_entry.data.packet_count = packets
    return entity


def test_counters(primary: Client) -> None:
    primary.write(modify(counter(primary, 3, 30)))
    assert primary.read(counter(primary, 3)) == [counter(primary, 3, 30)]
    cells = primary.read(counter(primary, None))
    assert [cell.counter_entry.data.packet_count for cell in cells] == [0, 0, 0, 30, 0, 0, 0, 0]
    assert primary.read(p4r.Entity(counter_entry=p4r.CounterEntry())) == cells
    primary.write(modify(counter(primary, None, 4)))
    assert {cell.counter_entry.data.packet_count for cell in primary.read(counter(primary, None))} == {4}
    assert refusal(primary, modify(counter(primary, 8, 1)))[0] == RANGE
    assert refusal(primary, modify(counter(primary, -1, 1)))[0] == INVALID
    assert refusal(primary, insert(counter(primary, 1, 1)))[0] == INVALID
    with pytest.raises(Failure) as beyond:
        primary.read(counter(primary, 8))
    assert beyond.value.codes == [RANGE]


def register(client: Client, index: int | None, value: int | None = None) -> p4r.Entity:
    entity = p4r.Entity()
    entity.register_entry.register_id = client.id("cells")
    if index is not None:
        entity.register_entry.index.index = index
    if value is not None:
        entity.register_entry.data.bitstring = number(value)
    return entity


def test_registers(primary: Client) -> None:
    primary.write(modify(register(primary, 2, 0x12345)))
    assert primary.read(register(primary, 2)) == [register(primary, 2, 0x12345)]
    assert len(primary.read(register(primary, None))) == 4
    primary.write(modify(register(primary, None, 6)))
    assert primary.read(p4r.Entity(register_entry=p4r.RegisterEntry())) == [
        register(primary, index, 6) for index in range(4)
    ]
    assert refusal(primary, modify(register(primary, 2, 1 << 32)))[0] == INVALID
    assert refusal(primary, modify(register(primary, 2)))[0] == INVALID
    assert refusal(primary, modify(register(primary, 4, 1)))[0] == RANGE
    assert refusal(primary, delete(register(primary, 2, 1)))[0] == INVALID


def test_multicast_groups(primary: Client) -> None:
    group = primary.group(7, (1, 0), (2, 1), (2, 2))
    assert refusal(primary, modify(group))[0] == MISSING
    primary.write(insert(group))
    assert refusal(primary, insert(group))[0] == EXISTS
    second_group = primary.group(8, (300, 5))
    second_group.packet_replication_engine_entry.multicast_group_entry.metadata = b"mine"
    old_style = primary.group(9)
    entry = old_style.packet_replication_engine_entry.multicast_group_entry
    entry.replicas.add(egress_port=3, instance=1)
    primary.write(insert(second_group), insert(old_style))
    assert primary.read(primary.group(0)) == [group, second_group, old_style]
    assert primary.read(primary.group(8)) == [second_group]
    primary.write(modify(primary.group(7, (3, 3))), delete(primary.group(8)))
    assert primary.read(primary.group(0)) == [primary.group(7, (3, 3)), old_style]
    for wrong in (
        primary.group(0, (1, 1)),
        primary.group(70000),
        primary.group(5, (1, 1), (1, 1)),
        primary.group(5, (1, 65536)),
    ):
        assert refusal(primary, insert(wrong))[0] == INVALID


def test_what_is_not_there_is_unimplemented(primary: Client) -> None:
    session = p4r.Entity()
    session.packet_replication_engine_entry.clone_session_entry.session_id = 1
    assert refusal(primary, insert(session))[0] == UNIMPLEMENTED
    assert refusal(primary, insert(p4r.Entity(meter_entry=p4r.MeterEntry())))[0] == INVALID
    assert refusal(primary, modify(p4r.Entity(meter_entry=p4r.MeterEntry(meter_id=4))))[0] == MISSING
    assert refusal(primary, insert(p4r.Entity()))[0] == INVALID
    assert refusal(primary, p4r.Update(entity=primary.mac_entry(1, 1, "punt")))[0] == INVALID


@pytest.mark.parametrize(
    ("all_of_them", "by_id"),
    [
        ({"meter_entry": {}}, {"meter_entry": {"meter_id": 4}}),
        ({"direct_meter_entry": {}}, {"direct_meter_entry": {"table_entry": {"table_id": 4}}}),
        ({"action_profile_member": {}}, {"action_profile_member": {"action_profile_id": 4}}),
        ({"action_profile_group": {}}, {"action_profile_group": {"action_profile_id": 4}}),
        ({"value_set_entry": {}}, {"value_set_entry": {"value_set_id": 4}}),
        ({"digest_entry": {}}, {"digest_entry": {"digest_id": 4}}),
    ],
)
def test_reading_all_of_a_kind_that_is_not_there(
    primary: Client, all_of_them: dict[str, object], by_id: dict[str, object]
) -> None:
    assert primary.read(p4r.Entity(**all_of_them)) == []  # type: ignore[arg-type]
    with pytest.raises(Failure) as missing:
        primary.read(p4r.Entity(**by_id))  # type: ignore[arg-type]
    assert missing.value.codes == [MISSING]


def test_one_error_for_each_update(primary: Client) -> None:
    good, second = primary.mac_entry(1, 1, "punt"), primary.mac_entry(2, 1, "punt")
    with pytest.raises(Failure) as failure:
        primary.write(insert(good), insert(good), insert(prefix_entry(primary, 1, 1)), insert(second))
    assert failure.value.codes == [0, EXISTS, INVALID, 0]
    assert "element 1" in failure.value.message
    assert primary.read(primary.entry("by_mac")) == [good, second]


def test_read_answers_what_it_can(primary: Client) -> None:
    good = primary.mac_entry(1, 1, "punt")
    primary.write(insert(good))
    answer = primary.stub.Read(
        p4r.ReadRequest(device_id=3, entities=[primary.entry("by_mac"), p4r.Entity(), counter(primary, 99)])
    )
    entities: list[p4r.Entity] = []
    with pytest.raises(Exception) as failure:
        for response in answer:
            entities += response.entities
    assert entities == [good]
    assert Failure(failure.value).codes == [0, INVALID, RANGE]  # type: ignore[arg-type]


@pytest.mark.parametrize("atomicity", [ROLLBACK, ATOMIC])
def test_failed_batch_is_rolled_back(primary: Client, atomicity: int) -> None:
    entry = primary.mac_entry(1, 1, "counted", 1)
    entry.table_entry.counter_data.packet_count = 9
    primary.write(
        insert(entry),
        insert(primary.mac_entry(2, 1, "counted", 2)),
        insert(primary.group(3, (1, 1))),
        modify(register(primary, 1, 5)),
        modify(counter(primary, 1, 6)),
    )
    everything = [
        p4r.Entity(table_entry=p4r.TableEntry(counter_data=p4r.CounterData())),
        primary.group(0),
        register(primary, None),
    ]
    everything += [counter(primary, None), default(primary, "keyless", None)]
    before = primary.read(*everything)
    updates = [
        delete(entry),
        modify(primary.mac_entry(2, 1, "punt")),
        insert(primary.mac_entry(3, 1, "punt")),
        modify(primary.group(3, (2, 2))),
        insert(primary.group(4, (2, 2))),
        modify(register(primary, None, 8)),
        modify(counter(primary, None, 8)),
        modify(default(primary, "keyless", "forward", 3)),
    ]
    with pytest.raises(Failure) as failure:
        primary.write(
            *updates, delete(primary.mac_entry(9, 9)), delete(primary.group(3)), atomicity=atomicity
        )
    assert failure.value.codes == [rpc_code.ABORTED] * 8 + [MISSING, rpc_code.ABORTED]
    key = p4r.Entity.SerializeToString
    assert sorted(primary.read(*everything), key=key) == sorted(before, key=key)
    primary.write(*updates, atomicity=atomicity)
    assert primary.read(primary.group(4)) == [primary.group(4, (2, 2))]


def test_thousands_of_entries(primary: Client) -> None:
    entities = [primary.mac_entry(number, number % 500, "counted", 5) for number in range(8192)]
    updates = [insert(number) for number in entities]
    begin = time.process_time()
    primary.write(*updates)
    write_seconds = time.process_time() - begin
    query = primary.entry("by_mac")
    query.table_entry.counter_data.SetInParent()
    begin = time.process_time()
    entries = primary.read(query)
    read_seconds = time.process_time() - begin
    assert len(entries) == 8192
    # CPU time of client and server together; ten times the usual time, for slow machines.
    assert write_seconds < 3
    assert read_seconds < 3
