"""The wire format, and its equality in the P4 headers and the tagger's C code."""

from __future__ import annotations

import ctypes
import re
import struct
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.tagger import program
from checkmate.wire import tag as wire
from tests.support.fuzz import damaged, fuzz
from tests.support.streams import copy_sequence

ROOT = Path(__file__).parents[2]
P4_HEADERS = ROOT / "p4src" / "include" / "headers.p4"
C_HEADER = ROOT / "checkmate" / "tagger" / "tagger.h"

U8, U16, U32 = st.integers(0, 255), st.integers(0, 0xFFFF), st.integers(0, wire.MODULUS - 1)
TAGS = st.builds(wire.Tag, sequence=U32, anchor=U32, shadow_id=U16, channel=U8, incarnation=U8)
U64, MACS = st.integers(0, (1 << 64) - 1), st.binary(min_size=16, max_size=16)
HELLOS = st.builds(wire.Hello, base=U32, boundary=U16, shadow_id=U16, channel=U8, incarnation=U8, time=U64)
ENDS = st.builds(wire.Ends, st.ip_addresses(v=4), U16, st.ip_addresses(v=4), U16)
C_BITS = {"__u8": 8, "__u16": 16, "__be16": 16, "__u32": 32, "__be32": 32}


def test_a_tag_byte_by_byte() -> None:
    """Design, section 2, field by field."""
    tag = wire.Tag(sequence=0x01020304, anchor=0x05060708, shadow_id=0x090A, channel=0x0B, incarnation=0x0C)
    assert tag.pack().hex() == "fd10c4ec0102030405060708090a0b0c"


def test_a_hello_byte_by_byte() -> None:
    """Design, section 4, field by field."""
    hello = wire.Hello(
        base=0x01020304,
        boundary=0x0506,
        shadow_id=0x0708,
        channel=9,
        incarnation=10,
        time=0x1112131415161718,
    )
    fields = "c4ec00020102030405060708090a00001112131415161718"
    mac = bytes(range(0xE0, 0xF0))
    assert hello.pack(mac).hex() == fields + mac.hex()
    ends = wire.Ends(IPv4Address("10.0.0.1"), 5000, IPv4Address("10.0.0.2"), 7400)
    assert hello.covered(ends).hex() == fields + "0a0000010a00000213881ce8"


@given(TAGS)
def test_a_tag_comes_back(tag: wire.Tag) -> None:
    assert len(tag.pack()) == wire.TAG_LENGTH
    assert wire.Tag.unpack(tag.pack()) == tag


@given(HELLOS, MACS)
def test_a_hello_comes_back(hello: wire.Hello, mac: bytes) -> None:
    assert len(mac) == wire.HELLO_MAC_LENGTH
    assert len(hello.pack(mac)) == wire.HELLO_LENGTH
    assert wire.Hello.unpack(hello.pack(mac)) == (hello, mac)


@given(st.tuples(HELLOS, ENDS), st.tuples(HELLOS, ENDS))
def test_a_mac_covers_every_field_and_both_ends(
    first: tuple[wire.Hello, wire.Ends], second: tuple[wire.Hello, wire.Ends]
) -> None:
    assert (first[0].covered(first[1]) == second[0].covered(second[1])) == (first == second)


@fuzz(200, payload=st.binary(max_size=60), hello=HELLOS, data=st.data())
def test_any_bytes_are_a_hello_or_refused(payload: bytes, hello: wire.Hello, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        payload = damaged(data, hello.pack(bytes(16)))
    try:
        hello, mac = wire.Hello.unpack(payload)
    except ValueError as error:
        assert str(error)
    else:
        assert hello.pack(mac) == payload


@fuzz(100, option=st.binary(max_size=20), tag=TAGS, data=st.data())
def test_any_option_is_a_tag_or_refused(option: bytes, tag: wire.Tag, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        option = damaged(data, tag.pack())
    try:
        unpacked = wire.Tag.unpack(option)
    except ValueError as error:
        assert str(error)
    else:
        assert unpacked.pack() == option


@pytest.mark.parametrize(("version", "old"), [(0, "the node"), (1, "the node"), (3, "the controller")])
@pytest.mark.parametrize("length", [4, 16, 40, 80])
def test_a_hello_of_another_version_names_the_old_side(version: int, old: str, length: int) -> None:
    with pytest.raises(
        wire.OtherHelloVersion, match=f"^{old} is old: .* version {version}, the controller's 2"
    ):
        wire.Hello.unpack(struct.pack("!I", wire.HELLO_MAGIC | version).ljust(length, b"\0"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (b"", "not 0"),
        (bytes(17), "not 17"),
        (b"\xfd\x10\xc4\xed" + bytes(12), "ExID 0xc4ed"),
        (bytes(16), "kind 0"),
    ],
)
def test_what_is_no_tag_is_refused(option: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wire.Tag.unpack(option)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "not 0"),
        (bytes(39), "not 39"),
        (bytes(40), "begins with 0x00000000"),
        (b"\xc4\xec\0\2" + bytes(10) + b"\0\1" + bytes(24), "not zero"),
        (b"\xc4\xec\0\2" + bytes(12), "not 16"),
    ],
)
def test_what_is_no_hello_is_refused(payload: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wire.Hello.unpack(payload)


@given(tag=TAGS, within=st.integers(0, 1 << 31), base=U32)
def test_a_copy_lands_at_its_place_in_the_stream(tag: wire.Tag, within: int, base: int) -> None:
    tcp_sequence = (tag.anchor + within) % wire.MODULUS
    copy = copy_sequence(tag, tcp_sequence, base)
    assert (copy + base) % wire.MODULUS == (tag.sequence + within) % wire.MODULUS
    # The switch can only add, so the entry holds -base.
    assert copy == (tag.sequence + (tcp_sequence - tag.anchor) + wire.minus(base)) % wire.MODULUS


def test_the_first_data_byte_is_number_0_behind_the_hello() -> None:
    assert (wire.STUB_ISN + 1) % wire.MODULUS == 0
    assert wire.copy_acknowledgement(0xFFFFFFF0) == 25


def p4_fields(header: str) -> list[tuple[str, int]]:
    body = re.search(rf"header {header} {{(.*?)}}", P4_HEADERS.read_text(), re.DOTALL)
    assert body, f"{P4_HEADERS.name} has no header {header}"
    return [(name, int(bits)) for bits, name in re.findall(r"bit<(\d+)>\s+(\w+);", body[1])]


def p4_constant(name: str) -> int:
    match = re.search(rf"const bit<\d+>\s+{name}\s*=\s*(\w+);", P4_HEADERS.read_text())
    assert match, f"{P4_HEADERS.name} has no constant {name}"
    return int(match[1], 0)


def c_fields(structure: str) -> list[tuple[str, int]]:
    body = re.search(rf"struct {structure} {{(.*?)\n}}", C_HEADER.read_text(), re.DOTALL)
    assert body, f"{C_HEADER.name} has no struct {structure}"
    return [(name, C_BITS[kind]) for kind, name in re.findall(r"(__\w+) (\w+);", body[1])]


def c_constant(name: str) -> int:
    match = re.search(rf"#define {name} (\w+)", C_HEADER.read_text())
    assert match, f"{C_HEADER.name} does not define {name}"
    return int(match[1], 0)


def packed_by(fields: list[tuple[str, int]], tag: wire.Tag) -> bytes:
    """Pack a tag in network order by a list of fields; P4 combines its first three fields."""
    start = {"kind": wire.TAG_KIND, "length": wire.TAG_LENGTH, "exid": wire.TAG_EXID}
    if fields[0][0] == "prefix":
        start = {"prefix": p4_constant("TAG_PREFIX")}
    values = start | {
        "sequence": tag.sequence,
        "anchor": tag.anchor,
        "shadow_id": tag.shadow_id,
        "channel": tag.channel,
        "incarnation": tag.incarnation,
    }
    assert [name for name, _ in fields] == list(values)
    return b"".join(values[name].to_bytes(bits // 8, "big") for name, bits in fields)


@given(TAGS)
def test_p4_and_c_lay_the_tag_out_as_python_does(tag: wire.Tag) -> None:
    assert packed_by(p4_fields("tag_t"), tag) == tag.pack()
    assert packed_by(c_fields("tag_option"), tag) == tag.pack()


def test_p4_has_the_same_constants() -> None:
    prefix = wire.Tag(0, 0, 0, 0, 0).pack()[:4]
    assert p4_constant("TAG_PREFIX").to_bytes(4, "big") == prefix
    assert p4_constant("TAG_BYTES") == wire.TAG_LENGTH
    assert p4_constant("OFFSET_TAG") * 4 == 20 + wire.TAG_LENGTH
    assert p4_constant("OFFSET_TIMESTAMPS_TAG") * 4 == 20 + 12 + wire.TAG_LENGTH
    assert p4_constant("TIMESTAMPS_TAG_BYTES") == 12 + wire.TAG_LENGTH
    assert p4_constant("TIMESTAMPS_PREFIX").to_bytes(4, "big") == b"\x01\x01\x08\x0a"


def test_c_has_the_same_constants() -> None:
    assert c_constant("TAG_KIND") == wire.TAG_KIND
    assert c_constant("TAG_LENGTH") == wire.TAG_LENGTH
    assert c_constant("TAG_EXID") == wire.TAG_EXID
    assert c_constant("TAGGER_RANGES") == program.RANGES


def c_sizes(structure: type[ctypes.Structure]) -> list[tuple[str, int]]:
    return [(name, 8 * getattr(structure, name).size) for name, *_ in structure._fields_]


def test_the_shared_structures_are_the_same() -> None:
    assert c_fields("tag_range") == c_sizes(program.Range)
    assert c_fields("tagged_socket") == c_sizes(program.SocketState)[:-1]
    assert "struct tag_range ranges[TAGGER_RANGES];" in C_HEADER.read_text()
    assert ctypes.sizeof(program.SocketState) == 24 + 16 * program.RANGES
    state, values = program.SocketState(), (1, 2, 3, 4, 5, 6)
    state.set_range(program.RANGES + 7, *values)
    assert tuple(getattr(state.ranges[7], name) for name, _ in program.Range._fields_) == values
    assert not state.ranges[6].incarnation and not state.ranges[8].anchor
    faults = re.findall(r"FAULT_(\w+),", C_HEADER.read_text())
    assert [name.lower() for name in faults] == list(program.FAULTS)
