"""The Tofino program's P4Info matches the v1model program's, so the control plane is the same for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from finsy.proto import p4i
from google.protobuf import text_format

from p4src import artifacts, table_sizes, tofino
from p4src.compile import PROGRAM

TARGETS = sorted(tofino.ARCHITECTURES)


def read(target: str) -> p4i.P4Info:
    name = f"{PROGRAM}.p4info.txtpb" if target == "bmv2" else tofino.P4INFO
    return text_format.Parse((artifacts(target) / name).read_text(), p4i.P4Info())


def shape(info: p4i.P4Info) -> dict[str, Any]:
    """Return all parts of a P4Info that a control plane uses, without ids, which each compiler chooses."""
    names = {part.preamble.id: part.preamble.name for part in info.tables}
    names |= {part.preamble.id: part.preamble.name for part in info.actions}
    in_tables = {ref.id for table in info.tables for ref in table.action_refs}
    direct = {part.preamble.id: part.preamble.name for part in info.direct_counters}
    direct |= {part.preamble.id: part.preamble.name for part in info.direct_meters}
    return {
        "tables": {
            (table.preamble.name, table.preamble.alias): (
                table.size,
                [
                    (f.id, f.name, f.bitwidth, p4i.MatchField.MatchType.Name(f.match_type))
                    for f in table.match_fields
                ],
                [(names[ref.id], ref.scope) for ref in table.action_refs],
                names.get(table.const_default_action_id),
                sorted(direct[part] for part in table.direct_resource_ids),
                table.is_const_table,
            )
            for table in info.tables
        },
        "actions": {
            (action.preamble.name, action.preamble.alias): [
                (param.id, param.name, param.bitwidth) for param in action.params
            ]
            for action in info.actions
            if action.preamble.id in in_tables  # without those of the architecture
        },
        "counters": {
            (part.preamble.name, part.preamble.alias): (part.spec.unit, part.size) for part in info.counters
        },
        "meters": {
            (part.preamble.name, part.preamble.alias): (part.spec.unit, part.spec.type, part.size)
            for part in info.meters
        },
        "direct counters": {
            (part.preamble.name, part.preamble.alias): (part.spec.unit, names[part.direct_table_id])
            for part in info.direct_counters
        },
        "direct meters": {
            (part.preamble.name, part.preamble.alias): (part.spec.unit, names[part.direct_table_id])
            for part in info.direct_meters
        },
        "controller headers": {
            part.preamble.name: [(m.id, m.name, m.bitwidth) for m in part.metadata]
            for part in info.controller_packet_metadata
        },
        "others": [
            field.name
            for field, _ in info.ListFields()
            if field.name
            not in (
                "pkg_info",
                "tables",
                "actions",
                "counters",
                "direct_counters",
                "meters",
                "direct_meters",
                "controller_packet_metadata",
                "externs",
            )
        ],
    }


@pytest.mark.parametrize("target", TARGETS)
def test_both_p4infos_say_the_same(target: str) -> None:
    expected, actual = shape(read("bmv2")), shape(read(target))
    assert len(expected["tables"]) == 13
    for part, content in expected.items():
        assert actual[part] == content, part
    # A Tofino has port metadata, which this program skips.
    assert {extern.extern_type_name for extern in read(target).externs} <= {"PortMetadata"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_schema_has_every_table_by_its_name(target: str) -> None:
    schema = json.loads((artifacts(target) / tofino.SCHEMA).read_text())
    tables = {table["name"].rpartition(".")[2]: table for table in schema["tables"]}
    for table in read("bmv2").tables:
        keys = {key["name"] for key in tables[table.preamble.name]["key"]}
        assert {field.name for field in table.match_fields} <= keys
        assert tables[table.preamble.name]["size"] >= table.size


def test_without_the_compiler_it_says_where_that_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("P4C_TOFINO", raising=False)
    assert tofino.compile_program("tofino2") == 2
    error = capsys.readouterr().err
    assert "neither bf-p4c nor p4c on PATH lists tofino2" in error
    assert "open-p4studio" in error


@pytest.mark.parametrize("target", ["bmv2", *TARGETS])
def test_the_sizes_of_tables_are_read_without_the_switch_libraries(target: str) -> None:
    assert table_sizes(target) == {table.preamble.alias: table.size for table in read(target).tables}
