"""Identifiers in the generated code, and the layout of headers in its local variables.

A header's bytes are split into chunks of 1, 2, 4 or 8 bytes, one variable each. One `struct` call reads them,
and another writes them. A field that shares a chunk or spans several is extracted by shifts and masks. Runs
of fields that the program does not use stay together as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from softswitch.codegen.values import OPERATORS, Value, chain, fit, number, variable
from softswitch.program.bmv2 import Header

SCRATCH = "_w"
"""Variable for a value that is written to several chunks."""

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Names:
    """Identifiers by number, so that no name of the P4 program reaches the generated code."""

    def __init__(self) -> None:
        self._identifiers: dict[tuple[str, ...], str] = {}

    def identifier(self, kind: str, *words: str) -> str:
        """Return the identifier for these words; it is the same for the same words of the same kind."""
        return self._identifiers.setdefault((kind, *words), f"{kind}_{len(self._identifiers) + 1}")


@dataclass(frozen=True, slots=True)
class HeaderChunk:
    """A variable with bits `start` to `end` of a header; as bytes if `raw`."""

    name: str
    start: int
    end: int
    raw: bool

    @property
    def width(self) -> int:
        """Width in bits."""
        return self.end - self.start

    @property
    def zero(self) -> str:
        """The source of its value in a header of zeros."""
        return f"bytes({self.width // 8})" if self.raw else "0"

    def code(self, is_used: bool = True) -> str:
        """Return its `struct` format; padding if it is not used."""
        size = self.width // 8
        if not is_used:
            return f"{size}x"
        return f"{size}s" if self.raw else _CODES[size]


@dataclass(frozen=True, slots=True)
class HeaderLayout:
    """A header's chunks, and its fields (first bit, width, signed)."""

    header: Header
    chunks: tuple[HeaderChunk, ...]
    spans: dict[str, tuple[int, int, bool]]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.header.bits // 8

    def packer(self) -> Struct:
        """Return a `Struct` that writes all chunks."""
        return Struct("!" + "".join(c.code() for c in self.chunks))

    def unpacker(self, live: list[HeaderChunk]) -> Struct:
        """Return a `Struct` that reads the chunks in use, and skips the others."""
        return Struct("!" + "".join(c.code(c in live) for c in self.chunks))

    def read(self, start: int, width: int) -> Value:
        """Return the bits `start` to `start + width` as an unsigned value."""
        pieces = [
            self._piece(c, start, start + width) for c in self.chunks if _overlap(c, start, start + width)
        ]
        value = pieces[0]
        for piece in pieces[1:]:
            value = OPERATORS["|"](value, piece)
        return value

    def read_field(self, name: str) -> Value:
        """Return a field's value; two's complement if it is signed."""
        start, width, signed = self.spans[name]
        value = self.read(start, width)
        return fit(value, width, signed=True) if signed else value

    def write_field(self, name: str, value: Value) -> list[tuple[str, str]]:
        """Return the assignments (variable, source) of a value, truncated to the field's width."""
        start, width, _ = self.spans[name]
        bits = fit(value, width)
        touched = [c for c in self.chunks if _overlap(c, start, start + width)]
        lines = []
        if len(touched) > 1 and bits.constant is None:
            lines.append((SCRATCH, bits.code))
            bits = variable(SCRATCH, width)
        for c in touched:
            low, high = max(start, c.start), min(start + width, c.end)
            part = fit(OPERATORS[">>"](bits, number(start + width - high)), high - low)
            part = OPERATORS["<<"](part, number(c.end - high))
            if high - low < c.width:
                keep = ((1 << c.width) - 1) ^ (((1 << (high - low)) - 1) << (c.end - high))
                part = OPERATORS["|"](chain("&", variable(c.name, c.width), number(keep), 0, keep), part)
            lines.append((c.name, part.code))
        return lines

    @staticmethod
    def _piece(c: HeaderChunk, start: int, end: int) -> Value:
        """Return a chunk's part of the bits `start` to `end`, shifted to its position in them."""
        low, high = max(start, c.start), min(end, c.end)
        value = OPERATORS[">>"](variable(c.name, c.width), number(c.end - high))
        return OPERATORS["<<"](fit(value, high - low), number(end - high))


def _overlap(c: HeaderChunk, start: int, end: int) -> bool:
    return c.start < end and start < c.end


def plan(header: Header, touched: set[str], names: Names) -> HeaderLayout:
    """Split a header into chunks, given the fields that the program reads or writes."""
    spans: dict[str, tuple[int, int, bool]] = {}
    runs: list[tuple[int, int, list[str]]] = []
    start = at = 0
    members: list[str] = []
    for f in header.fields:
        spans[f.name] = (at, f.width, f.signed)
        members.append(f.name)
        at += f.width
        if at % 8 == 0 and at > start:
            runs.append((start, at, members))
            start, members = at, []
    chunks: list[HeaderChunk] = []
    for start, end, members in runs:
        if not touched.intersection(members):
            first = chunks.pop().start if chunks and chunks[-1].raw else start
            chunks.append(HeaderChunk(names.identifier("raw", header.name, str(first)), first, end, raw=True))
            continue
        for low, high in _pieces(start, end):
            chunks.append(HeaderChunk(names.identifier("chunk", header.name, str(low)), low, high, raw=False))
    return HeaderLayout(header, tuple(chunks), spans)


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    """Split a range of whole bytes, given in bits, into pieces of 8, 4, 2 and 1 bytes."""
    pieces = []
    while start < end:
        size = next(s for s in (8, 4, 2, 1) if s * 8 <= end - start)
        pieces.append((start, start + size * 8))
        start += size * 8
    return pieces
