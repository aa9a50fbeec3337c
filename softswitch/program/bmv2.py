"""The output of p4c's BMv2 backend (JSON format version 2), in types for the code generator.

Expressions, parser operations and primitives stay JSON, for their emitters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError
from typing import Any, Final

from softswitch.program.schema import PROGRAM, FormatError, describe

Json = dict[str, Any]


class UnsupportedProgramError(Exception):
    """The program uses unsupported features: `problems` has them, with source lines."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(
            "the program is not supported:\n" + "\n".join(f"  {problem}" for problem in self.problems)
        )


@dataclass(frozen=True, slots=True)
class Field:
    """A header field; `width` in bits."""

    name: str
    width: int
    signed: bool


@dataclass(frozen=True, slots=True)
class Header:
    """A header or metadata instance."""

    name: str
    type: str
    fields: tuple[Field, ...]
    metadata: bool

    @property
    def bits(self) -> int:
        """Its width in bits."""
        return sum(f.width for f in self.fields)


@dataclass(slots=True)
class ProgramConfig:
    """A compiled program. `problems` has the unsupported features, each with its source line."""

    raw: Json
    headers: dict[str, Header]
    actions: dict[int, Json]
    calculations: dict[str, Json]
    parser: Json
    pipelines: dict[str, Json]
    deparser: Json
    errors: dict[int, str]
    problems: list[str] = field(default_factory=list)

    def problem(self, description: str, *at: Json) -> None:
        """Note an unsupported feature, with the source line of the first of `at` that has one."""
        text = with_location(description, *at)
        if text not in self.problems:
            self.problems.append(text)

    def array(self, kind: str, name: str) -> Json:
        """Return an array of the JSON, such as one of its `meter_arrays`."""
        arrays: dict[str, Json] = {array["name"]: array for array in self.raw[kind]}
        return arrays[name]

    def field(self, reference: list[str]) -> Field:
        """Return the field of a JSON reference [header, field]."""
        header, name = reference
        for candidate in self.headers[header].fields:
            if candidate.name == name:
                return candidate
        raise FormatError(f"header {header} has no field {name}")


def with_location(description: str, *at: Json) -> str:
    """Return a problem with the source line of the first of `at` that has one."""
    line = next((place for place in map(where, at) if place), "")
    return f"{line}: {description}" if line else description


def where(item: Json) -> str:
    """Return `file:line` of a JSON object, or an empty string."""
    info = item.get("source_info") if isinstance(item, dict) else None
    return f"{info['filename']}:{info['line']}" if info else ""


def fragment(item: Json) -> str:
    """Return the first line of a JSON object's source text."""
    info = item.get("source_info")
    return str(info.get("source_fragment", "")) if info else ""


_UNSUPPORTED_LISTS = {
    "header_stacks": "header stack",
    "header_union_types": "header union",
    "header_unions": "header union",
    "header_union_stacks": "header union stack",
    "parse_vsets": "parser value set",
    "learn_lists": "digest",
    "extern_instances": "extern",
}


_STANDARD_METADATA = {
    "ingress_port": 9,
    "egress_spec": 9,
    "egress_port": 9,
    "instance_type": 32,
    "packet_length": 32,
    "enq_timestamp": 32,
    "enq_qdepth": 19,
    "deq_timedelta": 32,
    "deq_qdepth": 19,
    "ingress_global_timestamp": 48,
    "egress_global_timestamp": 48,
    "mcast_grp": 16,
    "egress_rid": 16,
    "checksum_error": 1,
    "parser_error": 32,
    "priority": 3,
}
"""Width in bits of each field of v1model's `standard_metadata_t`."""


MAX_JSON: Final = 4 << 20
"""Bytes: Python compiles a program in one go, and forwards nothing meanwhile."""


def read(text: bytes) -> ProgramConfig:
    """Parse a BMv2 JSON; raise `FormatError` if it is not one.

    Raise `UnsupportedProgramError` if its shape can't be checked for what is not supported.
    """
    if len(text) > MAX_JSON:
        raise FormatError(f"the device config has {len(text):,} bytes; it may have {MAX_JSON:,}")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the device config is not JSON: {error}") from None
    if not isinstance(raw, dict) or "pipelines" not in raw:
        raise FormatError("the device config is not BMv2 JSON (of p4c-bm2-ss): it has no 'pipelines'")
    with consistent():
        try:
            PROGRAM(raw, "device config")
        except FormatError:
            # What refers to a header stack or a union has shapes of its own, which nothing here uses.
            if problems := [
                with_location(description, item) for description, item in _unsupported_features(raw)
            ]:
                raise UnsupportedProgramError(problems) from None
            raise
        return _config(raw)


def _unsupported_features(raw: Json) -> Iterator[tuple[str, Json]]:
    """Yield what is not supported of the parts that a program has by name, each with its part of the JSON."""
    for key, feature in _UNSUPPORTED_LISTS.items():
        items = raw.get(key)
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                yield f"{feature} {describe(item.get('name', ''))[1:-1]} is not supported", item


@contextmanager
def consistent() -> Iterator[None]:
    """Refuse a program that refers to what it lacks, or whose parts do not fit together."""
    try:
        yield
    except (LookupError, TypeError, CycleError) as error:
        raise FormatError(f"the device config is not consistent: {describe(error)}") from error
    except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:  # of the compiler of Python
        raise FormatError(f"the device config is nested too deep, or too large: {describe(error)}") from error


def _config(raw: Json) -> ProgramConfig:
    config = ProgramConfig(
        raw=raw,
        headers={},
        actions={action["id"]: action for action in raw["actions"]},
        calculations={calculation["name"]: calculation for calculation in raw["calculations"]},
        parser=raw["parsers"][0],
        pipelines={pipeline["name"]: pipeline for pipeline in raw["pipelines"]},
        deparser=raw["deparsers"][0],
        errors={code: name for name, code in raw["errors"]},
    )
    for description, item in _unsupported_features(raw):
        config.problem(description, item)
    types = {kind["name"]: _fields(kind, config) for kind in raw["header_types"]}
    for header in raw["headers"]:
        kind = header["header_type"]
        config.headers[header["name"]] = Header(header["name"], kind, types[kind], header["metadata"])
    for name in config.deparser["order"]:
        if config.headers[name].metadata:
            raise FormatError(f"the deparser emits {name[:60]}, which is metadata")
    for name in ("ingress", "egress"):
        if name not in config.pipelines:
            raise FormatError(f"the device config has no pipeline '{name}': it is not compiled for v1model")
    widths = {field.name: field.width for field in config.headers["standard_metadata"].fields}
    for name, width in _STANDARD_METADATA.items():
        if widths.get(name) != width:
            raise FormatError(
                f"the device config's standard_metadata has no field {name} of {width} bits: "
                "it is not compiled for v1model"
            )
    return config


def _fields(kind: Json, config: ProgramConfig) -> tuple[Field, ...]:
    fields = []
    for name, width, *rest in kind["fields"]:
        if not isinstance(width, int):
            config.problem(f"varbit field {name} of {kind['name']} is not supported", kind)
            continue
        if len(rest) > 1 and rest[1]:
            config.problem(f"saturating field {name} of {kind['name']} is not supported", kind)
        fields.append(Field(name, width, bool(rest and rest[0])))
    return tuple(fields)


def references(item: Any) -> set[tuple[str, str]]:
    """Return every (header, field) that a part of the JSON refers to."""
    fields: set[tuple[str, str]] = set()
    stack = [item]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            if item.get("type") == "field":
                fields.add(tuple(item["value"]))
            if "target" in item:
                fields.add(tuple(item["target"]))
            stack.extend(item.values())
    return fields
