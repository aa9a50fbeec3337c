"""An emulation of bfrt_python's tree that records the values that a script sets.

The names are those of the SDE's schemas, as listed here or read from the SDE's own files. An unknown name, or
a value that is not among a field's choices, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TableSchema:
    """A table: keys, data fields with their choices (empty: any), and each action's own fields."""

    keys: tuple[str, ...]
    data: dict[str, tuple[str, ...]]
    actions: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)


_ICOS = {f"icos_{number}": () for number in range(8)}
_BAF = ("1.5%", "3%", "6%", "11%", "20%", "33%", "50%", "66%", "80%", "DISABLE")
_MODES = ("NONE", "PFC", "PAUSE")
_IN_POOLS = tuple(f"IG_APP_POOL_{number}" for number in range(4))
_OUT_POOLS = tuple(f"EG_APP_POOL_{number}" for number in range(4))


def _any(*names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names, ())


def schemas_of(chip: str) -> dict[str, TableSchema]:
    """Return the tables that Checkmate's script uses, for `tf1` or `tf2`."""
    speeds = tuple(f"BF_SPEED_{speed}G" for speed in (1, 10, 25, 40, 50, 100, 200, 400))
    fec = ("BF_FEC_TYP_NONE", "BF_FEC_TYP_FIRECODE", "BF_FEC_TYP_REED_SOLOMON")
    maps = _any("PORT_ENABLE", "TX_MTU", "RX_MTU", "TX_PFC_EN_MAP", "RX_PFC_EN_MAP")
    shared = {"pool_id": _OUT_POOLS, "pool_max_cells": (), "dynamic_baf": _BAF}
    ppg = {
        **_ICOS,
        **_any("guaranteed_cells", "hysteresis_cells", "pool_max_cells"),
        "pool_id": _IN_POOLS,
        "dynamic_baf": _BAF,
    }
    tables = {
        "port.port": TableSchema(("DEV_PORT",), {"SPEED": speeds, "FEC": fec, **maps}),
        "port.port_stat": TableSchema(("DEV_PORT",), _any("FramesTransmittedAll")),
        "pre.prune": TableSchema(("MULTICAST_L2_XID",), _any("DEV_PORT")),
        "tm.pool.cfg": TableSchema(("pool",), _any("size_cells")),
        "tm.pool.app_pfc": TableSchema(("pool", "cos"), _any("pfc_limit_cells")),
        "tm.port.buffer": TableSchema(("dev_port",), _any("skid_limit_cells")),
        "tm.port.cfg": TableSchema(("dev_port",), _any("pg_id", "ingress_qid_map", "egress_qid_queues")),
        "tm.port.flowcontrol": TableSchema(("dev_port",), {"mode_tx": _MODES, "cos_to_icos": ()}),
        "tm.ppg.cfg": TableSchema(
            ("ppg_id",), ppg, {"dev_port": _any("dev_port", "pfc_enable", "pfc_skid_max_cells")}
        ),
        "tm.queue.cfg": TableSchema(("pg_id", "pg_queue"), _any("pfc_cos")),
        "tm.queue.buffer": TableSchema(
            ("pg_id", "pg_queue"), _any("guaranteed_cells", "hysteresis_cells"), {"shared_pool": shared}
        ),
        "tm.counter.queue": TableSchema(("pg_id", "pg_queue"), _any("usage_cells")),
        "dev.device_configuration": TableSchema((), _any("pcie_cpu_port")),
    }
    return {f"{chip}.{name}" if name[:2] in ("tm", "de") else name: table for name, table in tables.items()}


def of_sde(files: Iterable[Path]) -> dict[str, TableSchema]:
    """Return the tables of the SDE's own schemas."""
    schemas = {}
    for file in files:
        for table in json.loads(file.read_text())["tables"]:
            name = table["name"].replace("$", "").lower()
            path = name if "." in name else f"port.{name}"
            schemas[path] = TableSchema(
                tuple(_field(key)[0] for key in table["key"]),
                dict(_field(data) for data in table.get("data", [])),
                {
                    action["name"].replace("$", ""): dict(_field(data) for data in action.get("data", []))
                    for action in table.get("action_specs", [])
                },
            )
    return schemas


def _field(data: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    single = data.get("singleton", data)
    return single["name"].replace("$", ""), tuple(single.get("type", {}).get("choices", ()))


@dataclass
class RecordedEntry:
    """bfrt_python's TableEntry."""

    table: RecordedTable
    key: tuple[Any, ...]
    data: dict[bytes, Any]

    def push(self, pipe: int | None = None) -> None:
        self.table.entries.setdefault((*self.key, pipe), {}).update(self.data)


class RecordedTable:
    """One table. `entries` has the values that were set, by key and pipe."""

    def __init__(self, name: str, schema: TableSchema) -> None:
        self.name, self.schema = name, schema
        self.entries: dict[tuple[Any, ...], dict[bytes, Any]] = {}

    def _checked_entry(self, named_values: dict[str, Any], action: str = "") -> RecordedEntry:
        fields = self.schema.data | (self.schema.actions[action] if action else {})
        key = tuple(named_values.pop(name) for name in self.schema.keys)
        for name, value in named_values.items():
            assert name in fields, f"{self.name} has no field {name}"
            assert not fields[name] or value in fields[name], f"{self.name}.{name} can't be {value}"
        return RecordedEntry(self, key, {name.encode(): value for name, value in named_values.items()})

    def __getattr__(self, method: str) -> Any:
        verb, _, action = method.partition("_with_")
        assert verb in ("entry", "add", "mod"), f"{self.name} has no method {method}"
        assert action in {*self.schema.actions, ""}, f"{self.name} has no action {action}"

        def call(pipe: int | None = None, **fields: Any) -> RecordedEntry | None:
            entry = self._checked_entry(fields, action)
            if verb == "entry":
                return entry
            if verb == "add":
                assert (*entry.key, pipe) not in self.entries, f"{self.name} has an entry {entry.key}"
            entry.push(pipe)
            return None

        return call

    def get(
        self, *, print_ents: bool = True, from_hw: bool = False, pipe: int | None = None, **key: Any
    ) -> RecordedEntry | int:
        assert key.keys() == set(self.schema.keys), f"the keys of {self.name} are {self.schema.keys}"
        place = (*(key[name] for name in self.schema.keys), pipe)
        if place not in self.entries:
            return -1
        data = self.entries[place]
        if self.name.startswith("port."):  # whose fields begin with a dollar, which methods leave out
            data = {name if name[:1] == b"$" else b"$" + name: value for name, value in data.items()}
        return RecordedEntry(self, place[:-1], data)

    def get_default(self, *, print_ent: bool = True) -> RecordedEntry:
        assert not self.schema.keys, f"{self.name} has keys"
        return RecordedEntry(self, (), self.entries[()])


class RecordedNode:
    """A step of a table's path."""


def tree(schemas: Mapping[str, TableSchema]) -> tuple[Any, dict[str, RecordedTable]]:
    """Return `bfrt`, and its tables by path."""
    root: Any = RecordedNode()
    tables = {}
    for path, schema in schemas.items():
        *way, last = path.split(".")
        at = root
        for step in way:
            if not hasattr(at, step):
                setattr(at, step, RecordedNode())
            at = getattr(at, step)
        tables[path] = RecordedTable(path, schema)
        setattr(at, last, tables[path])
    return root, tables
