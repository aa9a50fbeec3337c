"""The parts of a BMv2 JSON, each with its shape: headers, parsers, controls, arrays, calculations."""

from __future__ import annotations

from typing import Any, Final

from softswitch.program.schema import (
    CALL,
    FIELD,
    PRIMITIVE,
    SIZE_MAX,
    WIDTH,
    Check,
    hexstr,
    many,
    maybe,
    number,
    operand,
    parser_parameter,
    record,
    text,
    truth,
)

SIZE: Final = number(0, SIZE_MAX)
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
