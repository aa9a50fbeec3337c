"""Positions of a parser, and the code that reads and checks a frame at a position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct

from softswitch.codegen.emitter import Emitter
from softswitch.codegen.values import OPERATORS, Value, fit, number, variable

BYTE = 8


@dataclass(frozen=True, slots=True)
class ParserPlace:
    """Position of the parser: a known byte, or (`None`) the variable `at`; and the extracted headers."""

    known: int | None
    extracted: tuple[str, ...] = ()
    depth: int = 0

    @property
    def code(self) -> str:
        """The source of the byte's number."""
        return "at" if self.known is None else str(self.known)

    def plus(self, count: int) -> str:
        """Return the source of the number of a later byte."""
        return f"at + {count}" if self.known is None else str(self.known + count)


class ParserBase:
    """Emitter of code at a parser's position."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.codes = {name: code for code, name in emitter.config.errors.items()}
        self.order = emitter.config.deparser["order"]

    @contextmanager
    def stop(self, place: ParserPlace) -> Iterator[None]:
        """Yield a block that ends parsing at its position."""
        yield
        if place.known is not None:
            self.emitter.assign("at", place.code)
        self.emitter.line("break")

    def error(self, name: str) -> None:
        if self.emitter.known("standard_metadata", "parser_error"):
            self.emitter.store(["standard_metadata", "parser_error"], number(self.codes[name]))
        self.emitter.trace("parser_error", error=repr(name))

    def need(self, place: ParserPlace, count: int) -> None:
        """Emit a stop with `PacketTooShort` unless there are `count` more bytes."""
        with self.emitter.block(f"if size < {place.plus(count)}:"), self.stop(place):
            self.error("PacketTooShort")

    def fail_unless(self, test: Value, error: Value, place: ParserPlace) -> None:
        """Emit a stop with an error unless a condition holds."""
        with self.emitter.block(f"if not ({test.code}):"), self.stop(place):
            if self.emitter.known("standard_metadata", "parser_error"):
                self.emitter.store(["standard_metadata", "parser_error"], error)
            name = self.emitter.config.errors.get(error.constant or 0, error.code)
            self.emitter.trace("parser_error", error=repr(name))

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
            reader = self.emitter.bind(f"read_{size}", Struct({2: "!H", 4: "!I", 8: "!Q"}[size]).unpack_from)
            whole = variable(f"{reader}(frame, {place.plus(first)})[0]", size * BYTE)
        else:
            whole = variable(
                f'int.from_bytes(frame[{place.plus(first)}:{place.plus(end)}], "big")', size * BYTE
            )
        return fit(OPERATORS[">>"](whole, number(end * BYTE - offset - width)), width)

    def moved(self, place: ParserPlace, count: int, header: str | None = None) -> ParserPlace:
        """Return the place after `count` bytes."""
        if place.known is None:
            self.emitter.line(f"at += {count}")
            return place
        extracted = place.extracted + ((header,) if header else ())
        return ParserPlace(place.known + count, extracted)
