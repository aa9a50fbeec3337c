"""Translation of match fields between P4Runtime messages and keys: a pair of functions per match kind.

P4Runtime specification, section 9.1.1. A further match kind is one more function and one line in `_MATCHES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finsy.proto import p4i, p4r

from softswitch.p4runtime.bytestrings import parse, to_bytes
from softswitch.program.state import Key, MatchKind, TableError

KINDS = {
    p4i.MatchField.EXACT: MatchKind.EXACT,
    p4i.MatchField.LPM: MatchKind.LPM,
    p4i.MatchField.TERNARY: MatchKind.TERNARY,
    p4i.MatchField.RANGE: MatchKind.RANGE,
    p4i.MatchField.OPTIONAL: MatchKind.OPTIONAL,
}
Decoder = Callable[[p4r.FieldMatch], Key]
Encoder = Callable[[p4r.FieldMatch, Key], None]


def invalid(message: str) -> TableError:
    """Return the error of an update that violates the specification."""
    return TableError("INVALID_ARGUMENT", message)


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """A key field: its position in the key, and the functions that read and write its match."""

    position: int
    id: int
    name: str
    kind: MatchKind
    decode: Decoder
    encode: Encoder


def field_codec(position: int, field: p4i.MatchField, table: str) -> FieldCodec:
    """Return the codec of a table's key field."""
    kind = KINDS[field.match_type]
    what = f"table {table}: match field {field.name}"
    decode, encode = _MATCHES[kind](field.bitwidth, what)
    return FieldCodec(position, field.id, field.name, kind, decode, encode)


def _exact(width: int, what: str) -> tuple[Decoder, Encoder]:
    def decode(message: p4r.FieldMatch) -> Key:
        value = message.exact.value
        number = int.from_bytes(value)
        if not value or number >> width:
            kind = message.WhichOneof("field_match_type")
            if kind != "exact":
                raise invalid(f"{what} is exact, not {kind}")
            return parse_field(value, width, what)
        return number

    def encode(message: p4r.FieldMatch, key: Key) -> None:
        assert isinstance(key, int)
        message.exact.value = key.to_bytes((key.bit_length() + 7) >> 3 or 1)

    return decode, encode


def _optional(width: int, what: str) -> tuple[Decoder, Encoder]:
    def decode(message: p4r.FieldMatch) -> Key:
        _expect(message, "optional", what)
        return parse_field(message.optional.value, width, what)

    def encode(message: p4r.FieldMatch, key: Key) -> None:
        assert isinstance(key, int)
        message.optional.value = to_bytes(key)

    return decode, encode


def _lpm(width: int, what: str) -> tuple[Decoder, Encoder]:
    def decode(message: p4r.FieldMatch) -> Key:
        _expect(message, "lpm", what)
        length = message.lpm.prefix_len
        if not 0 < length <= width:
            raise invalid(f"{what}: prefix length {length}; it must be 1 to {width}, or the field omitted")
        value = parse_field(message.lpm.value, width, what)
        if value & ((1 << width - length) - 1):
            raise invalid(f"{what}: {value:#x} has bits beyond its prefix of {length}")
        return value, length

    def encode(message: p4r.FieldMatch, key: Key) -> None:
        assert isinstance(key, tuple)
        message.lpm.value, message.lpm.prefix_len = to_bytes(key[0]), key[1]

    return decode, encode


def _ternary(width: int, what: str) -> tuple[Decoder, Encoder]:
    def decode(message: p4r.FieldMatch) -> Key:
        _expect(message, "ternary", what)
        value = parse_field(message.ternary.value, width, what)
        mask = parse_field(message.ternary.mask, width, f"{what}: mask")
        if not mask:
            raise invalid(f"{what}: the mask is 0; omit the field instead")
        if value & ~mask:
            raise invalid(f"{what}: {value:#x} has bits outside its mask {mask:#x}")
        return value, mask

    def encode(message: p4r.FieldMatch, key: Key) -> None:
        assert isinstance(key, tuple)
        message.ternary.value, message.ternary.mask = to_bytes(key[0]), to_bytes(key[1])

    return decode, encode


def _range(width: int, what: str) -> tuple[Decoder, Encoder]:
    def decode(message: p4r.FieldMatch) -> Key:
        _expect(message, "range", what)
        low = parse_field(message.range.low, width, f"{what}: low")
        high = parse_field(message.range.high, width, f"{what}: high")
        if low > high:
            raise invalid(f"{what}: low {low:#x} is above high {high:#x}")
        if low == 0 and high == (1 << width) - 1:
            raise invalid(f"{what}: the range has every value; omit the field instead")
        return low, high

    def encode(message: p4r.FieldMatch, key: Key) -> None:
        assert isinstance(key, tuple)
        message.range.low, message.range.high = to_bytes(key[0]), to_bytes(key[1])

    return decode, encode


def _expect(message: p4r.FieldMatch, kind: str, what: str) -> None:
    if message.WhichOneof("field_match_type") != kind:
        raise invalid(f"{what} is {kind}, not {message.WhichOneof('field_match_type')}")


def parse_field(value: bytes, width: int, what: str) -> int:
    """Return a value of `width` bits; raise `TableError` INVALID_ARGUMENT if it is wrong."""
    try:
        return parse(value, width, what)
    except ValueError as error:
        raise invalid(str(error)) from None


_MATCHES: dict[MatchKind, Callable[[int, str], tuple[Decoder, Encoder]]] = {
    MatchKind.EXACT: _exact,
    MatchKind.OPTIONAL: _optional,
    MatchKind.LPM: _lpm,
    MatchKind.TERNARY: _ternary,
    MatchKind.RANGE: _range,
}
