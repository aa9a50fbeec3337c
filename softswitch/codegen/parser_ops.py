"""Positions of a parser, the code that reads and checks a frame there, and BMv2's parser operations.

A further operation is one function and one line in `OPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct

from softswitch.codegen.emitter import Emitter
from softswitch.codegen.primitives import emit_primitive
from softswitch.codegen.values import OPERATORS, Value, fit, number, truth, variable
from softswitch.program.bmv2 import Json

BYTE = 8


@dataclass(frozen=True, slots=True)
class ParserPlace:
    """Position of the parser: a known byte, or (`None`) the variable `at`; and the extracted headers."""

    offset: int | None
    extracted: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The source of the byte's number."""
        return "at" if self.offset is None else str(self.offset)

    def plus(self, count: int | str) -> str:
        """Return the source of the number of a later byte, a constant or itself source."""
        if self.offset is None or isinstance(count, str):
            return f"{self.code} + {count}"
        return str(self.offset + count)


class ParserBase:
    """Emitter of code at a parser's position."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.codes = {name: number(code) for code, name in emitter.config.errors.items()}
        self.order = emitter.config.deparser["order"]

    @contextmanager
    def stop(self, place: ParserPlace) -> Iterator[None]:
        """Yield a block that ends parsing at its position."""
        yield
        if place.offset is not None:
            self.emitter.assign("at", place.code)
        self.emitter.line("break")

    def error(self, error: Value) -> None:
        """Set the parser's error."""
        self.emitter.store(["standard_metadata", "parser_error"], error)
        name = self.emitter.config.errors.get(error.constant or 0, error.code)
        self.emitter.trace("parser_error", error=self.emitter.text(name))

    def need(self, place: ParserPlace, count: int | str) -> None:
        """Emit a stop with `PacketTooShort` unless there are `count` more bytes."""
        with self.emitter.block(f"if size < {place.plus(count)}:"), self.stop(place):
            self.error(self.codes["PacketTooShort"])

    def fail_unless(self, test: Value, error: Value, place: ParserPlace) -> None:
        """Emit a stop with an error unless a condition holds."""
        with self.emitter.block(f"if not ({test.code}):"), self.stop(place):
            self.error(error)

    def lookahead(self, place: ParserPlace, span: list[int]) -> Value:
        """Return bits ahead (offset, width) as an unsigned value; emit a stop if the packet is too short."""
        offset, width = span
        end = (offset + width + BYTE - 1) // BYTE
        self.need(place, end)
        first = offset // BYTE
        size = end - first
        if size == 1:
            whole = variable(f"frame[{place.plus(first)}]", BYTE)
        elif size in (2, 4, 8):
            reader = self.emitter.bind(
                "read", Struct({2: "!H", 4: "!I", 8: "!Q"}[size]).unpack_from, str(size)
            )
            whole = variable(f"{reader}(frame, {place.plus(first)})[0]", size * BYTE)
        else:
            whole = variable(
                f'int.from_bytes(frame[{place.plus(first)}:{place.plus(end)}], "big")', size * BYTE
            )
        return fit(OPERATORS[">>"](whole, number(end * BYTE - offset - width)), width)

    def advance(self, place: ParserPlace, count: int, header: str | None = None) -> ParserPlace:
        """Return the place after `count` bytes."""
        if place.offset is None:
            self.emitter.line(f"at += {count}")
            return place
        extracted = place.extracted + ((header,) if header else ())
        return ParserPlace(place.offset + count, extracted)


def _extract(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    if parameters[0]["type"] != "regular":
        p.emitter.config.problem(f"extracting a {parameters[0]['type']} is not supported", op)
        return place
    e = p.emitter
    header = parameters[0]["value"]
    layout = e.layout(header)
    p.need(place, layout.size)
    live = [chunk for chunk in layout.chunks if e.live(chunk.name)]
    if live:
        reader = e.bind("unpack", layout.unpacker(live).unpack_from, header)
        e.line(f"{', '.join(chunk.name for chunk in live)}, = {reader}(frame, {place.code})")
    e.assign(e.flag(header, "valid"), "1")
    e.assign(e.flag(header, "at"), place.code)
    e.findings.offsets.setdefault(header, set()).add(place.offset)
    if header in place.extracted or place.offset is None:
        e.mark_clean(header)
    if not _in_order(p.order, (*place.extracted, header)):
        e.raise_flag("changed")
    return p.advance(place, layout.size, header)


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
    return p.advance(place, count)


def _advance(p: ParserBase, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip a number of bits, given as a constant or an expression."""
    bits = p.emitter.value(parameters[0], op)
    e = p.emitter
    invalid = p.codes["ParserInvalidArgument"]
    e.raise_flag("changed")
    if bits.constant is not None:
        if bits.constant % BYTE:
            p.fail_unless(truth("False"), invalid, place)
            return place
        p.need(place, bits.constant // BYTE)
        return p.advance(place, bits.constant // BYTE)
    e.line(f"_bits = {bits.code}")
    p.fail_unless(truth("_bits % 8 == 0"), invalid, place)
    p.need(place, "_bits // 8")
    e.line(f"at = {place.plus('_bits // 8')}")
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
