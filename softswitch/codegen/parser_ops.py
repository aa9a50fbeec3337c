"""BMv2's parser operations as Python source. A further operation is one function and one line in `OPS`."""

from __future__ import annotations

from collections.abc import Callable

from softswitch.codegen.parser_base import BYTE, ParserBase, ParserPlace
from softswitch.codegen.primitives import emit_primitive
from softswitch.codegen.values import number, truth
from softswitch.program.bmv2 import Json


def _extract(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    if parameters[0]["type"] != "regular":
        p.emitter.config.problem(f"extracting a {parameters[0]['type']} is not supported", op)
        return place
    e = p.emitter
    header = parameters[0]["value"]
    layout = e.plan.layouts[header]
    p.need(place, layout.size)
    for chunk in layout.chunks:
        e.declare(chunk.name, chunk.zero)
    live = [chunk for chunk in layout.chunks if e.live(chunk.name)]
    if live:
        reader = e.bind(f"{header}_unpack", layout.unpacker(live).unpack_from)
        e.line(f"{', '.join(chunk.name for chunk in live)}, = {reader}(frame, {place.code})")
    e.assign(e.flag(header, "valid"), "1")
    e.assign(e.flag(header, "at"), place.code)
    e.found.offsets.setdefault(header, set()).add(place.known)
    if header in place.extracted or place.known is None:
        e.mark_clean(header)
    if not _in_order(p.order, (*place.extracted, header)):
        e.raise_flag("changed")
    return p.moved(place, layout.size, header)


def _in_order(order: list[str], extracted: tuple[str, ...]) -> bool:
    """Return whether emitting these headers gives their bytes in the received order."""
    places = [order.index(header) if header in order else -1 for header in extracted]
    return all(a < b for a, b in zip([-1, *places[:-1]], places, strict=True))


def _set(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    target, source = parameters
    if source["type"] == "lookahead":
        value = p.lookahead(place, source["value"])
    else:
        value = p.emitter.value(source, op, p.emitter.config.parser)
    p.emitter.store(target["value"], value)
    return place


def _verify(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    test, error = parameters
    p.fail_unless(p.emitter.condition(test, op), p.emitter.value(error, op), place)
    return place


def _shift(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip bytes without a header: they are removed from the packet."""
    count = int(parameters[0]) if isinstance(parameters[0], int) else int(parameters[0]["value"])
    p.need(place, count)
    p.emitter.raise_flag("changed")
    return p.moved(place, count)


def _advance(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip a number of bits, given as a constant or an expression."""
    bits = p.emitter.value(parameters[0], op)
    e = p.emitter
    invalid = number(p.codes["ParserInvalidArgument"])
    e.raise_flag("changed")
    if bits.constant is not None:
        if bits.constant % BYTE:
            p.fail_unless(truth("False"), invalid, place)
            return place
        p.need(place, bits.constant // BYTE)
        return p.moved(place, bits.constant // BYTE)
    e.line(f"_bits = {bits.code}")
    p.fail_unless(truth("_bits % 8 == 0"), invalid, place)
    with e.block(f"if size < {place.code} + _bits // 8:"), p.stop(place):
        p.error("PacketTooShort")
    e.line(f"at = {place.code} + _bits // 8")
    return ParserPlace(None, place.extracted)


def _primitive(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    emit_primitive(p.emitter, parameters[0], op)
    return place


OPS: dict[str, Callable[[ParserBase, ParserPlace, list[Json], Json], ParserPlace]] = {
    "extract": _extract,
    "set": _set,
    "verify": _verify,
    "shift": _shift,
    "advance": _advance,
    "primitive": _primitive,
}
"""BMv2's parser operations; each emits its code and returns the parser's new position."""
