"""The primitives of actions as Python source.

A further primitive or extern is one function and one line in `PRIMITIVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from softswitch.codegen.emitter import Emitter, parse_hex
from softswitch.codegen.hashes import calculation
from softswitch.codegen.values import OPERATORS, Value, fit, number, paren, variable
from softswitch.program.bmv2 import Json, ProgramConfig, fragment
from softswitch.program.meters import GREEN, RED

DROP_PORT = 511


def check_actions(config: ProgramConfig) -> None:
    """Note every unsupported primitive of the program, even if other faults hide it."""
    for action in config.actions.values():
        for primitive in action["primitives"]:
            if not primitive["op"].startswith("_jump"):
                _check_supported(config, primitive, action)


def _check_supported(config: ProgramConfig, primitive: Json, action: Json) -> bool:
    is_supported = primitive["op"] in PRIMITIVES
    if not is_supported:
        text = fragment(primitive)
        problem = f"primitive {primitive['op']} is not supported"
        config.problem(f"{problem} ({text})" if text else problem, primitive, action)
    return is_supported


def emit_action(emitter: Emitter, primitives: list[Json], action: Json) -> None:
    """Emit an action, whose parameters are `emitter.arguments`."""
    _emit_range(emitter, primitives, 0, len(primitives), action)


def _emit_range(emitter: Emitter, primitives: list[Json], start: int, end: int, action: Json) -> None:
    """Emit primitives `start` to `end`; p4c writes an `if` within an action as two forward jumps."""
    at = start
    while at < end:
        primitive = primitives[at]
        if primitive["op"] == "_jump_if_zero":
            at = _emit_if(emitter, primitives, at, end, action)
        elif primitive["op"] == "_jump":
            emitter.config.problem("a jump outside of an if-else is not supported", primitive, action)
            return
        else:
            emit_primitive(emitter, primitive, action)
            at += 1
        if primitive["op"] == "exit":
            return


def _emit_if(emitter: Emitter, primitives: list[Json], at: int, end: int, action: Json) -> int:
    """Emit an `if` whose jump is at `at`; return the position after it."""
    test, target = primitives[at]["parameters"]
    middle = parse_hex(target["value"])
    body_end, after = middle, middle
    if middle - 1 > at and primitives[middle - 1]["op"] == "_jump":
        body_end = middle - 1
        # After an exit, the jump belongs to the exit; only other paths reach the code after it.
        if primitives[middle - 2]["op"] != "exit":
            after = parse_hex(primitives[middle - 1]["parameters"][0]["value"])
    if not at < body_end <= middle <= after <= end:
        emitter.config.problem("a jump outside of an if-else is not supported", primitives[at], action)
        return end
    with emitter.block(f"if {emitter.condition(test, primitives[at], action).code}:"):
        _emit_range(emitter, primitives, at + 1, body_end, action)
    if after > middle:
        with emitter.block("else:", optional=True):
            _emit_range(emitter, primitives, middle, after, action)
    return after


def emit_primitive(emitter: Emitter, primitive: Json, action: Json) -> None:
    """Emit one primitive."""
    if _check_supported(emitter.config, primitive, action):
        PRIMITIVES[primitive["op"]](emitter, primitive["parameters"], primitive)


def _assign(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    target, source = parameters
    if target["type"] != "field":
        emitter.config.problem(f"assigning to a {target['type']} is not supported", at)
        return
    if target["value"] == ["standard_metadata", "priority"]:
        emitter.config.problem("priority queues are not supported", at)
    emitter.store(target["value"], emitter.value(source, at))


def _add_header(emitter: Emitter, parameters: list[Json], _: Json) -> None:
    header = parameters[0]["value"]
    valid = emitter.flag(header, "valid")
    with emitter.block(f"if not {valid}:"):
        layout = emitter.layout(header)
        for chunk in layout.chunks:
            emitter.assign(chunk.name, chunk.zero, chunk.zero)
        emitter.assign(valid, "1")
        resize(emitter, f"+= {layout.size}")
        emitter.mark_written(header)


def _remove_header(emitter: Emitter, parameters: list[Json], _: Json) -> None:
    header = parameters[0]["value"]
    valid = emitter.flag(header, "valid")
    emitter.findings.unset.add(header)
    with emitter.block(f"if {valid}:"):
        emitter.assign(valid, "0")
        resize(emitter, f"-= {emitter.plan.layouts[header].size}")
        emitter.mark_changed(header)


def _assign_header(emitter: Emitter, parameters: list[Json], _: Json) -> None:
    target, source = (parameter["value"] for parameter in parameters)
    emitter.findings.unset.add(target)
    with emitter.block(f"if {emitter.flag(source, 'valid')}:"):
        emitter.assign(emitter.flag(target, "valid"), "1")
        pairs = zip(emitter.plan.layouts[target].chunks, emitter.plan.layouts[source].chunks, strict=True)
        for to, of in pairs:
            emitter.declare(of.name, of.zero)
            emitter.assign(to.name, of.name, to.zero)
        emitter.mark_written(target)
    with emitter.block("else:"):
        emitter.assign(emitter.flag(target, "valid"), "0")
        emitter.mark_changed(target)


def resize(emitter: Emitter, change: str) -> None:
    """Change the value of `packet_length` in egress."""
    emitter.declare("packet_size", "size")
    if emitter.live("packet_size"):
        emitter.line(f"packet_size {change}")


def _mark_to_drop(emitter: Emitter, parameters: list[Json], _: Json) -> None:
    emitter.store(["standard_metadata", "egress_spec"], number(DROP_PORT))
    emitter.store(["standard_metadata", "mcast_grp"], number(0))


def _count(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    name = parameters[0]["value"]
    cells = emitter.links.counters[name]
    with _indexed(emitter, "counter", name, cells, parameters[1], at) as cell:
        emitter.line(f"_count = {cell}")
        emitter.line("_count.packets += 1")
        emitter.line("_count.bytes += size")


@contextmanager
def _indexed(
    emitter: Emitter, kind: str, name: str, cells: list[Any], index: Json, at: Json
) -> Iterator[str]:
    """Yield the source of an array's cell, in a block that is skipped if the index is out of bounds."""
    index_value = emitter.value(index, at)
    array = emitter.bind(kind, cells, name)
    if index_value.within(0, len(cells) - 1):
        yield f"{array}[{index_value.code}]"
        return
    with emitter.block(f"if (_i := {index_value.code}) < {len(cells)}:"):
        yield f"{array}[_i]"


def emit_meter(emitter: Emitter, name: str, cell: str, target: list[str] | None = None) -> None:
    """Set a field, of a direct meter its own, to the color of the packet in a meter's cell."""
    array = emitter.config.array("meter_arrays", name)
    target = target or array["result_target"]
    amount = "size" if array["type"] == "bytes" else "1"
    now = emitter.bind("now", emitter.links.clock)
    emitter.line(f"_meter = {cell}")
    color = f"_meter.color({amount}, {now}()) if _meter is not None else {GREEN}"
    emitter.store(target, Value(color, GREEN, RED, "if"))
    emitter.trace("meter", name=emitter.text(name), color=emitter.load(target).code)


def _execute_meter(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    name, index, target = parameters
    if target["type"] != "field":
        emitter.config.problem(f"metering into a {target['type']} is not supported", at)
        return
    cells = emitter.links.meters[name["value"]]
    with _indexed(emitter, "meter", name["value"], cells, index, at) as cell:
        emit_meter(emitter, name["value"], cell, target["value"])


def _register_read(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    target, name, index = parameters
    if target["type"] != "field":
        emitter.config.problem(f"reading a register into a {target['type']} is not supported", at)
        return
    cells = emitter.links.registers[name["value"]]
    with _indexed(emitter, "register", name["value"], cells, index, at) as cell:
        emitter.store(target["value"], variable(cell, _register_width(emitter, name["value"])))


def _register_write(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    name, index, source = parameters
    cells = emitter.links.registers[name["value"]]
    value = fit(emitter.value(source, at), _register_width(emitter, name["value"]))
    with _indexed(emitter, "register", name["value"], cells, index, at) as cell:
        emitter.line(f"{cell} = {value.code}")


def _register_width(emitter: Emitter, name: str) -> int:
    return int(emitter.config.array("register_arrays", name)["bitwidth"])


def _hash(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    target, base, name, size = parameters
    result = calculation(emitter, name["value"], at)
    modulus = emitter.value(size, at)
    first = emitter.value(base, at)
    if modulus.constant is not None:
        result = OPERATORS["%"](result, number(modulus.constant or 1))
    else:
        result = Value(f"{paren(result)} % ({modulus.code} or 1)", 0, result.high, "%")
    emitter.store(target["value"], OPERATORS["+"](result, first))


def _log_msg(emitter: Emitter, parameters: list[Json], at: Json) -> None:
    text, *rest = parameters
    items = rest[0]["value"] if rest else []
    values = "".join(f"{paren(emitter.value(item, at))}, " for item in items)
    emitter.trace("log", text=f"{emitter.bind('filled', _filled)}({emitter.text(text['value'])}, ({values}))")


def _filled(text: str, values: tuple[object, ...]) -> str:
    """Return a message with a value in place of each `{}`."""
    for value in values:
        text = text.replace("{}", str(value), 1)
    return text


PRIMITIVES: dict[str, Callable[[Emitter, list[Json], Json], None]] = {
    "assign": _assign,
    "add_header": _add_header,
    "remove_header": _remove_header,
    "assign_header": _assign_header,
    "mark_to_drop": _mark_to_drop,
    "count": _count,
    "execute_meter": _execute_meter,
    "register_read": _register_read,
    "register_write": _register_write,
    "modify_field_with_hash_based_offset": _hash,
    "exit": lambda emitter, *_: emitter.line("break"),
    "log_msg": _log_msg,
    "no_op": lambda *_: None,
}
"""BMv2's primitives; each emits its code for (parameters, the enclosing JSON object)."""
