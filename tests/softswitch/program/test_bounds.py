"""A program from a controller takes bounded time and memory, or is refused in one clean line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finsy.proto import p4i, p4r
from google.protobuf import text_format

from softswitch.codegen.program import load
from softswitch.p4runtime.fieldcodecs import parse
from softswitch.p4runtime.pipeline import build
from softswitch.program.bmv2 import MAX_JSON
from softswitch.program.state import StatusError

EXAMPLES = Path(__file__).parent.parent.parent.parent / "softswitch" / "examples"
ALL_ONES = {"type": "hexstr", "value": "0x" + "f" * 512}


def program(name: str = "counter") -> tuple[Any, p4i.P4Info]:
    info = p4i.P4Info()
    text_format.Parse((EXAMPLES / f"{name}.p4info.txtpb").read_text(), info)
    return json.loads((EXAMPLES / f"{name}.json").read_text()), info


def config(raw: Any, info: p4i.P4Info) -> p4r.ForwardingPipelineConfig:
    return p4r.ForwardingPipelineConfig(p4info=info, p4_device_config=json.dumps(raw).encode())


def tree(op: str, depth: int, leaf: Any) -> Any:
    if not depth:
        return leaf
    inner = tree(op, depth - 1, leaf)
    return {"type": "expression", "value": {"op": op, "left": inner, "right": inner}}


def assigned(value: Any) -> Callable[[Any, p4i.P4Info], None]:
    def change(raw: Any, _: p4i.P4Info) -> None:
        assignments = [p for action in raw["actions"] for p in action["primitives"] if p["op"] == "assign"]
        assignments[0]["parameters"][1] = {"type": "expression", "value": value}

    return change


def shifted(times: int) -> Any:
    value: Any = ALL_ONES
    for _ in range(times):
        value = {"type": "expression", "value": {"op": "<<", "left": value, "right": ALL_ONES}}
    return value


def chain(depth: int) -> Any:
    value: Any = ALL_ONES
    for _ in range(depth):
        value = {"type": "expression", "value": {"op": "~", "left": None, "right": value}}
    return value


def wide_key(raw: Any, info: p4i.P4Info) -> None:
    info.tables[0].match_fields[0].bitwidth = (1 << 31) - 1


def wide_register(_: Any, info: p4i.P4Info) -> None:
    info.registers[0].type_spec.bitstring.bit.bitwidth = (1 << 31) - 1


def array(raw: Any, info: p4i.P4Info, size: int, count: int = 1) -> None:
    """Add registers to a program."""
    for number in range(count):
        name = f"more{number}"
        raw["register_arrays"].append({"name": name, "id": number, "size": size, "bitwidth": 8})
        register = info.registers.add(size=size)
        register.preamble.name, register.preamble.id = name, 0x16000100 + number
        register.type_spec.bitstring.bit.bitwidth = 8


def many_registers(raw: Any, info: p4i.P4Info) -> None:
    array(raw, info, 1 << 20, 200)


def looping_tables(raw: Any, _: p4i.P4Info) -> None:
    for pipeline in raw["pipelines"]:
        for table in pipeline["tables"]:
            table["base_default_next"] = table["name"]
            table["next_tables"] = dict.fromkeys(table["next_tables"], table["name"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (assigned(tree("*", 12, ALL_ONES)), r"operator \*: a value of more than 16,384 bits"),
        (assigned(shifted(6)), "operator <<: a value of more than 16,384 bits"),
        (assigned(chain(300)), "nested too deep|recursion"),
        (wide_key, "has 2147483647 bits in the P4Info"),
        (wide_register, "register ingress.packets has 2147483647 bits in the P4Info, 32 in the JSON"),
        (many_registers, "209,7[0-9,]+ cells together; a program may have 1,048,576"),
        (looping_tables, "not consistent|loop"),
    ],
    ids=["product", "shift", "deep", "wide key", "wide register", "registers", "loop"],
)
def test_a_program_that_would_take_too_much_is_refused(
    change: Callable[[Any, p4i.P4Info], None], words: str
) -> None:
    raw, info = program()
    change(raw, info)
    start = time.process_time()
    with pytest.raises(ValueError, match=words) as error:
        build(config(raw, info))
    assert time.process_time() - start < 2
    assert len(str(error.value)) < 5000


def test_a_large_program_is_refused_unread() -> None:
    raw, info = program()
    raw["source"] = "x" * MAX_JSON
    with pytest.raises(ValueError, match="it may have 4,194,304"):
        build(config(raw, info))


def test_sums_and_shifts_of_usual_widths_are_supported() -> None:
    for value in (
        tree("+", 8, ALL_ONES),
        tree("*", 2, ALL_ONES),
        {"op": "<<", "left": ALL_ONES, "right": ALL_ONES},
    ):
        raw, info = program()
        assigned(value if "op" in value else value["value"])(raw, info)
        load(json.dumps(raw).encode(), info).process(1, bytes(60))


def test_a_long_number_is_not_quoted() -> None:
    with pytest.raises(StatusError) as error:
        parse(b"\xff" * (15 << 20), 32, "key")
    assert str(error.value).endswith("key is a number of 125,829,120 bits, which does not fit in 32 bits")
