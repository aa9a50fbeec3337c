"""Translation of values and match fields between P4Runtime messages and keys.

P4Runtime specification, sections "Bytestrings" and 9.1.1. A further match kind is one more function, its line
in `_DECODERS`, and its case in `encode_match`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from finsy.proto import p4r

from softswitch.program.match import Key, MatchField, MatchKind
from softswitch.program.state import StatusError


def invalid(message: str) -> StatusError:
    """Return the error of a request that violates the specification."""
    return StatusError("INVALID_ARGUMENT", message)


def to_bytes(value: int) -> bytes:
    """Return the canonical, shortest big-endian form."""
    return value.to_bytes((value.bit_length() + 7) >> 3 or 1)


def parse(value: bytes, width: int, label: str) -> int:
    """Return the integer of a byte string; raise `StatusError` if it is empty or wider than `width` bits."""
    if not value:
        raise invalid(f"{label} is missing or empty")
    number = int.from_bytes(value)
    if number >> width:
        raise invalid(f"{label} is {format_number(number)}, which does not fit in {width} bits")
    return number


def format_number(number: int) -> str:
    """Return a number for a message: a long one by its length."""
    bits = number.bit_length()
    return f"{number:#x}" if bits <= MAX_PRINTED_BITS else f"a number of {bits:,} bits"


MAX_PRINTED_BITS: Final = 256


def decode_match(message: p4r.FieldMatch, field: MatchField, label: str) -> Key:
    """Return the key of a match field; `label` names it in errors. Raise `StatusError` if it is wrong."""
    kind = message.WhichOneof("field_match_type")
    if kind != field.kind:
        raise invalid(f"{label} is {field.kind}, not {kind}")
    return _DECODERS[field.kind](message, field.width, label)


def _exact(message: p4r.FieldMatch, width: int, label: str) -> Key:
    return parse(message.exact.value, width, label)


def _optional(message: p4r.FieldMatch, width: int, label: str) -> Key:
    return parse(message.optional.value, width, label)


def _lpm(message: p4r.FieldMatch, width: int, label: str) -> Key:
    length = message.lpm.prefix_len
    if not 0 < length <= width:
        raise invalid(f"{label}: prefix length {length}; it must be 1 to {width}, or the field omitted")
    value = parse(message.lpm.value, width, label)
    if value & ((1 << width - length) - 1):
        raise invalid(f"{label}: {value:#x} has bits beyond its prefix of {length}")
    return value, length


def _ternary(message: p4r.FieldMatch, width: int, label: str) -> Key:
    value = parse(message.ternary.value, width, label)
    mask = parse(message.ternary.mask, width, f"{label}: mask")
    if not mask:
        raise invalid(f"{label}: the mask is 0; omit the field instead")
    if value & ~mask:
        raise invalid(f"{label}: {value:#x} has bits outside its mask {mask:#x}")
    return value, mask


def _range(message: p4r.FieldMatch, width: int, label: str) -> Key:
    low = parse(message.range.low, width, f"{label}: low")
    high = parse(message.range.high, width, f"{label}: high")
    if low > high:
        raise invalid(f"{label}: low {low:#x} is above high {high:#x}")
    if low == 0 and high == (1 << width) - 1:
        raise invalid(f"{label}: the range has every value; omit the field instead")
    return low, high


_DECODERS: dict[MatchKind, Callable[[p4r.FieldMatch, int, str], Key]] = {
    MatchKind.EXACT: _exact,
    MatchKind.OPTIONAL: _optional,
    MatchKind.LPM: _lpm,
    MatchKind.TERNARY: _ternary,
    MatchKind.RANGE: _range,
}


def encode_match(key: int | tuple[int, int], field: MatchField, message: p4r.FieldMatch) -> None:
    """Write a key into a match field, in canonical form."""
    message.field_id = field.id
    if isinstance(key, int):
        exact_or_optional = message.exact if field.kind is MatchKind.EXACT else message.optional
        exact_or_optional.value = to_bytes(key)
    elif field.kind is MatchKind.LPM:
        message.lpm.value, message.lpm.prefix_len = to_bytes(key[0]), key[1]
    elif field.kind is MatchKind.TERNARY:
        message.ternary.value, message.ternary.mask = map(to_bytes, key)
    else:
        message.range.low, message.range.high = map(to_bytes, key)
