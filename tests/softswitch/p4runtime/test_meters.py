"""Meters over P4Runtime (specification, sections 9.1, 9.3 and 9.5): write, read, undo."""

from __future__ import annotations

from functools import partial

import pytest
from finsy.proto import p4i, p4r

from softswitch.p4runtime.pipeline import Pipeline, build, reconcile
from softswitch.p4runtime.reads import read
from softswitch.p4runtime.writes import apply
from softswitch.program.state import StatusError
from tests.softswitch.support.client import delete, insert, modify, number
from tests.softswitch.support.scenarios import CHECKMATE, files

CONFIG = {"cir": 5, "cburst": 10, "pir": 50, "pburst": 100}


@pytest.fixture
def pipeline() -> Pipeline:
    return new_pipeline()


def new_pipeline() -> Pipeline:
    config, p4info = files(CHECKMATE)
    return build(p4r.ForwardingPipelineConfig(p4info=p4info, p4_device_config=config))


def ids(pipeline: Pipeline) -> dict[str, int]:
    info: p4i.P4Info = pipeline.config.p4info
    kinds = (info.tables, info.actions, info.meters)
    return {info_.preamble.name: info_.preamble.id for kind in kinds for info_ in kind}


def read_all(pipeline: Pipeline, **query: object) -> list[p4r.Entity]:
    answer = p4r.ReadResponse()
    read(pipeline, p4r.Entity(**query), answer.entities.add)  # type: ignore[arg-type]
    return list(answer.entities)


def client(pipeline: Pipeline, config: dict[str, int] | None = None, port: int = 1) -> p4r.Entity:
    entity = p4r.Entity()
    entry = entity.table_entry
    entry.table_id = ids(pipeline)["clients"]
    entry.match.add(field_id=1).exact.value = number(port)
    entry.match.add(field_id=2).exact.value = number(0x0A000001)
    entry.action.action.action_id = ids(pipeline)["meter_client"]
    if config is not None:
        entry.meter_config.MergeFrom(p4r.MeterConfig(**config))
    return entity


def with_meters(table: int = 0) -> p4r.TableEntry:
    """Return a read of a table's entries, or of all, that asks for their meters."""
    return p4r.TableEntry(table_id=table, meter_config=p4r.MeterConfig())


def cell(
    pipeline: Pipeline, index: int | None, config: dict[str, int] | None = None, **more: object
) -> p4r.Entity:
    entity = p4r.Entity()
    entity.meter_entry.meter_id = ids(pipeline)["stranger_rate"]
    if index is not None:
        entity.meter_entry.index.index = index
    if config is not None:
        entity.meter_entry.config.MergeFrom(p4r.MeterConfig(**{**config, **more}))  # type: ignore[arg-type]
    return entity


def direct(entity: p4r.Entity, config: dict[str, int] | None = None) -> p4r.Entity:
    message = p4r.Entity()
    message.direct_meter_entry.table_entry.table_id = entity.table_entry.table_id
    message.direct_meter_entry.table_entry.match.MergeFrom(entity.table_entry.match)
    if config is not None:
        message.direct_meter_entry.config.MergeFrom(p4r.MeterConfig(**config))
    return message


def code(failure: pytest.ExceptionInfo[StatusError]) -> str:
    return failure.value.code


def test_cells_of_an_indexed_meter(pipeline: Pipeline) -> None:
    read_cells = partial(read_all, pipeline, meter_entry=p4r.MeterEntry())
    assert [e.meter_entry.index.index for e in read_cells()] == list(range(512))
    assert not any(e.meter_entry.HasField("config") for e in read_cells())
    undo = apply(pipeline, modify(cell(pipeline, 3, CONFIG)))
    assert [e for e in read_cells() if e.meter_entry.HasField("config")] == [cell(pipeline, 3, CONFIG)]
    assert read_all(pipeline, meter_entry=cell(pipeline, 3).meter_entry) == [cell(pipeline, 3, CONFIG)]
    for back in reversed(undo):
        back()
    assert not any(e.meter_entry.HasField("config") for e in read_cells())
    apply(pipeline, modify(cell(pipeline, None, CONFIG)))
    assert all(e.meter_entry.HasField("config") for e in read_cells())
    cells = pipeline.program.state.meters[ids(pipeline)["stranger_rate"]]
    assert len({id(cell_) for cell_ in cells}) == 512  # each cell has its own buckets
    apply(pipeline, modify(cell(pipeline, None)))
    assert cells == [None] * 512


def test_an_entrys_meter_is_written_and_read_with_it(pipeline: Pipeline) -> None:
    table = {"table_entry": with_meters(ids(pipeline)["clients"])}
    apply(pipeline, insert(client(pipeline, CONFIG)))
    assert read_all(pipeline, **table) == [client(pipeline, CONFIG)]
    assert read_all(pipeline, table_entry=with_meters()) == [client(pipeline, CONFIG)]
    unasked = p4r.TableEntry(table_id=ids(pipeline)["clients"])
    assert read_all(pipeline, table_entry=unasked) == [client(pipeline)]
    undo = apply(pipeline, modify(client(pipeline)))
    assert read_all(pipeline, **table) == [client(pipeline)]
    for back in reversed(undo):
        back()
    assert read_all(pipeline, **table) == [client(pipeline, CONFIG)]
    undo = apply(pipeline, delete(client(pipeline)))
    for back in reversed(undo):
        back()
    assert read_all(pipeline, **table) == [client(pipeline, CONFIG)]


def test_a_direct_meter_entry_is_the_same_meter(pipeline: Pipeline) -> None:
    apply(pipeline, insert(client(pipeline)))
    read_meters = partial(read_all, pipeline, direct_meter_entry=p4r.DirectMeterEntry())
    assert read_meters() == [direct(client(pipeline))]
    undo = apply(pipeline, modify(direct(client(pipeline), CONFIG)))
    assert read_meters() == [direct(client(pipeline), CONFIG)]
    assert read_all(pipeline, table_entry=with_meters(ids(pipeline)["clients"])) == [client(pipeline, CONFIG)]
    for back in reversed(undo):
        back()
    assert read_meters() == [direct(client(pipeline))]
    with pytest.raises(StatusError) as missing:
        apply(pipeline, modify(direct(client(pipeline, port=2), CONFIG)))
    assert code(missing) == "NOT_FOUND"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cir": -1}, "must not be negative"),
        ({"pburst": -5}, "must not be negative"),
        ({"cir": 51}, "the committed rate 51 is above the peak rate 50"),
        ({"eburst": 1}, "eburst is for meters with a single rate"),
    ],
)
def test_impossible_rates_are_refused(pipeline: Pipeline, wrong: dict[str, int], reason: str) -> None:
    apply(pipeline, insert(client(pipeline)))
    for entity in (
        cell(pipeline, 1, CONFIG, **wrong),
        client(pipeline, CONFIG | wrong),
        direct(client(pipeline), CONFIG | wrong),
    ):
        with pytest.raises(StatusError, match=reason) as failure:
            apply(pipeline, modify(entity))
        assert code(failure) == "INVALID_ARGUMENT"
    assert read_all(pipeline, direct_meter_entry=p4r.DirectMeterEntry()) == [direct(client(pipeline))]


def test_what_this_target_has_not_is_refused(pipeline: Pipeline) -> None:
    default = client(pipeline, CONFIG)
    default.table_entry.is_default_action = True
    del default.table_entry.match[:]
    counter_write = cell(pipeline, 1, CONFIG)
    counter_write.meter_entry.counter_data.SetInParent()
    elsewhere = direct(client(pipeline), CONFIG)
    elsewhere.direct_meter_entry.table_entry.table_id = ids(pipeline)["stub"]
    for update, expected in (
        (modify(default), "UNIMPLEMENTED"),
        (modify(counter_write), "UNIMPLEMENTED"),
        (modify(elsewhere), "INVALID_ARGUMENT"),
        (insert(cell(pipeline, 1, CONFIG)), "INVALID_ARGUMENT"),
        (modify(cell(pipeline, 512, CONFIG)), "OUT_OF_RANGE"),
        (modify(cell(pipeline, -1, CONFIG)), "INVALID_ARGUMENT"),
    ):
        with pytest.raises(StatusError) as failure:
            apply(pipeline, update)
        assert code(failure) == expected


def test_meters_outlast_a_reconciled_pipeline(pipeline: Pipeline) -> None:
    apply(pipeline, insert(client(pipeline, CONFIG)))
    apply(pipeline, modify(cell(pipeline, 7, CONFIG)))
    new = new_pipeline()
    reconcile(pipeline, new)
    assert read_all(new, meter_entry=cell(new, 7).meter_entry) == [cell(new, 7, CONFIG)]
    assert read_all(new, direct_meter_entry=p4r.DirectMeterEntry()) == [direct(client(new), CONFIG)]
