"""Checksums and hashes (v1model's HashAlgorithm) over lists of fields.

A further algorithm is one line in `ALGORITHMS`. Fields of invalid headers are skipped, as in BMv2.
"""

from __future__ import annotations

import binascii
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from softswitch.codegen.emitter import Emitter, parse_hex
from softswitch.codegen.values import OPERATORS, Value, fit, number, paren
from softswitch.program.bmv2 import Json

ONES = 0xFFFF


def csum16(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071); an odd last byte is the upper half of a word."""
    total = int.from_bytes(data + bytes(len(data) % 2), "big")
    return -total % ONES if total else ONES


def _reflected_crc16_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC16 = _reflected_crc16_table()


def crc16(data: bytes) -> int:
    """Return CRC-16/ARC: polynomial 0x8005, reflected, initial value 0."""
    crc = 0
    for byte in data:
        crc = crc >> 8 ^ _CRC16[(crc ^ byte) & 0xFF]
    return crc


def crc_ccitt(data: bytes) -> int:
    """Return CRC-16/CCITT-FALSE: polynomial 0x1021, initial value 0xFFFF."""
    return binascii.crc_hqx(data, 0xFFFF)


def xor_words(size: int) -> Callable[[bytes], int]:
    """Return a function for the exclusive or of all words of `size` bytes; the last is padded with zeros."""

    def xor(data: bytes) -> int:
        total = 0
        for start in range(0, len(data), size):
            total ^= int.from_bytes(data[start : start + size].ljust(size, b"\0"), "big")
        return total

    return xor


def identity(data: bytes) -> int:
    """Return the first eight bytes as a number."""
    return int.from_bytes(data[:8], "big")


ALGORITHMS: dict[str, tuple[Callable[[bytes], int], int]] = {
    "csum16": (csum16, 16),
    "crc16": (crc16, 16),
    "crc16_custom": (crc16, 16),
    "crc32": (zlib.crc32, 32),
    "crc32_custom": (zlib.crc32, 32),
    "crcCCITT": (crc_ccitt, 16),
    "xor16": (xor_words(2), 16),
    "xor32": (xor_words(4), 32),
    "identity": (identity, 64),
}
"""Algorithm and width of its result, by BMv2's name. Custom CRCs use the standard parameters."""


def join_bits(items: Iterable[tuple[int, int, int]]) -> bytes:
    """Concatenate the bits of (present, value, width) items; pad the last byte with zeros."""
    total = bits = 0
    for present, value, width in items:
        if present:
            total = total << width | value
            bits += width
    return (total << -bits % 8).to_bytes((bits + 7) // 8, "big")


def payload_sum(frame: bytes, at: int) -> int:
    """Return the ones' complement sum of all 16-bit words from `at` on; 0 only if all are 0."""
    payload = memoryview(frame)[at:]
    total = int.from_bytes(payload, "big") << 8 * (len(payload) % 2)
    return total % ONES or (ONES if total else 0)


class _Run(NamedTuple):
    """Adjacent fields of one header (`None`: always present), as one unsigned value."""

    header: str | None
    value: Value
    width: int


def calculation(emitter: Emitter, name: str, *at: Json) -> Value:
    """Return the result of a calculation in the JSON, over the packet at this point of the code."""
    spec = emitter.config.calculations[name]
    if spec["algo"] not in ALGORITHMS:
        emitter.config.problem(f"hash algorithm {spec['algo']} is not supported", *at, spec)
        return number(0)
    function, width = ALGORITHMS[spec["algo"]]
    runs = _runs(emitter, spec, at)
    payload = any(item["type"] == "payload" for item in spec["input"])
    if function is csum16 and _word_aligned(runs, payload):
        return _inline_sum(emitter, runs, payload)
    items = "".join(f"({_present(emitter, run)}, {run.value.code}, {run.width}), " for run in runs)
    data = f"{emitter.bind('join_bits', join_bits)}(({items}))"
    if payload:
        data = f"{data} + frame[at:]"
        emitter.declare("at")
    return Value(f"{emitter.bind('hash', function, spec['algo'])}({data})", 0, (1 << width) - 1)


def _runs(emitter: Emitter, spec: Json, at: tuple[Json, ...]) -> list[_Run]:
    runs: list[_Run] = []
    for header, value, width in _merge_fields(emitter, spec, at):
        if runs and runs[-1].header == header and header is not None:
            wider = OPERATORS["|"](OPERATORS["<<"](runs[-1].value, number(width)), value)
            runs[-1] = _Run(header, wider, runs[-1].width + width)
        else:
            runs.append(_Run(header, value, width))
    return runs


def _merge_fields(emitter: Emitter, spec: Json, at: tuple[Json, ...]) -> list[tuple[str | None, Value, int]]:
    """Return fields and constants in order; fields that are adjacent in their header are merged."""
    spans: list[tuple[str, int, int] | tuple[Value, int]] = []
    for item in spec["input"]:
        if item["type"] == "hexstr":
            spans.append((number(parse_hex(item["value"])), item["bitwidth"]))
        elif item["type"] == "field" and item["value"][0] in emitter.plan.layouts:
            header, name = item["value"]
            emitter.load(item["value"])
            start, width, _ = emitter.plan.layouts[header].spans[name]
            last = spans[-1] if spans else None
            if last is not None and len(last) == 3 and last[0] == header and last[1] + last[2] == start:
                spans[-1] = (header, last[1], last[2] + width)
            else:
                spans.append((header, start, width))
        elif item["type"] == "field":
            width = emitter.width(item["value"])
            spans.append((fit(emitter.load(item["value"]), width), width))
        elif item["type"] != "payload":
            emitter.config.problem(f"checksum or hash over a {item['type']} is not supported", *at, spec)
    return [(s[0], _read(emitter, *s), s[2]) if len(s) == 3 else (None, s[0], s[1]) for s in spans]


def _read(emitter: Emitter, header: str, start: int, width: int) -> Value:
    """Return bits of a header; a whole one that is as it arrived is read from the frame, which is faster."""
    layout = emitter.plan.layouts[header]
    value = layout.read(start, width)
    original = emitter.original(header)
    if width != layout.header.bits or not original:
        return value
    code = f'int.from_bytes({original}, "big")'
    if not emitter.is_written(header):
        return replace(value, code=code, op="")
    return replace(value, code=f"{paren(value)} if {emitter.flag(header, 'dirty')} else {code}", op="if")


def _word_aligned(runs: list[_Run], payload: bool) -> bool:
    """Return whether word boundaries are independent of the validity of headers."""
    fixed = sum(run.width for run in runs if run.header is None)
    even = all(run.width % 16 == 0 for run in runs if run.header is not None)
    return even and (not payload or fixed % 16 == 0)


def _inline_sum(emitter: Emitter, runs: list[_Run], payload: bool) -> Value:
    """Return the checksum as a sum: 2**16 is 1 modulo 0xFFFF, so values of any width can be added."""
    terms = []
    position = 0
    for run in runs:
        position += run.width
        term = OPERATORS["<<"](run.value, number(-position % 16))
        if run.header is not None:
            term = Value(f"{paren(term)} if {_present(emitter, run)} else 0", op="if")
        terms.append(paren(term))
    if payload:
        emitter.declare("at")
        terms.append(f"{emitter.bind('payload_sum', payload_sum)}(frame, at)")
    emitter.line(f"_sum = {' + '.join(terms) or '0'}")
    return Value(f"-_sum % {ONES} if _sum else {ONES}", 0, ONES, "if")


def _present(emitter: Emitter, run: _Run) -> str:
    return "1" if run.header is None else emitter.flag(run.header, "valid")
