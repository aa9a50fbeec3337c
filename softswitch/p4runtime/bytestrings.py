"""Integers as P4Runtime byte strings (P4Runtime specification, section "Bytestrings")."""

from __future__ import annotations


def to_bytes(value: int) -> bytes:
    """Return the canonical, shortest big-endian form."""
    return value.to_bytes((value.bit_length() + 7) >> 3 or 1)


def parse(value: bytes, width: int, what: str) -> int:
    """Return the integer of a byte string; raise `ValueError` if it is empty or wider than `width` bits."""
    if not value:
        raise ValueError(f"{what} is missing or empty")
    number = int.from_bytes(value)
    if number >> width:
        raise ValueError(f"{what} is {number:#x}, which does not fit in {width} bits")
    return number
