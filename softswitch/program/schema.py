"""The shape of a BMv2 JSON: the type and range of every value that the code generator uses.

A checked program's numbers are integers of sane size, its truth values are booleans, and all else is text.
So the code generator meets no value that it could mistake for source. Unknown members are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

Check = Callable[[Any, str], None]
"""Check of a value at a place, such as `actions[3].name`; raises `FormatError`."""

MAX_WIDTH: Final = 2048
"""Bits of a field, a parameter or a constant."""
MAX_SIZE: Final = 1 << 20
"""Cells of an array, and entries of a table."""
_HEX = re.compile(r"-?0[xX][0-9a-fA-F]{1,512}", re.ASCII)


class FormatError(ValueError):
    """The bytes are not a BMv2 JSON of p4c; the message has the reason."""


def _expect(holds: bool, value: Any, at: str, right: str) -> None:
    if not holds:
        raise FormatError(
            f"the device config is not BMv2 JSON: {at} is {describe(value)}; it must be {right}"
        )


def describe(value: Any) -> str:
    """Return a value as text for a message, at most 60 characters long."""
    text = f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text(value: Any, at: str) -> None:
    """Check a text."""
    _expect(isinstance(value, str) and len(value) <= 1 << 16, value, at, "a text")


def truth(value: Any, at: str) -> None:
    """Check a truth value."""
    _expect(isinstance(value, bool), value, at, "true or false")


def hexstr(value: Any, at: str) -> None:
    """Check a number in BMv2's notation."""
    _expect(isinstance(value, str) and _HEX.fullmatch(value) is not None, value, at, "a number such as 0x1f")


def number(low: int, high: int) -> Check:
    """Return the check of an integer in low..high."""

    def check(value: Any, at: str) -> None:
        _expect(type(value) is int and low <= value <= high, value, at, f"an integer of {low} to {high}")

    return check


def maybe(inner: Check) -> Check:
    """Return the check of a value that may be null."""

    def check(value: Any, at: str) -> None:
        if value is not None:
            inner(value, at)

    return check


def many(inner: Check, least: int = 0) -> Check:
    """Return the check of a list."""

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, list) and len(value) >= least, value, at, f"a list of at least {least}")
        for place, item in enumerate(value):
            inner(item, f"{at}[{place}]")

    return check


def row(*inner: Check) -> Check:
    """Return the check of a list of fixed length."""

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, list) and len(value) == len(inner), value, at, f"a list of {len(inner)}")
        for place, (item, check_item) in enumerate(zip(value, inner, strict=True)):
            check_item(item, f"{at}[{place}]")

    return check


def record(*, optional: dict[str, Check] | None = None, **required: Check) -> Check:
    """Return the check of an object."""
    members = required | (optional or {}) | {"source_info": maybe(_source_info)}

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, dict), value, at, "an object")
        for name in required:
            _expect(name in value, value, at, f"an object with '{name}'")
        for name, check_member in members.items():
            if name in value:
                check_member(value[name], f"{at}.{name}")

    return check


def _source_info(value: Any, at: str) -> None:
    _expect(isinstance(value, dict), value, at, "an object")
    text(value.get("filename"), f"{at}.filename")
    number(0, 1 << 31)(value.get("line"), f"{at}.line")
    text(value.get("source_fragment", ""), f"{at}.source_fragment")


FIELD: Final = row(text, text)
WIDTH: Final = number(1, MAX_WIDTH)


def operand(value: Any, at: str) -> None:
    """Check an operand: its kind, and a value of that kind; a kind that is not known is refused later."""
    _operand(value, at)
    _OPERANDS.get(value["type"], text)(value["value"], f"{at}.value")


_operand = record(type=text, value=lambda _value, _at: None)


def _expression(value: Any, at: str) -> None:
    _expect(isinstance(value, dict), value, at, "an object")
    if "op" not in value:
        operand(value, at)
        return
    _OPERATION(value, at)


_OPERATION = record(
    op=text, optional={"left": maybe(operand), "right": maybe(operand), "cond": maybe(operand)}
)
_OPERANDS: dict[str, Check] = {
    "field": FIELD,
    "hexstr": hexstr,
    "bool": truth,
    "expression": _expression,
    "local": number(0, 255),
    "runtime_data": number(0, 255),
    "lookahead": row(number(0, MAX_WIDTH), WIDTH),
    "payload": maybe(text),
    "parameters_vector": many(operand),
}


def parser_parameter(value: Any, at: str) -> None:
    """Check the parameter of a parser operation: an operand, a number of bytes, or a primitive."""
    if isinstance(value, dict) and "op" in value:
        PRIMITIVE(value, at)
    elif isinstance(value, dict):
        operand(value, at)
    else:
        number(0, MAX_WIDTH)(value, at)


PRIMITIVE: Final = record(op=text, parameters=many(operand))
CALL: Final = record(action_id=number(0, MAX_SIZE), action_data=many(hexstr))


SIZE: Final = number(0, MAX_SIZE)
NAMED_OBJECT: Final = record(name=text)


def _field(value: Any, at: str) -> None:
    """Check a header type's field: name, width (`*`: it varies), and whether it is signed and saturates."""
    many(_any)(value, at)
    name, width, *flags = value if len(value) > 1 else (None, None)
    text(name, f"{at}[0]")
    (text if width == "*" else WIDTH)(width, f"{at}[1]")
    for place, flag in enumerate(flags, 2):
        truth(flag, f"{at}[{place}]")


def _error(value: Any, at: str) -> None:
    many(_any)(value, at)
    text(value[0] if value else None, f"{at}[0]")
    number(0, 1 << 16)(value[-1], f"{at}[1]")


def _any(_value: Any, _at: str) -> None:
    """Accept everything."""


def _next_tables(value: Any, at: str) -> None:
    record()(value, at)
    for name, target in value.items():
        maybe(text)(target, f"{at}.{name[:60]}")


_KEY = record(name=text, match_type=text, target=FIELD, optional={"mask": maybe(text)})
_MATCH = record(
    optional={"key": hexstr, "mask": hexstr, "start": hexstr, "end": hexstr, "prefix_length": number(0, 2048)}
)
_ENTRY = record(priority=number(0, 1 << 31), match_key=many(_MATCH), action_entry=CALL)
_DEFAULT = record(
    action_id=SIZE,
    action_data=many(hexstr),
    optional={"action_const": truth, "action_entry_const": truth},
)
_TABLE = record(
    name=text,
    type=text,
    key=many(_KEY),
    with_counters=truth,
    action_ids=many(SIZE),
    next_tables=_next_tables,
    base_default_next=maybe(text),
    optional={
        "default_entry": maybe(_DEFAULT),
        "entries": maybe(many(_ENTRY)),
        "direct_meters": maybe(text),
        "support_timeout": truth,
    },
)
_CONDITION = record(name=text, expression=operand, true_next=maybe(text), false_next=maybe(text))
_PIPELINE = record(
    name=text,
    init_table=maybe(text),
    tables=many(_TABLE),
    conditionals=many(_CONDITION),
    optional={"action_profiles": maybe(many(NAMED_OBJECT)), "action_calls": maybe(many(NAMED_OBJECT))},
)
_TRANSITION = record(
    type=text, next_state=maybe(text), optional={"value": maybe(text), "mask": maybe(hexstr)}
)


def _transition(value: Any, at: str) -> None:
    """Check a transition, whose value is a number or a name."""
    _TRANSITION(value, at)
    if value["type"] == "hexstr":
        hexstr(value.get("value"), f"{at}.value")


_STATE = record(
    name=text,
    parser_ops=many(record(op=text, parameters=many(parser_parameter))),
    transitions=many(_transition),
    transition_key=many(operand),
)
_INPUT = record(type=text, value=_any, optional={"bitwidth": WIDTH})


def _input(value: Any, at: str) -> None:
    """Check an input of a calculation; constants have a width."""
    _INPUT(value, at)
    operand(value, at)
    if value["type"] == "hexstr":
        WIDTH(value.get("bitwidth"), f"{at}.bitwidth")


_ARRAY = record(name=text, optional={"is_direct": truth})


def _array(value: Any, at: str) -> None:
    """Check an array, which has a size unless it is a table's own."""
    _ARRAY(value, at)
    if not value.get("is_direct"):
        SIZE(value.get("size"), f"{at}.size")


PROGRAM: Final[Check] = record(
    header_types=many(record(name=text, fields=many(_field))),
    headers=many(record(name=text, header_type=text, metadata=truth)),
    errors=many(_error),
    parsers=many(record(init_state=text, parse_states=many(_STATE)), least=1),
    deparsers=many(record(order=many(text), optional={"primitives": maybe(many(record(op=text)))}), least=1),
    actions=many(
        record(
            id=SIZE,
            name=text,
            runtime_data=many(record(name=text, bitwidth=WIDTH)),
            primitives=many(PRIMITIVE),
        )
    ),
    pipelines=many(_PIPELINE),
    calculations=many(record(name=text, algo=text, input=many(_input))),
    checksums=many(
        record(
            type=text,
            calculation=text,
            target=FIELD,
            optional={"verify": truth, "update": truth, "if_cond": maybe(operand)},
        )
    ),
    counter_arrays=many(_array),
    register_arrays=many(record(name=text, size=SIZE, bitwidth=WIDTH)),
    meter_arrays=many(
        record(
            name=text,
            type=text,
            rate_count=SIZE,
            optional={"size": SIZE, "is_direct": truth, "binding": text, "result_target": FIELD},
        )
    ),
)
"""The whole program."""
