"""Headers in variables: reads and writes against one big number; hashes against known values."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st
from scapy.utils import checksum

from softswitch.codegen.hashes import ALGORITHMS, csum16, join_bits, payload_sum, xor_words
from softswitch.codegen.layout import Names, plan
from softswitch.codegen.values import number
from softswitch.program.bmv2 import Field, Header


@st.composite
def headers(draw: st.DrawFn) -> tuple[Header, set[str]]:
    """Return a header of whole bytes, and the fields that a program uses."""
    widths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=8))
    widths.append(8 - sum(widths) % 8)
    fields = tuple(Field(f"f{n}", width, width > 1 and draw(st.booleans())) for n, width in enumerate(widths))
    touched = draw(st.sets(st.sampled_from([f.name for f in fields]), min_size=1))
    return Header("h", "h_t", fields, False), touched


@given(headers(), st.data())
def test_fields_read_and_write_as_bits_of_the_header(
    header_and_touched: tuple[Header, set[str]], data: st.DataObject
) -> None:
    header, touched = header_and_touched
    layout = plan(header, touched, Names())
    content = data.draw(st.binary(min_size=layout.size, max_size=layout.size))
    names = [chunk.name for chunk in layout.chunks]
    packer = layout.packer()
    assert packer.size == layout.size
    environment = dict(zip(names, packer.unpack(content), strict=True))
    total = int.from_bytes(content, "big")
    for name in sorted(touched):
        start, width, signed = layout.spans[name]
        shift = header.bits - start - width
        value = total >> shift & ((1 << width) - 1)
        read = eval(layout.read_field(name).code, {}, environment)
        assert read == (value - (1 << width) if signed and value >> (width - 1) else value)
        new = data.draw(st.integers(-(1 << 80), 1 << 80))
        for target, code in layout.write_field(name, number(new)):
            environment[target] = eval(code, {}, environment)
        total = total & ~(((1 << width) - 1) << shift) | (new & ((1 << width) - 1)) << shift
        assert packer.pack(*(environment[n] for n in names)) == total.to_bytes(layout.size, "big")


@given(headers(), st.data())
def test_unused_chunks_are_skipped(header_and_touched: tuple[Header, set[str]], data: st.DataObject) -> None:
    layout = plan(header_and_touched[0], header_and_touched[1], Names())
    live = data.draw(
        st.lists(st.sampled_from(layout.chunks), unique=True).map(
            lambda chunks: sorted(chunks, key=lambda c: c.start)
        )
    )
    content = data.draw(st.binary(min_size=layout.size, max_size=layout.size))
    everything = dict(zip(layout.chunks, layout.packer().unpack(content), strict=True))
    assert layout.unpacker(live).unpack(content) == tuple(everything[chunk] for chunk in live)


@given(st.binary(max_size=100))
def test_csum16_is_the_internet_checksum(data: bytes) -> None:
    assert csum16(data) == checksum(data)
    assert payload_sum(b"head" + data, 4) % 0xFFFF == (0xFFFF - checksum(data)) % 0xFFFF


def test_crcs_have_their_check_values() -> None:
    """These are the usual check values of "123456789"."""
    text = b"123456789"
    results = {name: function(text) for name, (function, _) in ALGORITHMS.items()}
    assert results["crc16"] == results["crc16_custom"] == 0xBB3D
    assert results["crc32"] == results["crc32_custom"] == 0xCBF43926 == zlib.crc32(text)
    assert results["crcCCITT"] == 0x29B1
    assert results["identity"] == 0x3132333435363738
    assert xor_words(4)(text) == 0x31323334 ^ 0x35363738 ^ 0x39000000
    assert xor_words(2)(text) == 0x3132 ^ 0x3334 ^ 0x3536 ^ 0x3738 ^ 0x3900


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 40)).flatmap(
            lambda item: st.tuples(
                st.just(int(item[0])), st.integers(0, (1 << item[1]) - 1), st.just(item[1])
            )
        )
    )
)
def test_bits_are_joined_in_order(items: list[tuple[int, int, int]]) -> None:
    text = "".join(f"{value:0{width}b}" for present, value, width in items if present)
    text += "0" * (-len(text) % 8)
    assert join_bits(items) == bytes(int(text[n : n + 8], 2) for n in range(0, len(text), 8))
